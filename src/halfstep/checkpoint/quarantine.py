"""Set aside checkpoints that are intact but contain unusable weights, so that no run resumes from them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from halfstep import distributed
from halfstep.checkpoint.commit import remove
from halfstep.checkpoint.paths import BAD, DRAFT, CheckpointDir, Disk, generations, set_aside

MOST_ASIDE = 2
"""The number of unused checkpoints that are kept for inspection."""
Ruined = Callable[[int], bool]
"""A function that returns whether the weights after an attempt were unusable, judging by the losses."""


def set_aside_since(folder: Path, attempt: int, ruined: Ruined = lambda attempt: False) -> CheckpointDir | None:
    """Set aside all checkpoints from this attempt on, and those that are `ruined`; return the newest one left.

    Returns None if no other exists; then nothing is set aside. Every rank must call this; rank 0 decides for all.
    """
    left = json.loads(
        distributed.from_rank_zero(json.dumps(_renamed(folder, attempt, ruined) if distributed.rank() == 0 else None))
    )
    return None if left is None else CheckpointDir(folder / left["name"], left["attempt"], left["number"])


def _renamed(folder: Path, attempt: int, ruined: Ruined) -> dict[str, str | int] | None:
    found = generations(folder)
    good = (n for n, one in enumerate(found) if one.attempt < attempt and not ruined(one.attempt))
    newest = next(good, None)
    if newest is None:
        return None
    for one in found[:newest]:
        # A failed rename loses nothing: that checkpoint is merely newer than the one that is used.
        with contextlib.suppress(OSError):
            one.path.rename(one.path.with_name(one.name + BAD))
    sweep_aside(folder, Disk())
    left = found[newest]
    return {"name": left.name, "attempt": left.attempt, "number": left.number}


def sweep_aside(folder: Path, disk: Disk) -> None:
    """Remove all but the newest few checkpoints that were set aside.

    Must only be called by the holder of the run's lock.
    """
    # By save number: steps repeat after a rollback. Hexadecimal of equal width sorts like the number.
    newest_last = sorted(set_aside(folder), key=lambda path: path.name.removesuffix(BAD).rpartition(".")[2].zfill(12))
    for path in newest_last[:-MOST_ASIDE]:
        with contextlib.suppress(OSError):
            # Rename first: if the removal is interrupted, the next sweep removes the rest.
            draft = path.with_name(path.name.removesuffix(BAD) + DRAFT)
            disk.rename(path, draft)
            remove(draft, disk)
