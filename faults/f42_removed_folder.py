"""The folder of a run is removed, moved or cleared while it trains, and nobody takes its place."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.slowed import SlowSteps
from faults.taken_folders import SETTINGS, WORLDS, disturbed
from halfstep.ownership import LOCK

ID = "F42"
WHAT = (
    "a run whose folder is removed or moved ends with 74 on all ranks and creates nothing; a moved one resumes exactly"
)
GONE = 74
WAYS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda place: place.rename(_moved(place)),
    "without its lock": lambda place: (place / LOCK).unlink(),
    "with its parent": lambda place: _exchange_parent(place.parent),
}
SMALL = (("one rank", "removed", "SIGTERM"), ("ddp", "moved", ""))
MOVED = {**SETTINGS, "train.steps": 40}


def run(full: bool) -> Outcome:
    chance, trials = random.Random(42), {}
    with rig.scratch() as folder:
        every = [(world, way, asked) for world in WORLDS for way in WAYS for asked in ("", "SIGTERM")]
        for number, (world, way, asked) in enumerate(every if full else SMALL):
            place, step = folder / str(number) / "run", 10 * chance.randint(1, 2) + chance.randint(2, 5)
            place.parent.mkdir()
            said = f"{place / LOCK} is gone"
            trials[f"{way} {asked}, {world}"] = disturbed(place, world, step, _on(WAYS[way], place), GONE, said, asked)
        if full:
            trials["a moved run"] = _went_on(folder)
    return outcome(trials, "0 files created")


def _on(way: Callable[[Path], object], place: Path) -> Callable[[], object]:
    return lambda: way(place)


def _exchange_parent(parent: Path) -> None:
    parent.rename(parent.with_name(f"{parent.name}-moved"))
    parent.mkdir()


def _moved(place: Path) -> Path:
    return place.with_name("moved")


def _went_on(folder: Path) -> str | None:
    """A run that is moved is resumed in its new place, and moved back."""
    assert rig.run(folder / "whole", MOVED) == 0, rig.said(folder / "whole")
    place = folder / "run"
    process = rig.start(place, MOVED, task=SlowSteps)
    begun = rig.wait_for(lambda: rig.last_step(place) >= 12)
    place.rename(_moved(place))
    code = rig.ended(process)
    return first_wrong(
        ("it had begun, and ended", lambda: begun and code == GONE),
        ("nothing is in the old place", lambda: not place.exists()),
        ("it goes on in the new place", lambda: rig.run(_moved(place), MOVED) == 0),
        ("with the same bits", lambda: rig.ending(_moved(place)) == rig.ending(folder / "whole")),
    )
