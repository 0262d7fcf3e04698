"""A rank that is lost in a save or in an evaluation: the others end soon, and say so without a traceback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from faults import on_two, rig
from faults.job import HALVED, Job
from faults.judged import first_wrong, outcome
from faults.killing import POINTS, KillAt
from faults.outcome import Outcome
from faults.shortened import Shortened
from faults.slowed import marker
from faults.trouble import KINDS
from halfstep.checkpoint.paths import Disk
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from tests.support.tiny_task import Tiny

ID = "F46"
WHAT = "a rank lost in a save or an evaluation ends the others with 76 within 15 s, with its number, without traceback"
MODES = {False: ("ddp",), True: ("ddp", "fsdp")}
SAVES = ("in the middle of the tensors", "before the tensors are flushed", "after the tensors are flushed")
"""Points of a save on a rank that is not the first."""
EVALUATIONS = ("kill", "linger")
LATEST = {False: 45.0, True: 15.0}
SHORT = {"peers.SETTLED": 0.2, "train.peer_watch.GRACE": 1.0}
SETTINGS: dict[str, Any] = {**HALVED, "train.steps": 20, "world.timeout": 120.0}
SAVE, LOST = 2, 76


class LostInEvaluation(Tiny):
    """Rank 1 dies in the first evaluation of the first launch, in its second batch."""

    kind, batches = "kill", 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        if not model.training and os.environ.get("RANK") == "1":
            type(self).batches += 1
            mark = marker(self.recipe.run.dir)
            if type(self).batches == 2 and not mark.exists():
                mark.touch()
                KINDS[self.kind]()
        return super().loss(model, batch, metrics)


class LostSilently(LostInEvaluation):
    kind = "linger"


TASKS = {"kill": LostInEvaluation, "linger": LostSilently}


class MarkedKill(KillAt):
    """Only in the first launch."""

    def __init__(self, point: str, folder: Path) -> None:
        super().__init__(POINTS[point], SAVE)
        self._mark = str(marker(folder))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)

    def create(self, path: Path) -> int:
        # Rank 0 alone makes the folder of a save: this one counts its own files.
        self._saves += path.name.endswith(".safetensors")
        return super().create(path)

    def _at(self, operation: str, name: str, do: Any) -> None:
        is_due = self._saves >= self._save and operation == self._point.operation and name.endswith(self._point.ends)
        if is_due:
            Path(self._mark).touch()
        super()._at(operation, name, do)


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for mode in MODES[full]:
            whole = folder / f"whole-{mode}"
            settings = {**SETTINGS, "world.mode": mode}
            if full:
                assert Job(whole).run(settings) == [0, 0], rig.said(whole, 0)
            for point in SAVES if full else SAVES[-1:]:
                own = folder / f"{mode}-{point.replace(' ', '-')}"
                disks: dict[int, Disk] = {1: MarkedKill(point, own)}
                trials[f"{mode}, {point}"], seconds = _lost(Job(own), settings, full, whole, disks=disks)
                slowest = max(slowest, seconds)
            for kind in EVALUATIONS if full else EVALUATIONS[-1:]:
                own = folder / f"{mode}-evaluation-{kind}"
                trials[f"{mode}, {kind} in an evaluation"], seconds = _lost(
                    Job(own), settings, full, whole, task=TASKS[kind]
                )
                slowest = max(slowest, seconds)
    return outcome(trials, f"ended after {slowest:.1f}s")


def _lost(job: Job, settings: dict[str, Any], full: bool, whole: Path, **more: Any) -> tuple[str | None, float]:
    job.start(settings, before=Shortened({} if full else SHORT), **more)
    begun = rig.wait_for(lambda: marker(job.folder).exists() or job.ranks[0].exitcode is not None)
    code, seconds = job.ended(0, LATEST[full] + 10.0)
    told, said = job.statuses()[0], job.said(0)
    job.end()
    ends = [event for event in iterate_saved_events(job.folder / JOURNAL) if event["event"] == "end"]
    wrong = first_wrong(
        ("it was lost", lambda: begun and marker(job.folder).exists()),
        (f"exit code {code} after {seconds:.1f} s", lambda: code == LOST and seconds <= LATEST[full]),
        (f"the rank is named: {told.get('reason')}", lambda: "rank 1 is gone" in told["reason"]),
        (f"no traceback: {said}", lambda: "Traceback" not in said and not any("error" in end for end in ends)),
        ("a restart comes to the end", lambda: not full or job.run(settings, attempt=1) == [0, 0]),
        ("it is the same run to the bit", lambda: not full or on_two.same(job.folder, whole)),
    )
    return wrong, seconds
