"""What an audit says: the verdict, the modules, the islands, the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.measure.audit.islands import IslandVerdict
from halfstep.measure.audit.rows import Row
from halfstep.observe.lint.listener import Spotted


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Which format each part of a model is in, and what that does to its numbers."""

    subject: str
    precision: str
    format: str
    """What its matrix work should be in."""
    device: str
    run: bool
    """Whether numbers were computed; else formats are by a device's rules, and nothing is known of values."""
    flops: Mapping[str, int]
    """By format, islands included."""
    share: float | None
    """Of the work outside islands, the part in that format; None where there was none."""
    island_share: float
    """Of all work, the part inside islands."""
    loss: float | None
    loss_scale: float | None
    rows: tuple[Row, ...]
    islands: tuple[IslandVerdict, ...]
    spotted: tuple[Spotted, ...]
    notes: tuple[str, ...]
    interrupted: bool = False
    stopped: str | None = None

    @property
    def verdict(self) -> str:
        if not self.rows and self.interrupted:
            return "interrupted before a step was seen"
        work = "all work is in islands" if self.island_share else "no matrix product or convolution was seen"
        if self.share is not None:
            outside = " outside islands" if self.island_share else ""
            enough = f"of the work{outside} in {self.format} as asked"
            work = f"{_percent(self.share)} {enough}" if self.share >= 0.9 else f"only {_percent(self.share)} {enough}"
        count = len(self.spotted)
        worst = sum(one.finding.severity == "error" for one in self.spotted)
        found = "nothing found" if not count else f"{count} finding{'s' if count > 1 else ''}"
        errors = "errors" if worst > 1 else "an error"
        return f"{work}; {found}" + (f", {errors if worst == count else f'{worst} of them {errors}'}" if worst else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without numbers that JSON has no word for."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "precision": self.precision,
            "format": self.format,
            "device": self.device,
            "run": self.run,
            "share": self.share,
            "island_share": self.island_share,
            "flops": dict(self.flops),
            "loss": self.loss,
            "loss_scale": self.loss_scale,
            "modules": [row.as_dict() for row in self.rows],
            "islands": [one.as_dict() for one in self.islands],
            "findings": [one.as_dict() for one in self.spotted],
            "notes": list(self.notes),
            "stopped": self.stopped,
            "interrupted": self.interrupted,
        }


def _percent(share: float) -> str:
    return "100 %" if share == 1 else f"{min(share, 0.999):.1%}".replace("%", " %")
