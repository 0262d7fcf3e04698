"""Real saves, recorded, cut off after every operation and in the middle of every write, and read by the real reader."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from faults.crash_states import MODELS, RUN, Folder, Recording, Replay, Tree, build, left, on_disk
from faults.outcome import Outcome
from halfstep.checkpoint import commit as protocol
from halfstep.checkpoint import reading
from halfstep.checkpoint.paths import BAD, CheckpointDir, Disk, remove_unfinished_saves
from halfstep.errors import HalfstepError
from tests.support.digest import digest_of

RESUMED, ZERO, REFUSED, MIXED, LOST, STUCK = "resumed", "from zero", "refused", "mixed", "lost", "stuck"
"""From the old state or the new one; as if nothing had been saved; with an error; from a bit of both; from an older one
than was promised; and rightly, but the next save came to nothing."""
NEXT = 999
"""The serial of a save after the crash."""


class Save(NamedTuple):
    """The serial is in everything that is written, so that no two saves can be mixed unnoticed."""

    serial: int
    attempt: int

    def snapshot(self, rank: int) -> protocol.RankSnapshot:
        chance = torch.Generator().manual_seed(1000 * self.serial + rank)
        names = ["weights", "moments", "average"] if rank == 0 else []
        tensors = {name: torch.rand(5, 7, generator=chance) for name in [*names, f"own {rank}"]}
        return protocol.RankSnapshot(self.attempt, {"serial": self.serial, "rank": rank}, tensors)


@dataclass
class Seat:
    """One of several threads that stand for the processes of a run."""

    rank: int
    size: int
    told: list[str]
    all_there: threading.Barrier

    def decide(self, text: str, conclude: Callable[[list[str]], str]) -> str:
        self.told[self.rank] = text
        self.all_there.wait(10)
        if self.rank == 0:
            self.told[:] = [conclude(list(self.told))] * self.size
        self.all_there.wait(10)
        return self.told[self.rank]

    def leave(self, seconds: float) -> None:
        pass


def commit_together(
    folder: Path, snapshots: Sequence[protocol.RankSnapshot], *, keep: int, disks: Sequence[Disk]
) -> list[CheckpointDir | Exception]:
    """What a save came to on each rank."""
    size = len(snapshots)
    told, barrier = [""] * size, threading.Barrier(size)

    def one(rank: int) -> CheckpointDir | Exception:
        seat = Seat(rank, size, told, barrier)
        try:
            return protocol.commit_checkpoint(folder, snapshots[rank], keep=keep, disk=disks[rank], party=seat)
        except Exception as error:
            return error

    if size == 1:
        return [one(0)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


class Story:
    """Saves that were there, then saves that are recorded, and what must be found after a crash in the middle."""

    def __init__(self, place: Path, *, ranks: int = 1, keep: int = 2) -> None:
        self.place, self.ranks, self.keep = place, ranks, keep
        self.folder = place / RUN
        self.folder.parent.mkdir()
        self.disk = Recording()
        self._saves: list[tuple[Save, int, int]] = []
        self._before: Save | None = None
        self._base = Folder()

    def save(self, save: Save) -> None:
        """With a real commit, which returns, so that from here on it must be found."""
        began = len(self.disk.operations)
        for one in commit_all(self.folder, save, self.ranks, self.keep, self.disk):
            if isinstance(one, Exception):
                raise one
        self._saves.append((save, began, len(self.disk.operations)))

    def begin(self, newest: Save | None) -> None:
        """What is there now was there before; `newest` is the newest of it that is whole."""
        self._base, self._before, self._saves = on_disk(self.place), newest, []
        self.disk.operations.clear()
        if newest is None:
            self._base.flushed.clear()  # the run's own folder is as new as its first checkpoint

    def allowed(self, cut: int) -> set[int | None]:
        """Serials of the newest save that was acknowledged by then, and of one in flight."""
        done = [save.serial for save, _, end in self._saves if end <= cut]
        flying = {save.serial for save, begin, end in self._saves if begin <= cut < end}
        before = None if self._before is None else self._before.serial
        return {done[-1] if done else before, *flying}

    def states(self) -> Iterator[tuple[int, Tree]]:
        """After each operation, and in each write: how many were done, and what every model leaves."""
        replay = Replay(self.place, self._base)
        for cut, operation in enumerate([*self.disk.operations, None]):
            yield from ((cut, left(replay.base, model)) for model in MODELS)
            if operation is None:
                return
            if operation[0] == "write":
                content, half = operation[2], len(operation[2]) // 2
                replay.apply((*operation[:2], content[:half]))
                yield from ((cut, left(replay.base, model)) for model in MODELS)
                operation = (*operation[:2], content[half:])
            replay.apply(operation)

    def outcomes(self) -> Counter[str]:
        """How many states came to what."""
        found: dict[Tree, int | str | None] = {}
        counts: Counter[str] = Counter()
        for cut, tree in self.states():
            if tree not in found:
                found[tree] = self._resume(tree)
            counts[self._judged(found[tree], self.allowed(cut))] += 1
        return counts

    def _judged(self, serial: int | str | None, allowed: set[int | None]) -> str:
        if isinstance(serial, str):
            return serial
        if serial in allowed:
            return RESUMED
        return ZERO if serial is None else LOST

    def _resume(self, tree: Tree) -> int | str | None:
        """The serial that is found in a state, which then must take another save."""
        with tempfile.TemporaryDirectory(dir=self.place.parent) as here:
            folder = Path(here) / "place" / RUN
            build(tree, Path(here) / "place")
            folder.parent.mkdir(exist_ok=True)  # the first thing that a new run does
            try:
                found = serial_in(folder, self.ranks)
            except HalfstepError:
                return REFUSED
            return found if isinstance(found, str) or self._goes_on(folder) else STUCK

    def _goes_on(self, folder: Path) -> bool:
        """As a run does that was started again: what is damaged is set aside, drafts are removed, and it saves."""
        for one in reading.find_newest_intact(folder)[1]:
            one.generation.path.rename(one.generation.path.with_name(one.generation.name + BAD))
        remove_unfinished_saves(folder, Disk())
        told = commit_all(folder, Save(NEXT, 10**6), self.ranks, self.keep, Disk())
        clean = not any(path.name.endswith(".tmp") for path in folder.iterdir())
        return clean and not any(isinstance(one, Exception) for one in told) and serial_in(folder, self.ranks) == NEXT


def commit_all(folder: Path, save: Save, ranks: int, keep: int, disk: Disk) -> list[CheckpointDir | Exception]:
    return commit_together(folder, [save.snapshot(rank) for rank in range(ranks)], keep=keep, disks=[disk] * ranks)


def serial_in(folder: Path, ranks: int) -> int | str | None:
    """Of the save that a run would go on from; MIXED where a bit of it is not that save's."""
    verdict, _ = reading.find_newest_intact(folder)
    if verdict is None:
        return None
    parts = [reading.read_rank_state(verdict.generation, rank) for rank in range(ranks)]
    save = Save(parts[0][0]["serial"], verdict.generation.attempt)
    common = save.snapshot(0).tensors
    for rank, (plain, tensors) in enumerate(parts):
        own = save.snapshot(rank)
        if digest_of(plain, tensors) != digest_of(own.plain, {**common, **own.tensors}):
            return MIXED
    return save.serial


def outcome(counts: Counter[str]) -> Outcome:
    """Of a row: all states resume."""
    others = [f"{count} {what}" for what, count in sorted(counts.items()) if what not in (RESUMED, LOST, MIXED)]
    worst = [f"{counts[LOST]} lost", f"{counts[MIXED]} mixed", *others]
    return Outcome(counts[RESUMED], counts.total(), ", ".join(worst))
