"""The memory of one step as a ledger, whose parts add up to its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halfstep import numbers
from halfstep.json_data import JsonResult
from halfstep.measure.assumption import Assumption
from halfstep.measure.setting import StepSetting

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
"""The uses of memory. `cast copies` are autocast's copies of weights; `activations` are saved for backward."""

WORKING = ("activations", "temporary")
"""The parts that a rank has whole, however its model is sharded; autocast's copies give way to gathered parameters."""


@dataclass(frozen=True)
class Note:
    """A remark that readers of the figures need."""

    text: str
    only_here: bool = False
    """Whether it applies only to the device whose rules were followed, not to others with the same ledger."""


@dataclass(frozen=True)
class Ledger(JsonResult):
    """The memory of one update of a setting, in bytes, once the optimizer has its state."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("setting", "device", "samples", "peak", "at_peak", "whole", "by_format", "by_module", "moment", "verified"),
        *("notes", "assumptions"),
    )
    setting: StepSetting
    device: str
    samples: int
    """Samples in a micro-batch."""
    at_peak: Mapping[str, int]
    """Bytes of each part at the moment of the peak."""
    whole: Mapping[str, int]
    """Bytes of each part at its own maximum."""
    by_format: Mapping[str, int]
    """Activations at the end of forward, by format."""
    by_module: Mapping[str, int]
    """Activations at the end of forward, by the module that saves them, largest first."""
    moment: str
    """The moment of the peak: `the backward of layer1.0.conv2`, `the update`."""
    working: int = 0
    """The most of `WORKING` in forward and backward."""
    updating: int = 0
    """The most of `WORKING` in the update."""
    verified: bool = False
    """Whether such predictions have been compared with real runs on such a device."""
    by_cpu_rules: bool = False
    """Whether the CPU's autocast rules stand in for those of the device."""
    remarks: tuple[Note, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    """What was assumed of numbers of the model that its code reads."""

    def __str__(self) -> str:
        parts = sorted(self.at_peak.items(), key=lambda part: -part[1])
        sizes = ", ".join(f"{name} {numbers.size(size)}" for name, size in parts if size)
        how = way_in_words(self.setting.precision, self.setting.recompute, self.samples)
        return "\n".join([f"peak {numbers.size(self.peak)} {how}, in {self.moment}", sizes, *self.notes])

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the texts of the remarks."""
        return tuple(remark.text for remark in self.remarks)


def way_in_words(precision: str, recompute: bool, samples: int) -> str:
    """Return how a step is run as text."""
    return f"in {precision}{' with recomputing' if recompute else ''} at batch {samples}"
