"""Memory that ends in a step, in a save or in a worker, on one rank or on one of two, by a limit of the system."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults import rig
from faults.job import HALVED, Job, saved_step
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, Disk, list_generations
from tests.support.tiny_task import Points, Tiny

ID = "F38"
WHAT = "out of memory in a step, a save or a worker ends the run with 81, no rank waits, and saved runs resume"
TIMES = {False: 1, True: 5}
PLACES = ("step", "save", "worker", "device")
"""`device`: the error that torch raises for a GPU, in a step."""
ROOM, WANTED = 48 * 2**20, 512 * 2**20
"""Bytes that are left, and that are asked for."""
RECIPE: dict[str, Any] = {"train.steps": 16, "model.batchnorm": False, "train.num_workers": 0}
FULL, LOST, LATEST, STEP = 81, 76, 15.0, 8
MOST = 1e-6
"""How far the loss of a step in two halves may be from that of the whole one."""


def run(full: bool) -> Outcome:
    trials, furthest = {}, 0.0
    with rig.scratch() as folder:
        whole = folder / "whole"
        assert rig.run(whole, RECIPE) == 0, rig.said(whole)
        for place in PLACES:
            for number in range(TIMES[full]):
                ranks = 1 + (number + PLACES.index(place)) % 2
                name = f"{place} {number}, {ranks} ranks"
                trials[name], far = _starved(folder / f"{place}-{number}", place, ranks, whole)
                furthest = max(furthest, far)
    return outcome(trials, f"in half the memory, losses within {furthest:.1e}")


def _starved(folder: Path, place: str, ranks: int, whole: Path) -> tuple[str | None, float]:
    settings = {**RECIPE, **(HALVED if ranks == 2 else {}), "train.num_workers": 1 if place == "worker" else 0}
    mark = Path(f"{folder}.starved")
    hungry = Starved(place, ranks - 1, str(folder), str(mark))
    job = Job(folder, ranks).start(settings, before=hungry)
    begun = rig.wait_for(lambda: mark.exists() or job.ranks[-1].exitcode is not None)
    began = time.monotonic()
    codes = job.codes(LATEST)
    seconds, before = time.monotonic() - began, saved_step(folder)
    halved = {**settings, "train.batch_size": settings.get("train.batch_size", 8) // 2, "train.microbatches": 2}
    wrong = first_wrong(
        ("the memory ended", lambda: begun and mark.exists()),
        (f"exit codes {codes} after {seconds:.1f} s", lambda: codes == _codes(place, ranks)),
        ("it says so", lambda: all("emory" in job.said(rank) for rank in range(ranks) if codes[rank] == FULL)),
        ("a save is there and intact", lambda: before >= 3),
        ("it goes on in half the memory", lambda: Job(folder, ranks).run(halved) == [0] * ranks),
        ("to the same losses", lambda: _furthest(folder, whole) <= MOST),
    )
    return wrong, _furthest(folder, whole) if wrong is None else 0.0


def _codes(place: str, ranks: int) -> list[int]:
    """A failed step or save is made known to all; a rank that cannot read its samples is lost to the others."""
    return [LOST, FULL] if (place, ranks) == ("worker", 2) else [FULL] * ranks


def _losses(folder: Path) -> list[float]:
    return [float.fromhex(loss) for loss in rig.ending(folder).losses]


def _furthest(folder: Path, whole: Path) -> float:
    pairs = zip(_losses(folder), _losses(whole), strict=True)
    return max(abs(one - other) / abs(other) for one, other in pairs)


@dataclass
class Starved:
    """Takes the memory of one rank, in one place, once there is a save."""

    place: str
    rank: int
    folder: str
    mark: str

    def __call__(self) -> None:
        if os.environ.get("RANK", "0") == str(self.rank):
            getattr(self, f"_in_{self.place}")()

    def take(self) -> None:
        """Leave too little, and ask for more."""
        Path(self.mark).touch()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        torch.zeros(WANTED, dtype=torch.uint8)

    def _in_step(self) -> None:
        self._before_loss(self.take)

    def _in_device(self) -> None:
        def lacking() -> None:
            Path(self.mark).touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        self._before_loss(lacking)

    def _before_loss(self, act: Any) -> None:
        loss, steps = Tiny.loss, 0

        def hungry(task: Tiny, model: Any, batch: Any, metrics: Any = None) -> Any:
            nonlocal steps
            steps += model.training
            if steps == STEP and model.training:
                act()
            return loss(task, model, batch, metrics)

        Tiny.loss = hungry  # type: ignore[method-assign]

    def _in_save(self) -> None:
        write = Disk.write

        def hungry(disk: Disk, file: int, content: Any) -> None:
            if self._has_saved():
                self.take()
            write(disk, file, content)

        Disk.write = hungry  # type: ignore[method-assign]

    def _in_worker(self) -> None:
        read, trainer = Points.read, os.getpid()

        def hungry(points: Points, index: int) -> Any:
            if os.getpid() != trainer and self._has_saved():
                self.take()
            return read(points, index)

        Points.read = hungry  # type: ignore[method-assign]

    def _has_saved(self) -> bool:
        return bool(list_generations(Path(self.folder) / CHECKPOINTS))
