"""Print what `halfstep train` reports when a step ran out of memory: the ledger, what fits, and the command to type."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from halfstep import numbers
from halfstep.errors import OutOfMemory
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.measure.memory.way_out import WayOut

PATIENCE = 120.0
"""Seconds for the estimate; without one, the advice is half the batch."""


def show(failed: OutOfMemory, recipe: str, settings: Sequence[str]) -> None:
    """Print the report on standard error; without an estimate, the advice stays half the batch."""
    # One rank reports for all.
    if os.environ.get("RANK", "0") != "0":
        return
    console = screen(stderr=True, soft_wrap=True)
    console.print(Text(in_line(failed.given), style="red"))
    # The traceback's frames keep the run's tensors alive; free them before estimating.
    traceback.clear_frames(failed.__traceback__)
    gc.collect()
    found = _estimated(failed, recipe, settings) if failed.batch else None
    changes = _changes(failed, found) if found is not None else {}
    if found is not None:
        for line in _ledger(found):
            console.print(Text(in_line(line)))
        console.print(Text(_verdict(failed, found), style="bold"))
    line = failed.command(changes) if failed.command and changes else failed.do
    console.print(Text(f"  do: {in_line(line)}", style="bold"))


def _estimated(failed: OutOfMemory, recipe: str, settings: Sequence[str]) -> WayOut | None:
    """Return the estimate; None for a user's own task, or where there is not even memory to estimate."""
    from halfstep.measure.memory import way_out
    from halfstep.measure.memory.devices import HERE, device_named

    limit = way_out.within_reach(device_named(HERE))
    step = way_out.StepOutOfMemory(recipe, tuple(settings), failed.precision, failed.batch, limit)
    # A separate process: this one may have no memory left to build the model again.
    command = [sys.executable, "-m", way_out.__name__, json.dumps(asdict(step))]
    try:
        with screen(stderr=True).status("estimating what fits"):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        # Other lines may come from packages that print while they are imported.
        return way_out.WayOut(**json.loads(done.stdout.strip().rpartition("\n")[2]))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


def _ledger(found: WayOut) -> list[str]:
    parts = {part: size for part, size in found.at_peak.items() if size}
    rows = {**parts, "peak": found.peak, "there is": found.limit}
    width = max(map(len, rows))
    lines = [f"  by the estimate, at its peak ({found.moment}):"]
    return lines + [f"    {part.ljust(width)}  {numbers.size(size).rjust(10)}" for part, size in rows.items()]


def _verdict(failed: OutOfMemory, found: WayOut) -> str:
    if found.batch >= failed.batch:
        return f"  by the estimate a batch of {found.batch} fits, and {failed.batch} did not: take half"
    if found.batch:
        return f"  the largest batch that fits is {found.batch}, by the estimate; the step stays the same, in pieces"
    if found.recomputed:
        return "  no batch fits as it is; one does where activations are computed again"
    return "  not even one sample fits: a smaller model or image, or another device (halfstep estimate --device)"


def _changes(failed: OutOfMemory, found: WayOut) -> dict[str, int | str]:
    from halfstep.train.give_up import RECOMPUTE
    from halfstep.train.microbatches import smaller_microbatches

    if found.batch:
        at_most = min(found.batch, failed.batch // 2)
        return {**smaller_microbatches(failed.batch, failed.microbatches, at_most)}
    if found.recomputed:
        return {**smaller_microbatches(failed.batch, failed.microbatches, found.recomputed), RECOMPUTE: "true"}
    return {}
