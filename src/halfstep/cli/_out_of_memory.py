"""Print what `halfstep train` reports when a step ran out of memory: the ledger, what fits, and the command to type."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from halfstep import numbers
from halfstep.draw.terminal import show_page
from halfstep.errors import OutOfMemory
from halfstep.page import Block, Column, Instruction, Page, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line
from halfstep.terminal import create_console

if TYPE_CHECKING:
    from halfstep.measure.memory.way_out import MemoryRemedy

PATIENCE = 120.0
"""Seconds for the estimate; without one, the advice is half the batch."""


def report_out_of_memory(failed: OutOfMemory, recipe: str, settings: Sequence[str]) -> None:
    """Print the report on standard error; without an estimate, the advice stays half the batch."""
    # One rank reports for all.
    if os.environ.get("RANK", "0") != "0":
        return
    console = create_console(stderr=True)
    given = Paragraph(Span(escape_to_one_line(failed.given), "bad"), wrap=False)
    show_page(Page("out of memory", (given,)), console)  # the estimate may take a minute
    # The traceback's frames keep the run's tensors alive; free them before estimating.
    traceback.clear_frames(failed.__traceback__)
    gc.collect()
    found = _estimate_way_out(failed, recipe, settings) if failed.batch else None
    show_page(Page("out of memory", tuple(_build_remedy_blocks(failed, found))), console)


def _build_remedy_blocks(failed: OutOfMemory, found: MemoryRemedy | None) -> Iterator[Block]:
    changes = _choose_setting_changes(failed, found) if found is not None else {}
    if found is not None:
        yield Paragraph(f"  by the estimate, at its peak ({escape_to_one_line(found.moment)}):", wrap=False)
        yield _build_ledger_table(found)
        yield Paragraph(Span(f"  {_describe_fitting_batch(failed, found)}", strong=True), wrap=False)
    do = failed.command(changes) if failed.command and changes else failed.do
    yield Instruction(escape_to_one_line(do), "  do: ")


def _estimate_way_out(failed: OutOfMemory, recipe: str, settings: Sequence[str]) -> MemoryRemedy | None:
    """Return the estimate; None for a user's own task, or where there is not even memory to estimate."""
    from halfstep.measure.memory import way_out
    from halfstep.measure.memory.devices import HERE, device_named

    limit = way_out.compute_usable_memory(device_named(HERE))
    step = way_out.StepOutOfMemory(recipe, tuple(settings), failed.precision, failed.batch, limit)
    # A separate process: this one may have no memory left to build the model again.
    command = [sys.executable, "-m", way_out.__name__, json.dumps(asdict(step))]
    try:
        with create_console(stderr=True).status("estimating what fits"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        # Other lines may come from packages that print while they are imported.
        return way_out.MemoryRemedy(**json.loads(done.stdout.strip().rpartition("\n")[2]))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


def _build_ledger_table(found: MemoryRemedy) -> Table:
    sizes = {part: size for part, size in found.at_peak.items() if size} | {"peak": found.peak, "there is": found.limit}
    rows = tuple((part, numbers.format_bytes(size)) for part, size in sizes.items())
    return Table((Column(), Column(align="right")), rows, indent=4)


def _describe_fitting_batch(failed: OutOfMemory, found: MemoryRemedy) -> str:
    if found.batch >= failed.batch:
        return f"by the estimate a batch of {found.batch} fits, but {failed.batch} did not: try half of it"
    if found.batch:
        return (
            f"the largest batch that fits is {found.batch}, by the estimate; the step stays the same, in micro-batches"
        )
    if found.recomputed:
        return "no batch fits, except with activation checkpointing"
    return "not even one sample fits: a smaller model or image, or another device (halfstep estimate --device)"


def _choose_setting_changes(failed: OutOfMemory, found: MemoryRemedy) -> dict[str, int | str]:
    from halfstep.train.give_up import RECOMPUTE
    from halfstep.train.microbatches import choose_smaller_microbatches

    if found.batch:
        at_most = min(found.batch, failed.batch // 2)
        return {**choose_smaller_microbatches(failed.batch, failed.microbatches, at_most)}
    if found.recomputed:
        return {**choose_smaller_microbatches(failed.batch, failed.microbatches, found.recomputed), RECOMPUTE: "true"}
    return {}
