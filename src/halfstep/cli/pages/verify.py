"""The report of `halfstep verify`, and its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.draw.notebook import ShownAsPage
from halfstep.numbers import size
from halfstep.page import Block, Page, Paragraph, Span
from halfstep.printable import in_line

if TYPE_CHECKING:
    from halfstep.train.resume_proof import Proof


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """One checkpoint, and what is wrong with it."""

    name: str
    step: int
    whole: bool
    problem: str | None
    bytes: int
    processes: int | None
    """Ranks that wrote it; None if its manifest cannot be read."""


@dataclass(frozen=True)
class VerifyReport(ShownAsPage):
    """The checkpoints of a run, newest first, and how fast they were read."""

    run: Path
    checkpoints: list[VerifiedCheckpoint]
    newest_whole: str | None
    set_aside: list[str]
    bytes: int
    seconds: float
    bytes_per_second: float | None
    """None where the time is too short for a throughput."""
    limited_by: str | None
    seconds_hashing: float
    seconds_copying: float
    bytes_from_disk: int

    def page(self) -> Page:
        """Return a line per checkpoint, what is wrong with it, and how fast all were read."""
        blocks: list[Block] = []
        for one in self.checkpoints:
            state = Span("whole  ", "good") if one.whole else Span("damaged", "bad")
            by = f"  by {one.processes} processes" if (one.processes or 1) > 1 else ""
            line = (f"{in_line(one.name)}  ", state, f"  {size(one.bytes):>9}{by}")
            blocks.append(Paragraph(line, wrap=False))
            if one.problem:
                blocks.append(Paragraph(one.problem, indent=True, wrap=False))
        for name in self.set_aside:
            words = (
                f"{in_line(name)} was set aside by an earlier launch: it was damaged, or the guard found its weights "
                "spoilt; it is not used, and may be deleted"
            )
            blocks.append(Paragraph(Span(words, "dim"), wrap=False))
        if self.bytes:
            blocks.append(Paragraph(speed_in_words(self), wrap=False))
        return Page(f"checkpoints of {self.run}", tuple(blocks))


def speed_in_words(report: VerifyReport) -> str:
    """Return the throughput and its bottleneck in words."""
    text = f"verified {size(report.bytes)} in {report.seconds:.2f} s"
    if report.bytes_per_second is None:
        return text
    return f"{text}: {report.bytes_per_second / 1e9:.2f} GB/s, limited by {report.limited_by}"


def proof_page(proof: Proof) -> Page:
    """Return the page of an exact resume; one that is not exact raises an error instead."""
    from halfstep.train.state import COMPONENTS

    k = proof.steps
    whence = f"from step {proof.begin:,}" if proof.begin else "from the beginning"
    counts = f" ({len(COMPONENTS)} components, {proof.tensors} tensors, {len(proof.losses)} losses), {whence}"
    line = (f"{k} + {k} = {2 * k} steps: ", Span("bitwise equal", "good"), counts)
    return Page("proof of an exact resume", (Paragraph(line, wrap=False),))
