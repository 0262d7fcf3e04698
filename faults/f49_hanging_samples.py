"""Samples of one batch that hang, in an evaluation and in training: each is given up, and named at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import get_worker_info

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.shortened import Shortened, as_command
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from tests.support.tiny_task import Points, Tiny

ID = "F49"
WHAT = "hanging samples that together exceed the watchdog's timeout are each skipped and named; the run continues"
HANGS = (0, 1, 2, 3, 4, 5, 6)
"""Samples of the first batch."""
EACH = {False: 1, True: 4}
SHORT = {"data.worker_processes.POLL": 0.25, "data.loader.POLL": 0.25, "data.worker_processes.PATIENCE": 0.25}
TIMEOUT = 6.0
"""Seconds without progress; the samples together take longer."""
# Three epochs: from the second one on, every sample of the set is read once more.
SETTINGS: dict[str, Any] = {"train.steps": 48, "train.num_workers": 2, "data.timeout": 1.0, "world.timeout": TIMEOUT}


class HangingPoints(Points):
    def __init__(self, inner: Points, flag: Path) -> None:
        self.__dict__.update(inner.__dict__)
        self._flag = flag

    def read(self, index: int) -> dict[str, Tensor]:
        if index in HANGS and self._flag.exists() and get_worker_info() is not None:
            time.sleep(3600.0)
        return super().read(index)


class HangsInEvaluation(Tiny):
    split = "val"

    def source(self, split: Any) -> Points:
        points = super().source(split)
        return HangingPoints(points, Path(f"{self.recipe.run.dir}.flag")) if split == self.split else points


class HangsInTraining(HangsInEvaluation):
    split = "train"


TASKS = {False: (HangsInEvaluation,), True: (HangsInEvaluation, HangsInTraining)}


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for task in TASKS[full]:
            for number in range(EACH[full]):
                name = f"{task.__name__} {number}"
                began = time.monotonic()
                trials[name] = _hung(folder / name.replace(" ", "-"), task)
                slowest = max(slowest, time.monotonic() - began)
    return outcome(trials, f"a run of {slowest:.1f}s, {len(HANGS)} samples given up, watchdog after {TIMEOUT:g}s")


def _hung(folder: Path, task: type[Tiny]) -> str | None:
    process = rig.start(folder, SETTINGS, task=task, before=Shortened(SHORT, as_command))
    # After the first evaluation: the first time of a phase has another limit.
    rig.wait_for(lambda: process.exitcode is not None or rig.last_step(folder) > 10)
    Path(f"{folder}.flag").touch()
    code = rig.ended(process)
    events = list(iterate_saved_events(folder / JOURNAL))
    notes = [event["text"] for event in events if event["event"] == "note" and "is given up" in event["text"]]
    return first_wrong(
        (f"exit code {code}", lambda: code == 0),
        (f"each is named: {notes}", lambda: {f"point {n}" for n in HANGS} <= {one.split(" is ")[0] for one in notes}),
        ("and counted", lambda: sum(event["event"] == "bad_sample" for event in events) >= len(HANGS)),
    )
