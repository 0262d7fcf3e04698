"""One run, killed again and again at random times, and started again each time."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

from torch import nn

from faults import child, rig
from faults.f20_named_kills import acknowledged_lost
from faults.judged import steps as steps_of
from faults.outcome import Outcome
from faults.slowed import SlowDisk
from halfstep.checkpoint.paths import CHECKPOINTS, list_drafts
from halfstep.checkpoint.reading import find_newest_intact
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from tests.support.tiny_task import Tiny

ID = "F21"
WHAT = "a run killed at random times loses no checkpoint, never restarts from zero, and ends with the same result"
KILLS = {False: 6, True: 100}
STEPS = {False: 30, True: 300}
EVERY: int = child.RECIPE["checkpoint.every_steps"]
PAUSE, SLOW = 0.25, 0.01
"""Seconds that a step and an operation on the disk take longer, so that the run lasts for all kills, and some of them
come in the middle of a save."""
SOONEST = 0.05


class Slow(Tiny):
    """The same numbers, later."""

    def loss(self, model: nn.Module, *given: Any) -> Any:
        time.sleep(PAUSE * model.training)
        return super().loss(model, *given)


class Killer:
    """Starts a run and kills it, and counts what must not be."""

    def __init__(self, folder: Path, kills: int, steps: int, begins: float) -> None:
        self.folder, self.n, self.steps, self.begins = folder, kills, steps, begins
        self.chance = random.Random(21)
        self.wasted = self.inside = self.before = self.newest = 0
        self.wrong: list[str] = []

    def kill_all(self) -> None:
        for number in range(self.n):
            saved, start = self.saved(), last_start(self.folder)
            problem = self._kill(self.n - number) or self._lost(saved) or self.begun_anew(saved, start)
            self.before += self._did_nothing(start)
            if problem:
                self.wrong.append(f"kill {number + 1}: {problem}")

    def _kill(self, left: int) -> str:
        # As many steps as are left for each kill that is left, on average: the run must not end before the last.
        steps = min(2 * (self.steps - self.newest) / left, self.steps - self.newest - 2 * EVERY)
        wait = self.chance.uniform(SOONEST, self.begins + steps * PAUSE)
        process = rig.start(self.folder, {"train.steps": self.steps}, task=Slow, disk=SlowDisk(each=SLOW))
        process.join(wait)
        rig.kill(process)
        ended = process.exitcode != -signal.SIGKILL
        return f"it had ended with {process.exitcode} {rig.said(self.folder)}" if ended else ""

    def _lost(self, saved: int) -> str:
        """What is gone of what was there before a kill, or more than may be, in words."""
        place = self.folder / CHECKPOINTS
        verdict, _ = find_newest_intact(place)
        self.newest = 0 if verdict is None else verdict.generation.attempt
        wasted = max(0, rig.last_step(self.folder) - self.newest)
        self.wasted, self.inside = max(self.wasted, wasted), self.inside + bool(list_drafts(place))
        # The interval, and once more as much where a save was in flight.
        gone = acknowledged_lost(self.folder, max(saved, self.saved()))
        if gone:
            return f"{steps_of(gone)} gone that were saved"
        return f"{wasted} steps lost" if wasted > 2 * EVERY else ""

    def _did_nothing(self, start: Any) -> bool:
        """Whether a launch was killed before its first step; `start` is what the one before it had said first."""
        events = [event for event in iterate_saved_events(self.folder / JOURNAL) if event["event"] in ("start", "step")]
        return not events or last_start(self.folder) == start or events[-1]["event"] == "start"

    def begun_anew(self, saved: int, start: Any) -> str:
        now = last_start(self.folder)
        went_on = now == start or (now.get("resumed") or {}).get("checkpoint")
        return "" if went_on or not saved else "begun anew"

    def saved(self) -> int:
        return max(rig.committed(self.folder), default=0)


def run(full: bool) -> Outcome:
    kills, steps = KILLS[full], STEPS[full]
    with rig.scratch() as folder:
        assert rig.run(folder / "reference", {"train.steps": steps}) == 0, rig.said(folder / "reference")
        killer = Killer(folder / "run", kills, steps, _begins(folder / "other"))
        killer.kill_all()
        killer.wrong += _end(killer, rig.ending(folder / "reference"))
    worst = f"{steps_of(killer.wasted)} done again, {killer.inside} kills inside a save, {killer.before} before a step"
    return Outcome(max(0, kills - len(killer.wrong)), kills, "; ".join([*killer.wrong[:3], worst]))


def _begins(folder: Path) -> float:
    """Seconds from the start of a process to its first line."""
    began = time.monotonic()
    process = rig.start(folder)
    rig.wait_for((folder / JOURNAL).exists)
    seconds = time.monotonic() - began
    rig.kill(process)
    return seconds


def _end(killer: Killer, reference: rig.Ending) -> list[str]:
    """What is wrong with the run when it is left to come to its end."""
    saved, start = killer.saved(), last_start(killer.folder)
    code = rig.run(killer.folder, {"train.steps": killer.steps})
    if code:
        return [f"at last it ended with {code}: {rig.said(killer.folder)}"]
    anew = killer.begun_anew(saved, start)
    same = rig.ending(killer.folder) == reference
    return [text for text in (anew, "" if same else "another end") if text]


def last_start(folder: Path) -> Any:
    starts = [event for event in iterate_saved_events(folder / JOURNAL) if event["event"] == "start"]
    return starts[-1] if starts else {}
