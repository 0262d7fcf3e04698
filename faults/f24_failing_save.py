"""The thread that writes a save fails, is killed, or is still writing when the run ends."""

from __future__ import annotations

import errno
import random
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from faults import rig
from faults.judged import first_wrong, outcome, steps
from faults.outcome import Outcome
from faults.slowed import SlowDisk, SlowSteps
from halfstep.checkpoint.paths import CHECKPOINTS, DRAFT, Disk, list_drafts, list_generations
from halfstep.checkpoint.reading import verify_checkpoint
from halfstep.errors import BadData
from halfstep.journal.jsonl import read_events

ID = "F24"
WHAT = "a failed background save is reported at the next step; the end of a run waits for a save in progress"
FAILING, KILLED = {False: 3, True: 20}, {False: 1, True: 5}
SAVES = [3, 6, 9, 10, 12]
"""Steps that are saved."""
SETTINGS: dict[str, Any] = {"train.steps": 12, "checkpoint.keep": 50}
"""All are kept, so that each can be looked at afterwards."""
ERRORS = (OSError(errno.EIO, "Input/output error"), MemoryError(), RuntimeError("a defect"), ValueError("another"))
OPERATIONS = ("make_folder", "create", "write", "flush", "close", "flush_folder", "rename")


class Failing(Disk):
    """Raises once, in the n-th operation of a kind after the first save was begun."""

    def __init__(self, operation: str, nth: int, error: Exception) -> None:
        self._operation, self._left, self._error, self._saves = operation, nth, error, 0

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            self._count(name)
        return super().__getattribute__(name)

    def _count(self, name: str) -> None:
        if self._saves > 1 and name == self._operation:
            self._left -= 1
            if self._left == 0:
                raise self._error

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._saves += path.name.endswith(DRAFT)


class Breaking(SlowSteps):
    """A step that ends in an error of the task's own, right after a save was begun."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        self.steps = getattr(self, "steps", 0) + model.training
        if self.steps > SAVES[1]:
            raise BadData("a sample that the task cannot use")
        return super().loss(model, batch, metrics)


def run(full: bool) -> Outcome:
    chance, trials, late = random.Random(24), {}, list[int]()
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", SETTINGS, task=SlowSteps) == 0, rig.said(folder / "whole")
        whole = rig.ending(folder / "whole")
        for number in range(FAILING[full]):
            disk = Failing(chance.choice(OPERATIONS), chance.randint(1, 2), ERRORS[number % len(ERRORS)])
            trials[f"failing {number}"] = _failing(folder / f"failing-{number}", disk, whole, late)
        for number in range(KILLED[full]):
            trials[f"killed {number}"] = _killed(folder / f"killed-{number}", chance.randint(2, 4), whole)
        trials["still writing at the end"] = _at_the_end(folder / "end", whole)
        trials["still writing when the task fails"] = _at_an_error(folder / "error")
    return outcome(trials, f"reported after {steps(max(late, default=0))}")


def _failing(folder: Path, disk: Disk, whole: rig.Ending, late: list[int]) -> str | None:
    """Adds to `late` how many steps came before the failure was told."""
    return first_wrong(
        ("one failure does not end a run", lambda: rig.run(folder, SETTINGS, disk=disk, task=SlowSteps) == 0),
        ("it is told, and within one step", lambda: not late.append(_told_after(folder)) and 0 <= late[-1] <= 1),
        ("the others are saved", lambda: len(rig.committed(folder)) == len(SAVES) - 1),
        ("all that is said to be saved is whole", lambda: set(rig.committed(folder)) <= set(_whole(folder))),
        ("no draft is left", lambda: not list_drafts(folder / CHECKPOINTS)),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )


def _killed(folder: Path, save: int, whole: rig.Ending) -> str | None:
    """SIGKILL in the middle of a save, while the training goes on beside it."""
    process = rig.start(folder, SETTINGS, disk=SlowDisk(30.0, save), task=SlowSteps)
    # The word of the save before comes with the beginning of this one.
    begun = rig.wait_for(lambda: _drafts(folder) and rig.committed(folder) == SAVES[: save - 1])
    rig.kill(process)
    return first_wrong(
        ("the save was begun", lambda: begun),
        ("all that is said to be saved is whole", lambda: set(rig.committed(folder)) <= set(_whole(folder))),
        ("the run goes on", lambda: rig.run(folder, SETTINGS, task=SlowSteps) == 0),
        ("no draft is left", lambda: not _drafts(folder)),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )


def _at_the_end(folder: Path, whole: rig.Ending) -> str | None:
    disk = SlowDisk(0.5, len(SAVES))
    return first_wrong(
        ("the run ends", lambda: rig.run(folder, SETTINGS, disk=disk, task=SlowSteps) == 0),
        ("all is saved", lambda: rig.committed(folder) == SAVES and _whole(folder) == SAVES),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )


def _at_an_error(folder: Path) -> str | None:
    disk = SlowDisk(0.5, 2)
    return first_wrong(
        ("the run ends in the task's error", lambda: rig.run(folder, SETTINGS, disk=disk, task=Breaking) == 65),
        ("what was under way is saved", lambda: rig.committed(folder) == SAVES[:2] and _whole(folder) == SAVES[:2]),
    )


def _told_after(folder: Path) -> int:
    """The steps between a save and the word that it failed; -1 where that was never told."""
    step = 0
    for event in read_events(folder / "journal.jsonl"):
        step = event["attempt"] if event["event"] == "step" else step
        note = re.match(r"no checkpoint of step (\d+): .*\(1 in a row, 3 end the run\)", event.get("text", ""))
        if note:
            return step - int(note[1])
    return -1


def _whole(folder: Path) -> list[int]:
    return sorted(
        one.attempt for one in list_generations(folder / CHECKPOINTS) if verify_checkpoint(one).problem is None
    )


def _drafts(folder: Path) -> list[Path]:
    return list_drafts(folder / CHECKPOINTS)
