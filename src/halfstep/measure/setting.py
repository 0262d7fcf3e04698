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


# -- sizes ------------------------------------------------------------------------------------------------------------
# Format sizes in bytes as text.


def size_in_words(size: float) -> str:
    """Return a size in the largest unit of which there is at least one."""
    for unit, words in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {words}" if size < 100 * unit else f"{size / unit:.0f} {words}"
    return f"{size:.0f} B"
