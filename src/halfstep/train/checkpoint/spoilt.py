"""Checkpoints whose weights were found to be spoilt when it was too late: whole, and not to be gone on from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from halfstep import world
from halfstep.train.checkpoint.generation import BAD, Generation, generations


def set_aside_since(folder: Path, attempt: int) -> Generation | None:
    """Those that were taken at this attempt or later are used no more; the newest of the others.

    None where there are no others: then the spoilt ones stay. Called by every process; the first one decides.
    """
    left = json.loads(world.from_rank_zero(json.dumps(_renamed(folder, attempt) if world.rank() == 0 else None)))
    return None if left is None else Generation(folder / left["name"], left["attempt"], left["number"])


def _renamed(folder: Path, attempt: int) -> dict[str, str | int] | None:
    found = generations(folder)
    left = next((one for one in found if one.attempt < attempt), None)
    if left is None:
        return None
    for one in found:
        if one.attempt >= attempt:
            # One that cannot be renamed is only newer than it should be: nothing is lost by it.
            with contextlib.suppress(OSError):
                one.path.rename(one.path.with_name(one.name + BAD))
    return {"name": left.name, "attempt": left.attempt, "number": left.number}
