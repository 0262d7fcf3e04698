"""How long a sample takes beside a step, by the host's clock, and so how seldom there may be one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

USUAL = 50
"""Steps."""
LEAST_STEPS = 100
"""For one step's worth of time: so samples take 1 % of a run at most."""
SELDOM = 20
"""Times the usual: a machine that was busy for a moment must not end the metering."""


class Pace:
    """Between samples that have their own rhythm: longer where a sample takes more than half a step."""

    def __init__(self) -> None:
        self.every = USUAL
        self._spent = 0.0
        self._ended: float | None = None
        self._samples = 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Round what a sample does."""
        began = perf_counter()
        try:
            yield
        finally:
            self._spent += perf_counter() - began

    def begin(self) -> None:
        self._spent, self._ended = 0.0, None

    def end(self, in_hooks: float) -> None:
        """The sampled step is over; the next one shows how long a step is."""
        self._spent += in_hooks
        self._ended = perf_counter()

    def settle(self) -> None:
        """The step after it is over. The first sample loads what later ones find, and says nothing."""
        self._samples += 1
        if self._ended is not None and self._samples > 1:
            self.every = seldom_enough(self._spent, perf_counter() - self._ended)


def seldom_enough(sample: float, step: float) -> int:
    """A multiple of the usual number of steps, from the seconds that a sample and a step take."""
    times = math.ceil(LEAST_STEPS * sample / step / USUAL) if step > 0 else SELDOM
    return USUAL * min(max(times, 1), SELDOM)
