"""A run that is killed at a point of a save that has a name, and is started again."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from faults import rig
from faults.judged import steps
from faults.killing import POINTS, KillAt, Point
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.checkpoint.reading import find_newest_intact
from halfstep.journal.jsonl import read_events

ID = "F20"
WHAT = "a run killed at any point of a save resumes from that save or the previous one, with the same result"
TIMES = 10
FEWER = ("before the rename", "after the rename", "in the middle of removing an old one")
"""Points of the small form."""
SHORT: Mapping[str, Any] = {"train.steps": 30}
"""Three epochs, and a dozen saves."""
FIRST, LAST = 3, 10
"""Saves at which it happens: from the third on, old ones are removed."""


class Came(NamedTuple):
    """What a killed run came to."""

    problem: str
    """What went wrong, or nothing."""
    lost: int = 0
    """Steps that were acknowledged as saved, and are gone."""
    again: int = 0
    """Steps that had to be done again."""


def run(full: bool) -> Outcome:
    chance = random.Random(20)
    trials = [(name, point) for name, point in POINTS.items() for _ in range(TIMES) if full or name in FEWER]
    if not full:
        trials = trials[::TIMES]
    came: list[Came] = []
    with rig.scratch() as folder:
        assert rig.run(folder / "reference", SHORT) == 0, rig.said(folder / "reference")
        reference = rig.ending(folder / "reference")
        for number, (_, point) in enumerate(trials):
            came.append(killed_and_resumed(folder / str(number), point, chance.randint(FIRST, LAST), reference))
    wrong = [f"{name}: {one.problem}" for (name, _), one in zip(trials, came, strict=True) if one.problem]
    lost, again = sum(one.lost for one in came), max(one.again for one in came)
    worst = f"{steps(lost)} lost of those acknowledged, {steps(again)} done again"
    return Outcome(len(trials) - len(wrong), len(trials), "; ".join([*wrong[:3], worst]))


def killed_and_resumed(folder: Path, point: Point, save: int, reference: rig.Ending, **more: Any) -> Came:
    code = rig.run(folder, SHORT, disk=KillAt(point, save), **more)
    if code != -signal.SIGKILL:
        return Came(f"not killed, but ended with {code} {rig.said(folder)}")
    saved = max(rig.committed(folder), default=0)
    lost, again = acknowledged_lost(folder, saved), max(0, rig.last_step(folder) - newest(folder))
    return Came(
        _resumed(folder, saved, reference, more) if not lost else f"{steps(lost)} before {saved} lost", lost, again
    )


def _resumed(folder: Path, saved: int, reference: rig.Ending, more: Mapping[str, Any]) -> str:
    """What went wrong when the run was started again, or nothing."""
    code = rig.run(folder, SHORT, **more)
    if code:
        return f"started again, it ended with {code}: {rig.said(folder)}"
    if saved and from_nothing(folder):
        return "started again from nothing"
    return "" if rig.ending(folder) == reference else "another end"


def acknowledged_lost(folder: Path, saved: int) -> int:
    """Steps between the newest checkpoint and the one that was said to be saved."""
    return max(0, saved - newest(folder))


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0 without one."""
    verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    return 0 if verdict is None else verdict.generation.attempt


def from_nothing(folder: Path) -> bool:
    """Whether the last start went on from no checkpoint."""
    starts = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "start"]
    return not (starts[-1].get("resumed") or {}).get("checkpoint")
