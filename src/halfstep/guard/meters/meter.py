"""What a meter is: it looks at a sampled step in three moments, and says later what it saw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from halfstep.finding import Finding
from halfstep.guard.meters.sample import Sample

Reading = float | int | str


class Meter(ABC):
    """Writes tensors to the sample's slate, and never asks a tensor for a number."""

    turn: int | None = None
    """0 or 1 for a meter that looks at every other sample."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        """The newest numbers, for the journal."""

    def before(self, sample: Sample) -> None:
        """Ahead of the step."""
        return

    def gradients(self, sample: Sample) -> None:
        """Gradients are unscaled and clipped; the update comes next. Not called for a step that is skipped."""
        return

    def after(self, sample: Sample) -> None:
        """The step has been applied or skipped."""
        return

    def drop(self) -> None:
        """The step failed with an error, or the meters end: nothing may stay behind."""
        return

    @abstractmethod
    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        """A step later: the numbers of the slate are on the host."""


class Crossings:
    """What is over a threshold now, so that each crossing is told once."""

    def __init__(self) -> None:
        self._over: set[str] = set()

    def new(self, looked_at: Collection[str], over: Collection[str]) -> list[str]:
        """Those that were not over it when they were last looked at."""
        fresh = [name for name in over if name not in self._over]
        self._over = (self._over - set(looked_at)) | set(over)
        return fresh


def and_more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""
