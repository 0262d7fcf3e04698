"""What a run of one arm came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Measured from tensors and caught messages, never written down beforehand."""

    good: bool
    """The training state is right, or the person was told what is wrong before it went wrong."""
    seen: str
    """One short sentence with the figures."""
    word: str = ""
    """What went wrong in two or three words, for a cell of a table; unused where nothing did."""

    @property
    def broken(self) -> bool:
        return not self.good

    @property
    def held(self) -> bool:
        return self.good

    @property
    def verdict(self) -> str:
        return "held" if self.good else "broken"

    @property
    def cell(self) -> str:
        return "held" if self.good else self.word or "broken"
