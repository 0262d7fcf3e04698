"""One way to run a step: precision, layout, compilation and batch. What a plan chooses, and a cell of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Everything that a plan may change."""

    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    batch: int | None = None
    """Samples in a micro-batch; None is as many as the case has."""
    microbatches: int = 1
    recompute: bool = False
    """Activations are computed again in backward instead of kept."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Setting:
        return cls(**known)

    def __str__(self) -> str:
        words = [self.precision]
        words += ["channels last"] if self.channels_last else []
        words += ["compiled"] if self.compile else []
        words += ["recomputing"] if self.recompute else []
        if self.microbatches > 1:
            words.append(f"{self.microbatches} × {self.batch}" if self.batch else f"{self.microbatches} micro-batches")
        return ", ".join(words)


STRICT_FP32 = Setting()
"""What every speed-up is measured against: fp32 without TF32, as a plain loop runs it."""
