"""What `halfstep verify` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.cli._printable import printable

if TYPE_CHECKING:
    from halfstep.train.proof import Proof


def print_report(report: dict[str, Any]) -> None:
    """A line for each checkpoint, and what is wrong with it."""
    from rich.console import Console

    console = Console(highlight=False)
    for one in report["checkpoints"]:
        state = "[green]whole[/]  " if one["whole"] else "[red]damaged[/]"
        by = f"  by {one['processes']} processes" if (one["processes"] or 1) > 1 else ""
        console.print(f"{one['name']}  {state}  {_in_words(one['bytes']):>9}{by}", soft_wrap=True)
        if one["problem"]:
            console.print(f"  {printable(one['problem'])}", soft_wrap=True, markup=False)
    for name in report["set_aside"]:
        console.print(
            f"[dim]{name} was set aside by an earlier launch: it was damaged, or the guard found its weights spoilt; "
            "it is not used, and may be deleted[/]",
            soft_wrap=True,
        )
    if report["bytes"]:
        console.print(speed_in_words(report), soft_wrap=True)


def speed_in_words(report: dict[str, Any]) -> str:
    text = f"verified {_in_words(report['bytes'])} in {report['seconds']:.2f} s"
    if report["bytes_per_second"] is None:
        return text
    return f"{text}: {report['bytes_per_second'] / 1e9:.2f} GB/s, limited by {report['limited_by']}"


def _in_words(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 10**5 else f"{size / 1e3:,.1f} kB"


def print_proof(proof: Proof) -> None:
    """That a resume was found exact; one that is not ends in an error."""
    from rich.console import Console

    from halfstep.train.state import COMPONENTS

    if proof.equal:
        k = proof.steps
        whence = f"from step {proof.begin:,}" if proof.begin else "from the beginning"
        Console(highlight=False).print(
            f"{k} + {k} = {2 * k} steps: [green]bitwise equal[/] "
            f"({len(COMPONENTS)} components, {proof.tensors} tensors, {len(proof.losses)} losses), {whence}",
            soft_wrap=True,
        )
