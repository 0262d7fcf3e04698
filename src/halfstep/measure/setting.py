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
    weight_format: str = "fp32"
    """How trained weights are stored, in precisions that compute in bf16; in others they are in fp32."""
    gradient_sums: str = "fp32"
    """The format in which gradients of weights in bf16 are added up."""

    def __str__(self) -> str:
        words = [self.precision]
        words += ["channels last"] if self.channels_last else []
        words += ["compiled"] if self.compile else []
        words += ["recomputing"] if self.recompute else []
        words += [f"weights as {self.weight_format}"] if self.weight_format != "fp32" else []
        if self.microbatches > 1:
            words.append(f"{self.microbatches} × {self.batch}" if self.batch else f"{self.microbatches} micro-batches")
        return ", ".join(words)
