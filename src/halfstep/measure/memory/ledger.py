"""The memory of one step as a ledger, whose parts add up to its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.measure.setting import Setting

PARTS = (
    "weights",
    "buffers",
    "average",
    "optimizer",
    "batch",
    "gradients",
    "cast copies",
    "activations",
    "temporary",
)
"""What memory is taken for. `cast copies` are autocast's, of weights; `activations` are kept for backward."""


@dataclass(frozen=True)
class Note:
    """What a reader of the figures has to know."""

    text: str
    only_here: bool = False
    """True of the device whose rules were followed, and of no other that the ledger may stand for."""


@dataclass(frozen=True)
class Ledger:
    """What one update of a setting takes, in bytes, when the optimizer has its state."""

    setting: Setting
    device: str
    samples: int
    """In a micro-batch."""
    at_peak: Mapping[str, int]
    """By part, at the moment when most is taken."""
    whole: Mapping[str, int]
    """By part, at its own largest."""
    by_format: Mapping[str, int]
    """Activations at the end of forward, by the format they are kept in."""
    by_module: Mapping[str, int]
    """Activations at the end of forward, by the module that keeps them, most first."""
    moment: str
    """When the peak is reached: `the backward of layer1.0.conv2`, `the update`."""
    verified: bool = False
    """Whether a run on such a device has been held against such a prediction."""
    remarks: tuple[Note, ...] = ()

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks, as they are shown."""
        return tuple(remark.text for remark in self.remarks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": self.setting.as_dict(),
            "device": self.device,
            "samples": self.samples,
            "peak": self.peak,
            "at_peak": dict(self.at_peak),
            "whole": dict(self.whole),
            "by_format": dict(self.by_format),
            "by_module": dict(self.by_module),
            "moment": self.moment,
            "verified": self.verified,
            "notes": list(self.notes),
        }
