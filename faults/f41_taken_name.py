"""The folder of a run is removed while it trains, and another run takes its name."""

from __future__ import annotations

import random
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.slowed import SlowSteps
from faults.taken_folders import OTHER, WORLDS, disturbed
from halfstep.ownership import LOCK

ID = "F41"
WHAT = "a run whose folder is replaced by another run's ends with 73 on all ranks, and changes nothing there"
TAKEN = 73
SMALL = (("one rank", "an unfinished run"), ("fsdp", "another token"))
TIMES = 2


def run(full: bool) -> Outcome:
    chance, trials = random.Random(41), {}
    with rig.scratch() as folder:
        ways = _ways(folder)
        chosen = [(world, way) for world in WORLDS for way in ways] * TIMES if full else SMALL
        for number, (world, way) in enumerate(chosen):
            place, step = folder / f"run-{number}", 10 * chance.randint(1, 2) + chance.randint(2, 5)
            said = f"{place} is no longer this run's folder"
            trials[f"{way}, {world} {number}"] = disturbed(place, world, step, _on(ways[way], place), TAKEN, said)
        if full:
            trials["the other run"] = _went_on(folder / "run-0", folder / "finished")
    return outcome(trials, "0 files of another run touched")


def _on(way: Callable[[Path], None], place: Path) -> Callable[[], None]:
    return lambda: way(place)


def _ways(folder: Path) -> dict[str, Callable[[Path], None]]:
    """How another run comes to the folder; its own folder is copied, which takes less time than to train there."""
    process = rig.start(folder / "unfinished", OTHER, task=SlowSteps)
    assert rig.wait_for(lambda: len(rig.committed(folder / "unfinished")) > 1)
    rig.kill(process)
    assert rig.run(folder / "finished", OTHER) == 0, rig.said(folder / "finished")

    def exchange(place: Path, other: str) -> None:
        shutil.rmtree(place)
        shutil.copytree(folder / other, place)

    return {
        "an unfinished run": lambda place: exchange(place, "unfinished"),
        "a finished run": lambda place: exchange(place, "finished"),
        "another lock": _new_lock,
        "another token": lambda place: _rewrite(place, secrets.token_hex(8)),
        "no token": lambda place: (place / LOCK).write_bytes(b""),
    }


def _new_lock(place: Path) -> None:
    text = (place / LOCK).read_bytes()
    (place / LOCK).unlink()
    (place / LOCK).write_bytes(text)


def _rewrite(place: Path, token: str) -> None:
    """What a second launch does where locks exclude nobody: the file stays, and its text is another one."""
    words = (place / LOCK).read_text()
    assert '"launch": "' in words
    begin = words.index('"launch": "') + len('"launch": "')
    (place / LOCK).write_text(f"{words[:begin]}{token}{words[begin + 16 :]}")


def _went_on(place: Path, whole: Path) -> str | None:
    return first_wrong(
        ("it goes on to its end", lambda: rig.run(place, OTHER) == 0),
        ("with the same bits", lambda: rig.ending(place) == rig.ending(whole)),
    )
