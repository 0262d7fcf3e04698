"""Numbers on their way from the device to the host, which waits for none of them.

Meters write into one tensor on the device; it is copied while training goes on, and read a step later, when the step's
own reading has long waited for everything before it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

PLACES = 256


class Slate:
    """A row of numbers, all zero after `wipe`. Counts up to 2**24 are exact."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        queued = device.type in ("cuda", "xpu")
        self._row = torch.zeros(PLACES, device=device)
        self._places = self._row.unbind()
        self._host = torch.zeros(PLACES, pin_memory=queued)
        # Memory read as memory: asking torch for a number would count, and could wait.
        self._memory = (ctypes.c_float * PLACES).from_address(self._host.data_ptr())
        self._kind: Any = torch.get_device_module(device)
        self._sent: Any = self._kind.Event() if queued else None
        self._used = 0

    def wipe(self) -> None:
        self._row.zero_()
        self._used = 0

    def place(self) -> tuple[int, Tensor]:
        """The next free place, and the number there as a tensor to write into."""
        if self._used == PLACES:
            raise IndexError(f"more than {PLACES} numbers in one sample")
        self._used += 1
        return self._used - 1, self._places[self._used - 1]

    def note(self, number: Tensor) -> int:
        """Write a number that is on the device, and say where."""
        index, place = self.place()
        place.copy_(number)
        return index

    def send(self) -> None:
        """Towards the host. Apple's GPUs cannot copy without waiting: there a sampled step waits once more."""
        self._host.copy_(self._row, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(self._kind.current_stream(self.device))

    @property
    def arrived(self) -> bool:
        """Whether what was sent can be read; asks, and does not wait."""
        return self._sent is None or bool(self._sent.query())

    def read(self) -> list[float]:
        return list(self._memory[: self._used])
