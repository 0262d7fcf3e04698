"""Where arms are raced: a few are open at a time, warm, and timed in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.measure.plan.arms import MakeArm, RacingArm
from halfstep.measure.plan.budget import Budget
from halfstep.measure.process import ArmFailed
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed, race, warm

SHORTEST_TURN = 0.05
"""Seconds. Shorter updates are timed several in a row, so that a clock's own error does not count."""
MOST_STEPS = 50

Tell = Callable[[], None]


class Arena:
    """Arms by their settings. Whoever enters stays open until it leaves."""

    def __init__(self, make_arm: MakeArm, budget: Budget, tell: Tell = lambda: None) -> None:
        self._make_arm, self._budget, self._tell = make_arm, budget, tell
        self._open: dict[Setting, RacingArm] = {}
        self._steps = 1
        self.conditions: dict[str, Any] = {}
        self.interrupted = False
        """Ctrl-C ended the last race; what it had measured was given all the same."""

    def enter(self, setting: Setting, limit: float | None = None) -> None:
        """Open an arm, within `limit` seconds."""
        arm = self._open[setting] = self._make_arm(setting)
        self._tell()
        opened = self._or_leave(setting, lambda: arm.open(limit))
        self.conditions = self.conditions or opened["conditions"]

    def first_step(self, setting: Setting, limit: float | None = None) -> float:
        """Of an open arm, within `limit` seconds; gives how many it took. A compiler works in it."""
        arm = self._open[setting]
        self._tell()
        seconds = float(self._or_leave(setting, lambda: arm.seconds(1, limit)))
        if setting.compile and not arm.graphs():
            self.leave(setting)
            raise ArmFailed("torch.compile passed over the model and compiled nothing, without a word")
        return seconds

    def _or_leave(self, setting: Setting, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except BaseException:
            self.leave(setting)
            raise

    def warm(self, setting: Setting, seconds: float) -> float:
        """Step until times agree; gives the last one."""
        self._tell()
        return warm(self._open[setting], seconds=seconds)

    def set_turn(self, seconds: float) -> None:
        """How long an update of the baseline takes decides how many of them are a turn, for all arms alike."""
        self._steps = min(MOST_STEPS, max(1, math.ceil(SHORTEST_TURN / max(seconds, 1e-9))))

    def turn_seconds(self, *updates: float) -> float:
        """Of one turn of arms whose updates take so long."""
        return self._steps * sum(updates)

    def race(self, settings: Sequence[Setting], *, baseline: Setting, pairs: int) -> dict[Setting, Speed]:
        """Time open arms in turns until there are enough pairs or the time is up."""
        names = {str(number): setting for number, setting in enumerate([baseline, *settings])}
        arms = {name: self._open[setting] for name, setting in names.items()}
        left = self._budget.left
        deadline = time.perf_counter() + left
        found = race(arms, baseline="0", pairs=pairs, seconds=left, steps=self._steps, progress=lambda *_: self._tell())
        self.interrupted = found["0"].pairs < pairs and time.perf_counter() < deadline
        return {names[name]: speed for name, speed in found.items()}

    def trail(self, setting: Setting, steps: int) -> tuple[float, ...]:
        return tuple(self._open[setting].trail(steps))

    def nudged_losses(self, setting: Setting, *, share: float, steps: int) -> list[float]:
        """Of an arm that begins with other weights, as many updates as there is time for; it is closed again."""
        arm = self._make_arm(setting)
        try:
            arm.open(self._budget.left)
            arm.nudge(share)
            losses: list[float] = []
            while len(losses) < steps and self._budget.left:
                self._tell()
                losses += arm.losses(1)
            return losses
        finally:
            arm.close()

    def is_open(self, setting: Setting) -> bool:
        return setting in self._open

    def leave(self, setting: Setting) -> None:
        arm = self._open.pop(setting, None)
        if arm is not None:
            arm.close()

    def close(self) -> None:
        for setting in list(self._open):
            self.leave(setting)
