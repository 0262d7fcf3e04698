"""Print the report of `halfstep verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from halfstep.numbers import size
from halfstep.printable import in_line
from halfstep.terminal import screen

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
class VerifyReport:
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


def print_report(report: VerifyReport) -> None:
    """Print a line per checkpoint, and what is wrong with it."""
    console = screen()
    for one in report.checkpoints:
        state = ("whole  ", "green") if one.whole else ("damaged", "red")
        by = f"  by {one.processes} processes" if (one.processes or 1) > 1 else ""
        taken = f"  {size(one.bytes):>9}{by}"
        console.print(Text.assemble(f"{in_line(one.name)}  ", state, taken), soft_wrap=True)
        if one.problem:
            console.print(f"  {one.problem}", soft_wrap=True)
    for name in report.set_aside:
        console.print(
            f"{in_line(name)} was set aside by an earlier launch: it was damaged, or the guard found its weights "
            "spoilt; it is not used, and may be deleted",
            style="dim",
            soft_wrap=True,
        )
    if report.bytes:
        console.print(speed_in_words(report), soft_wrap=True)


def speed_in_words(report: VerifyReport) -> str:
    """Return the throughput and its bottleneck in words."""
    text = f"verified {size(report.bytes)} in {report.seconds:.2f} s"
    if report.bytes_per_second is None:
        return text
    return f"{text}: {report.bytes_per_second / 1e9:.2f} GB/s, limited by {report.limited_by}"


def print_proof(proof: Proof) -> None:
    """Print that a resume was proven exact; one that is not raises an error instead."""
    from halfstep.train.state import COMPONENTS

    if proof.equal:
        k = proof.steps
        whence = f"from step {proof.begin:,}" if proof.begin else "from the beginning"
        screen().print(
            Text.assemble(
                f"{k} + {k} = {2 * k} steps: ",
                ("bitwise equal", "green"),
                f" ({len(COMPONENTS)} components, {proof.tensors} tensors, {len(proof.losses)} losses), {whence}",
            ),
            soft_wrap=True,
        )
