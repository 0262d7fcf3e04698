"""The disk is full at some byte of a save: twice in a row, then three times in a row."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from faults import rig
from faults.judged import first_wrong, outcome, steps
from faults.outcome import Outcome
from halfstep.checkpoint.commit import CheckpointSaver, RankSnapshot, SaveResult
from halfstep.checkpoint.paths import CHECKPOINTS, DRAFT, Disk, list_drafts, list_generations
from halfstep.checkpoint.reading import verify_checkpoint
from halfstep.files import write_text
from halfstep.journal.jsonl import read_events
from halfstep.train import outputs
from halfstep.train.weights import save_weights
from tests.support.tiny_task import Tiny

ID = "F23"
WHAT = (
    "a full disk loses no saved data, is reported at once, and ends the run at the third failure; "
    "saving resumes once there is space"
)
TRIALS = {False: 2, True: 30}
ROOM = 27_000
"""Bytes: a little less than a save has."""
SAVED, FAILED = [3, 10], [6, 9, 12, 15, 18]
"""Steps whose saves have room, and those whose saves have none: two in a row, and three in a row."""
COUNTED = [1, 2, 1, 2, 3]
LATEST = 1
"""Steps until a failure is told."""
STORAGE = 74
_saving: list[Future[SaveResult]] = []
"""In the process of a run: the save in flight."""


class StepsAfterSaves(Tiny):
    """Steps that outlast a save: how busy the machine is does not decide at which of them a failure can be told."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        wait(_saving)
        return super().loss(model, batch, metrics)


def note_saves() -> None:
    """In the process of a run: `StepsAfterSaves` learns which save is in flight."""
    save = CheckpointSaver.save

    def noted(self: CheckpointSaver, snapshot: RankSnapshot) -> None:
        save(self, snapshot)
        _saving[:] = self._running

    CheckpointSaver.save = noted  # type: ignore[method-assign]


class Filling(Disk):
    """Out of room after so many bytes, in those saves that are named by their number."""

    def __init__(self, rooms: Mapping[int, int], reason: int) -> None:
        self._rooms, self._reason = dict(rooms), reason
        self._save, self._room = 0, 0

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        if path.name.endswith(DRAFT):
            self._save += 1
            self._room = self._rooms.get(self._save, 2**40)

    def write(self, file: int, content: bytes | memoryview) -> None:
        if self._reason == errno.EFBIG:
            with_limit(os.lseek(file, 0, os.SEEK_CUR) + self._room, partial(super().write, file, content))
        else:
            super().write(file, memoryview(content)[: self._room])
            if len(content) > self._room:
                raise OSError(self._reason, os.strerror(self._reason))
        self._room -= len(content)


def with_limit(size: int, write: Callable[[], Any]) -> None:
    """A write that the system itself stops where a file would become longer than `size`."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def no_room_for_weights() -> None:
    """In the process of a run: weights are cut off by the system; everything else has room."""
    outputs.save_weights = lambda *given: with_limit(600, partial(save_weights, *given))  # type: ignore[assignment]


def no_room_for_the_result() -> None:
    outputs.write_text = lambda *given: with_limit(100, partial(write_text, *given))  # type: ignore[assignment]


def run(full: bool) -> Outcome:
    chance, trials, late = random.Random(23), {}, list[int]()
    with rig.scratch() as folder:
        whole = {beside: _reference(folder / f"whole-{beside}", beside) for beside in (True, False)}
        for number in range(TRIALS[full]):
            reason = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)[number % 3]
            # A limit on the size of files is the whole process's: saves that are written beside it would share it.
            beside = reason != errno.EFBIG
            disk = Filling({save: chance.randrange(ROOM) for save in (2, 3, 5, 6, 7)}, reason)
            name = f"full-{number}"
            trials[name] = _filled(folder / name, disk, beside, whole[beside], late)
        for name, before in {"weights": no_room_for_weights, "result": no_room_for_the_result}.items():
            trials[name] = _without(folder / name, before, whole[False])
    return outcome(trials, f"reported after {steps(max(late, default=0))}")


def _settings(beside: bool) -> dict[str, Any]:
    return {"train.steps": 24, "checkpoint.background": beside}


def _reference(folder: Path, beside: bool) -> rig.Ending:
    assert rig.run(folder, _settings(beside)) == 0, rig.said(folder)
    return rig.ending(folder)


def _filled(folder: Path, disk: Disk, beside: bool, whole: rig.Ending, late: list[int]) -> str | None:
    """Adds to `late` how many steps came before a failure was told."""
    settings = _settings(beside)
    return first_wrong(
        (
            "the third in a row ends the run",
            lambda: rig.run(folder, settings, disk=disk, before=note_saves, task=StepsAfterSaves) == STORAGE,
        ),
        ("a failure is told with its count", lambda: _told(folder) == list(zip(FAILED, COUNTED, strict=True))),
        ("it is told soon", lambda: not late.append(_latest(folder)) and late[-1] <= LATEST),
        ("what was saved is told", lambda: rig.committed(folder) == SAVED),
        ("what was saved is whole", lambda: _whole(folder) == SAVED[::-1]),
        ("no draft is left", lambda: not list_drafts(folder / CHECKPOINTS)),
        ("with room, the run ends", lambda: rig.run(folder, settings) == 0),
        ("it saves again", lambda: rig.committed(folder)[-1] == 24),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )


def _without(folder: Path, before: Callable[[], None], whole: rig.Ending) -> str | None:
    """Weights and results are no checkpoints: a run goes to its end without them, and then says that it has none."""
    # The limit is the whole process's here too.
    settings = _settings(False)
    return first_wrong(
        ("the run ends in words", lambda: rig.run(folder, settings, before=before) == STORAGE),
        (
            "they say what is missing",
            lambda: bool(re.search("could not be written: .*File too large", rig.said(folder))),
        ),
        ("all steps were done", lambda: rig.committed(folder)[-1] == 24),
        ("nothing says that it is finished", lambda: not (folder / "result.json").exists()),
        ("with room, the run ends", lambda: rig.run(folder, settings) == 0),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )


_NOTE = re.compile(r"no checkpoint of step (\d+): .*\((\d) in a row, 3 end the run\)")


def _told(folder: Path) -> list[tuple[int, int]]:
    notes = [_NOTE.fullmatch(event.get("text", "")) for event in read_events(folder / "journal.jsonl")]
    return [(int(note[1]), int(note[2])) for note in notes if note]


def _latest(folder: Path) -> int:
    """The most steps that came between a save and the word that it failed."""
    most, step = 0, 0
    for event in read_events(folder / "journal.jsonl"):
        step = event["attempt"] if event["event"] == "step" else step
        note = _NOTE.fullmatch(event.get("text", ""))
        most = max(most, step - int(note[1])) if note else most
    return most


def _whole(folder: Path) -> list[int]:
    return [one.attempt for one in list_generations(folder / CHECKPOINTS) if verify_checkpoint(one).problem is None]
