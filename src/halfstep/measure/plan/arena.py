"""Where arms are raced: a few are open at a time, warm, and timed in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.measure.plan.arms import MakeArm, RacingArm
from halfstep.measure.plan.budget import Budget
from halfstep.measure.process import ArmFailed, ArmTooSlow
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed, race, warm

SHORTEST_TURN = 0.05
"""Seconds. Shorter updates are timed several in a row, so that a clock's own error does not count."""
MOST_STEPS = 50

Tell = Callable[[], None]


@dataclass(frozen=True)
class Raced:
    """What a race came to, by settings."""

    speeds: dict[Setting, Speed]
    interrupted: bool = False
    """Ctrl-C ended it; what it had measured is here all the same."""
    failed: dict[Setting, ArmFailed | ArmTooSlow] = field(default_factory=dict)
    """Who could not go on; they have left."""


class _Limited:
    """An arm that answers within the time of the plan, or not at all."""

    def __init__(self, arm: RacingArm, budget: Budget) -> None:
        self._arm, self._budget = arm, budget

    def seconds(self, steps: int = 1) -> float:
        return self._arm.seconds(steps, self._budget.left)


class Arena:
    """Arms by their settings. Whoever enters stays open until it leaves."""

    def __init__(self, make_arm: MakeArm, budget: Budget, tell: Tell = lambda: None) -> None:
        self._make_arm, self._budget, self._tell = make_arm, budget, tell
        self._open: dict[Setting, RacingArm] = {}
        self._updates: dict[Setting, float] = {}
        self.conditions: dict[str, Any] = {}

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
        """Step until times agree; gives the last one. An arm that has no time left for that leaves."""
        self._tell()
        arm = _Limited(self._open[setting], self._budget)
        found = float(self._or_leave(setting, lambda: warm(arm, seconds=seconds, now=self._budget.now)))
        self._updates[setting] = found
        return found

    def turn_seconds(self, *updates: float) -> float:
        """Of one turn of arms whose updates take so long."""
        return _steps(max(updates)) * sum(updates)

    def race(self, settings: Sequence[Setting], *, baseline: Setting, pairs: int) -> Raced:
        """Time open and warm arms in turns until there are enough pairs or the time is up."""
        names = {str(number): setting for number, setting in enumerate([baseline, *settings])}
        found = race(
            {name: _Limited(self._open[setting], self._budget) for name, setting in names.items()},
            baseline="0",
            pairs=pairs,
            seconds=self._budget.left,
            steps=_steps(max(self._updates[setting] for setting in names.values())),
            progress=lambda *_: self._tell(),
            now=self._budget.now,
        )
        failed = {names[name]: error for name, error in found.failed.items()}
        for setting in failed:
            self.leave(setting)
        return Raced({names[name]: speed for name, speed in found.speeds.items()}, found.interrupted, failed)

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
                losses += arm.losses(1, self._budget.left)
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


def _steps(slowest: float) -> int:
    """Updates in a turn, for all arms alike: the slowest decides, or it would keep the others waiting."""
    return min(MOST_STEPS, max(1, math.ceil(SHORTEST_TURN / max(slowest, 1e-9))))
