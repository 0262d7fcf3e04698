"""Whether a setting fits into the memory that is free, by prediction: nothing is run to find it out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from halfstep.measure.setting import Setting
from halfstep.measure.sizes import size_in_words

MARGIN = 0.1
"""Of the free memory, what is left alone: allocators round up, and predictions are not exact."""
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

PredictPeak = Callable[[Setting], int]


class Room:
    """Free memory, and what settings are predicted to take of it. Without a prediction everything may fit."""

    def __init__(self, free: int | None, predict: PredictPeak | None = None) -> None:
        self.free = free
        self._predict = predict
        self._known: dict[Setting, int | None] = {}

    def peak(self, setting: Setting) -> int | None:
        """Bytes of one update, as it is without a compiler; None where it could not be predicted."""
        setting = replace(setting, compile=False)
        if setting not in self._known:
            self._known[setting] = self._predicted(setting)
        return self._known[setting]

    def fits(self, *settings: Setting) -> bool:
        """All of them at once."""
        peaks = [self.peak(setting) or 0 for setting in settings]
        return self.free is None or sum(peaks) <= self.free * (1 - MARGIN)

    def why_not(self, setting: Setting) -> str:
        return f"it would take {size_in_words(self.peak(setting) or 0)}, and {size_in_words(self.free or 0)} are free"

    def _predicted(self, setting: Setting) -> int | None:
        if self._predict is None:
            return None
        try:
            return self._predict(setting)
        except Exception:  # a model that cannot be predicted can still be measured
            return None


def free_bytes(device: torch.device) -> int | None:
    """What may be taken on a device now; None where nobody says."""
    if device.type == "cpu":
        return _free_main_memory()
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):  # an older torch, or a device that does not tell
        return None


def _free_main_memory() -> int | None:
    known = [size for size in (_available(), _left_to_container()) if size is not None]
    return min(known) if known else None


def _available() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError, IndexError):
        return None


def _left_to_container() -> int | None:
    try:
        return int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # there is none, or it has no limit
        return None
