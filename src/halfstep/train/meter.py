"""How fast a run is, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Meter:
    """Samples, seconds and seconds spent waiting for data since it was last read."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._since, self._samples, self._waited = time.perf_counter(), 0, 0.0

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each arrives counts as waiting."""
        source = iter(items)
        while True:
            asked = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            yield item

    def count(self, samples: int) -> None:
        self._samples += samples

    def read(self) -> tuple[float, float]:
        """Samples per second and the share of time spent waiting; begins anew."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        found = self._samples / seconds, min(self._waited / seconds, 1.0)
        self._begin()
        return found
