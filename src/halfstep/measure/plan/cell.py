"""A cell of a plan's table: a setting with what was measured of it, or with the reason why it was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed

SIMPLEST_FIRST = ("fp32", "tf32", "bf16", "fp16")
"""Precisions, by how much there is to them: tf32 rounds less than bf16, and fp16 needs a loss scale."""
BASELINE_PRECISION = SIMPLEST_FIRST[0]
NO_TIME, INTERRUPTED = "not measured: no time was left", "not measured: interrupted"
"""Reasons that say nothing about the setting itself."""


@dataclass(frozen=True)
class Cell:
    """What a plan knows of one setting."""

    setting: Setting
    speed: Speed | None = None
    """Against strict fp32."""
    cut: str = ""
    """Why it cannot be chosen; empty where it can."""
    first_step: float | None = None
    """Seconds of the first update, in which a compiler works."""
    peak: int | None = None
    """Bytes that one update was predicted to take."""
    trail: tuple[float, ...] = ()
    """Losses of its first updates."""

    @property
    def can_be_chosen(self) -> bool:
        return self.speed is not None and not self.cut

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": self.setting.as_dict(),
            "name": str(self.setting),
            "speed": self.speed.as_dict() if self.speed else None,
            "cut": self.cut,
            "first_step": self.first_step,
            "peak": self.peak,
        }


def simplicity(setting: Setting) -> tuple[Any, ...]:
    """Lower is simpler: eager before compiled, wide before narrow, plain before channels last, few before many."""
    known = setting.precision in SIMPLEST_FIRST
    precision = SIMPLEST_FIRST.index(setting.precision) if known else len(SIMPLEST_FIRST)
    return setting.compile, precision, setting.channels_last, setting.microbatches
