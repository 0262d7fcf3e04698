"""Checkpoints whose weights were found to be spoilt when it was too late: whole, and not to be gone on from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from halfstep import world
from halfstep.train.checkpoint.commit import remove
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.generation import BAD, DRAFT, Generation, generations, set_aside

MOST_ASIDE = 2
"""Checkpoints that are used no more, and kept for whoever wants to know why."""
Ruined = Callable[[int], bool]
"""Whether the weights after an attempt were of no use, as the losses show."""


def set_aside_since(folder: Path, attempt: int, ruined: Ruined = lambda attempt: False) -> Generation | None:
    """Those that were taken at this attempt or later, and those that are `ruined`, are used no more; the newest left.

    None where there are no others: then the spoilt ones stay. Called by every process; the first one decides.
    """
    left = json.loads(
        world.from_rank_zero(json.dumps(_renamed(folder, attempt, ruined) if world.rank() == 0 else None))
    )
    return None if left is None else Generation(folder / left["name"], left["attempt"], left["number"])


def _renamed(folder: Path, attempt: int, ruined: Ruined) -> dict[str, str | int] | None:
    found = generations(folder)
    good = (n for n, one in enumerate(found) if one.attempt < attempt and not ruined(one.attempt))
    newest = next(good, None)
    if newest is None:
        return None
    for one in found[:newest]:
        # One that cannot be renamed is only newer than it should be: nothing is lost by it.
        with contextlib.suppress(OSError):
            one.path.rename(one.path.with_name(one.name + BAD))
    sweep_aside(folder, Disk())
    left = found[newest]
    return {"name": left.name, "attempt": left.attempt, "number": left.number}


def sweep_aside(folder: Path, disk: Disk) -> None:
    """Remove all but the newest few of those that are used no more. Only for whoever holds the lock of the run."""
    newest_last = sorted(set_aside(folder), key=lambda path: path.name.removesuffix(BAD).rpartition(".")[2].zfill(12))
    for path in newest_last[:-MOST_ASIDE]:
        with contextlib.suppress(OSError):
            # It loses its name first, so that the half of it is removed by the next sweep.
            draft = path.with_name(path.name.removesuffix(BAD) + DRAFT)
            disk.rename(path, draft)
            remove(draft, disk)
