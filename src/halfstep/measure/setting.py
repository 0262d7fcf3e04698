"""A setting: one way to run a step (precision, layout, compilation, batch). A plan chooses between settings."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.json_data import JsonResult


@dataclass(frozen=True)
class StepSetting(JsonResult):
    """Everything that a plan may change; the defaults are strict fp32, the baseline of every speed-up."""

    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    batch: int | None = None
    """Samples in a micro-batch; None means the size of the case's batch."""
    microbatches: int = 1
    recompute: bool = False
    """Whether activations are recomputed in backward instead of stored."""

    def __str__(self) -> str:
        words = [self.precision]
        words += ["channels last"] if self.channels_last else []
        words += ["compiled"] if self.compile else []
        words += ["recomputing"] if self.recompute else []
        if self.microbatches > 1:
            words.append(f"{self.microbatches} × {self.batch}" if self.batch else f"{self.microbatches} micro-batches")
        return ", ".join(words)
