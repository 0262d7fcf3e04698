"""The result of a verification, and its page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.draw.notebook import PageResult
from halfstep.errors import HalfstepError
from halfstep.json_data import convert_to_json_data
from halfstep.numbers import format_bytes, format_counted_noun
from halfstep.page import Block, Page, Paragraph, Span, build_finding_box
from halfstep.printable import escape_to_one_line

if TYPE_CHECKING:
    from halfstep.runs.data_check import VerifiedData
    from halfstep.train.resume_proof import ResumeProof


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """One checkpoint, and its problem."""

    name: str
    step: int
    whole: bool
    problem: str | None
    bytes: int
    processes: int | None
    """Ranks that wrote it; None if its manifest cannot be read."""


@dataclass(frozen=True)
class ReadSpeed:
    """How fast checkpoints were read, and where the time went."""

    bytes: int
    """Bytes that were found as written."""
    seconds: float
    bytes_per_second: float | None
    """None if the time is too short for a throughput."""
    limited_by: str | None
    seconds_hashing: float
    seconds_copying: float
    bytes_from_disk: int

    def __str__(self) -> str:
        text = f"verified {format_bytes(self.bytes)} in {self.seconds:.2f} s"
        if self.bytes_per_second is None:
            return text
        return f"{text}: {self.bytes_per_second / 1e9:.2f} GB/s, limited by {self.limited_by}"


@dataclass(frozen=True)
class VerifyReport(PageResult):
    """The checkpoints of a run, newest first, the proof of an exact resume, and the problem."""

    run: Path
    checkpoints: tuple[VerifiedCheckpoint, ...]
    newest_whole: str | None
    set_aside: tuple[str, ...]
    speed: ReadSpeed
    error: HalfstepError | None = None
    """The problem and the fix; None if every checkpoint is intact and, if it was proven, a resume is exact."""
    proof: ResumeProof | None = None
    """The comparison of k + k steps with 2k; None if it was not requested, or a checkpoint is damaged."""

    data: VerifiedData | None = None
    """The data of the run, compared; None if it was not requested, or a checkpoint is damaged."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, without the error, with which the command ends."""
        found = {name: getattr(self, name) for name in ("run", "checkpoints", "newest_whole", "set_aside")}
        proof = self.proof
        told = (
            {"proof": {**convert_to_json_data(proof), "losses": len(proof.losses), "equal": proof.equal}}
            if proof
            else {}
        )
        seen = {"data": convert_to_json_data(self.data)} if self.data else {}
        return {**found, **convert_to_json_data(self.speed), **seen, **told}

    def page(self) -> Page:
        """Return the page of everything that was checked, and of the error."""
        checked = self.checked_page()
        error = self.error
        if error is None:
            return checked
        return Page(checked.title, (*checked.blocks, build_finding_box(error.id, "error", error.given, error.do)))

    def checked_page(self) -> Page:
        """Return a line per checkpoint with its problem, the reading speed, and the proof if it is exact."""
        blocks: list[Block] = []
        for one in self.checkpoints:
            state = Span("intact ", "good") if one.whole else Span("damaged", "bad")
            by = f"  by {one.processes} processes" if (one.processes or 1) > 1 else ""
            line = (f"{escape_to_one_line(one.name)}  ", state, f"  {format_bytes(one.bytes):>9}{by}")
            blocks.append(Paragraph(line, wrap=False))
            if one.problem:
                blocks.append(Paragraph(one.problem, indent=True, wrap=False))
        for name in self.set_aside:
            words = (
                f"{escape_to_one_line(name)} was set aside by an earlier launch: it was damaged, or the guard found "
                "its weights "
                "bad; it is not used, and may be deleted"
            )
            blocks.append(Paragraph(Span(words, "dim"), wrap=False))
        if self.speed.bytes:
            blocks.append(Paragraph(str(self.speed), wrap=False))
        if self.data is not None and not self.data.changes:
            blocks.append(_build_data_line(self.data))
        if self.proof is not None and self.proof.equal:
            blocks.append(_build_proof_line(self.proof))
        return Page(f"checkpoints of {self.run}", tuple(blocks))


def _build_data_line(found: VerifiedData) -> Paragraph:
    if not found.shards:
        words = (
            "data: ",
            Span("as the newest checkpoint has it", "good"),
            "; without an index, it was not read completely",
        )
        return Paragraph(words, wrap=False)
    counts = (
        f": {format_counted_noun(found.samples, 'sample')} in {format_counted_noun(found.shards, 'shard')}, "
        f"{format_bytes(found.bytes)}"
    )
    return Paragraph(("data: ", Span("as it was indexed", "good"), counts), wrap=False)


def _build_proof_line(proof: ResumeProof) -> Paragraph:
    from halfstep.train.state import COMPONENTS

    k = proof.steps
    whence = f"from step {proof.begin:,}" if proof.begin else "from the beginning"
    counts = f" ({len(COMPONENTS)} components, {proof.tensors} tensors, {len(proof.losses)} losses), {whence}"
    return Paragraph((f"{k} + {k} = {2 * k} steps: ", Span("bitwise equal", "good"), counts), wrap=False)
