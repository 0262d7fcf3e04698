"""A run that is killed at a point of a save that has a name, and is started again."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults import rig
from faults.killing import POINTS, KillAt, Point
from faults.outcome import Outcome
from halfstep.train.checkpoint.generation import CHECKPOINTS
from halfstep.train.checkpoint.reading import newest_whole
from halfstep.train.journal.jsonl import read_events

ID = "F20"
WHAT = "a run that is killed at any point of a save goes on from that save or the one before, to the same end"
TIMES = 10
FEWER = ("before the rename", "after the rename", "in the middle of removing an old one")
"""Points of the small form."""
SHORT: Mapping[str, Any] = {"train.steps": 30}
"""Three epochs, and a dozen saves."""
FIRST, LAST = 3, 10
"""Saves at which it happens: from the third on, old ones are removed."""


def run(full: bool) -> Outcome:
    chance = random.Random(20)
    trials = [(name, point) for name, point in POINTS.items() for _ in range(TIMES) if full or name in FEWER]
    if not full:
        trials = trials[::TIMES]
    wrong: list[str] = []
    with rig.scratch() as folder:
        assert rig.run(folder / "reference", SHORT) == 0, rig.said(folder / "reference")
        reference = rig.ending(folder / "reference")
        for number, (name, point) in enumerate(trials):
            problem = killed_and_resumed(folder / str(number), point, chance.randint(FIRST, LAST), reference)
            wrong += [f"{name}: {problem}"] if problem else []
    return Outcome(len(trials) - len(wrong), len(trials), "; ".join(wrong[:3]) or "0 acknowledged lost")


def killed_and_resumed(folder: Path, point: Point, save: int, reference: rig.Ending, **more: Any) -> str:
    """What went wrong, or nothing."""
    code = rig.run(folder, SHORT, disk=KillAt(point, save), **more)
    if code != -signal.SIGKILL:
        return f"not killed, but ended with {code} {rig.said(folder)}"
    saved = max(rig.committed(folder), default=0)
    problem = lost(folder, saved)
    if problem:
        return problem
    code = rig.run(folder, SHORT, **more)
    if code:
        return f"started again, it ended with {code}: {rig.said(folder)}"
    if saved and from_nothing(folder):
        return "started again from nothing"
    return "" if rig.ending(folder) == reference else "another end"


def lost(folder: Path, saved: int) -> str:
    """Whether a step that was acknowledged is gone, in words."""
    verdict, _ = newest_whole(folder / CHECKPOINTS)
    newest = 0 if verdict is None else verdict.generation.attempt
    return f"step {saved} was saved, the newest is {newest}" if newest < saved else ""


def from_nothing(folder: Path) -> bool:
    """Whether the last start went on from no checkpoint."""
    starts = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "start"]
    return not (starts[-1].get("resumed") or {}).get("checkpoint")
