"""The arms that a plan races: each in a process of its own, or, for a person's live objects, all in this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from halfstep.errors import HalfstepError, in_one_line
from halfstep.measure.arm import Arm
from halfstep.measure.case import Case
from halfstep.measure.conditions import conditions
from halfstep.measure.process import ArmFailed, ArmTooSlow
from halfstep.measure.setting import Setting


class RacingArm(Protocol):
    """What `ArmProcess` does."""

    def open(self, limit: float | None = None) -> dict[str, Any]: ...
    def seconds(self, steps: int = 1, limit: float | None = None) -> float: ...
    def trail(self, steps: int) -> list[float]: ...
    def losses(self, steps: int, limit: float | None = None) -> list[float]: ...
    def graphs(self) -> int: ...
    def nudge(self, share: float) -> None: ...
    def close(self) -> None: ...


MakeArm = Callable[[Setting], RacingArm]


def observes(setting: Setting) -> bool:
    """The first step of a compiled arm is to be the one that compiles; a step that is observed runs eagerly."""
    return not setting.compile


class ArmHere:
    """The same in this process. A call that has begun cannot be ended: one that took too long is told afterwards."""

    def __init__(self, case: Case, setting: Setting, device: str | None) -> None:
        self._case, self._setting, self._device = case, setting, device
        self._arm: Arm | None = None

    def open(self, limit: float | None = None) -> dict[str, Any]:
        with _failures(), _told_late(limit):
            self._arm = Arm(self._case, self._setting, self._device, observe=observes(self._setting))
        return {"conditions": conditions(self._arm.device), "samples": self._arm.samples}

    def seconds(self, steps: int = 1, limit: float | None = None) -> float:
        with _failures(), _told_late(limit):
            return self._opened.seconds(steps)

    def trail(self, steps: int) -> list[float]:
        return self._opened.trail[:steps]

    def losses(self, steps: int, limit: float | None = None) -> list[float]:
        with _failures(), _told_late(limit):
            return self._opened.losses(steps)

    def graphs(self) -> int:
        return self._opened.graphs

    def nudge(self, share: float) -> None:
        self._opened.nudge(share)

    def close(self) -> None:
        self._arm = None

    @property
    def _opened(self) -> Arm:
        assert self._arm is not None, "open it first"
        return self._arm


@contextmanager
def _failures() -> Iterator[None]:
    """What a person's code or a compiler raises is told as a process would tell it."""
    try:
        yield
    except (HalfstepError, ArmTooSlow):
        raise
    except Exception as error:
        raise ArmFailed(in_one_line(error)) from error


@contextmanager
def _told_late(limit: float | None) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if limit is not None and time.perf_counter() - begin > limit:
        raise ArmTooSlow(f"no answer within {limit:.3g} s")
