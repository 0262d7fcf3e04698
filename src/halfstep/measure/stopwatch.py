"""Seconds of work on a device: by its own events where it has them, else by the clock on the wall."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfstep import clock


class Stopwatch:
    """Accelerators work behind the program's back: what they do is timed by events that they record themselves."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type in ("cuda", "xpu", "mps")
        self._device = device

    def seconds(self, call: Callable[[], object], calls: int = 1) -> float:
        """Of one call, averaged over `calls` of them in a row."""
        if not self._events:
            return clock.seconds(call, calls)
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        torch.accelerator.synchronize(self._device)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
