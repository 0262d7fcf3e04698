"""The time that a plan may take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Seconds, counted from now on."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self.now, self._begin = now, now()

    @property
    def spent(self) -> float:
        return self.now() - self._begin

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)
