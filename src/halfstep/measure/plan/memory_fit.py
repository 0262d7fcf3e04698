"""Predict whether a setting fits into free memory, without running it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from halfstep.measure.setting import StepSetting, size_in_words

MARGIN = 0.1
"""Share of the free memory that is left alone: allocators round up, and predictions are not exact."""
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

PredictPeak = Callable[[StepSetting], int]


class Room:
    """Free memory, and the predicted memory of settings. Without a prediction everything is assumed to fit."""

    def __init__(self, free: int | None, predict: PredictPeak | None = None) -> None:
        self.free = free
        self._predict = predict
        self._known: dict[StepSetting, int | None] = {}

    def peak(self, setting: StepSetting) -> int | None:
        """Return the bytes of one update, without compilation; None if they could not be predicted."""
        # Predictions are for eager code, so both settings share one.
        setting = replace(setting, compile=False)
        if setting not in self._known:
            self._known[setting] = self._predicted(setting)
        return self._known[setting]

    def fits(self, *settings: StepSetting) -> bool:
        """Return whether all settings fit at once."""
        peaks = [self.peak(setting) or 0 for setting in settings]
        return self.free is None or sum(peaks) <= self.free * (1 - MARGIN)

    def why_not(self, setting: StepSetting) -> str:
        """Return the required and the free memory as text."""
        return f"it would take {size_in_words(self.peak(setting) or 0)}, and {size_in_words(self.free or 0)} are free"

    def _predicted(self, setting: StepSetting) -> int | None:
        if self._predict is None:
            return None
        try:
            return self._predict(setting)
        except Exception:  # a model that cannot be predicted can still be measured
            return None


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None if it is unknown."""
    if device.type == "cpu":
        return _free_main_memory()
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):  # an older torch, or a device without this query
        return None


def _free_main_memory() -> int | None:
    # In a container, /proc/meminfo shows the host's memory; the cgroup has the container's limit.
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
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return None
