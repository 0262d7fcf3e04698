"""What may be different when a run is taken up again, and what may not. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from halfstep.errors import StateMismatch
from halfstep.train.recipe.written import different

SAFE = ("about", "run.", "checkpoint.", "guard.", "train.num_workers", "data.bad_samples")
"""Settings that change no bit of what is trained while all goes well: keys, and sections with their dot."""
PLACES = ("data.path", "data.masks", "data.val")
"""Where data lies: no difference where its files are the same."""
RECIPE, DATA = "recipe", "data"
"""What may be accepted to have changed: `--accept-recipe-change`, `--accept-data-change`."""
MOST_LINES = 20


def changes(saved: Any, now: Any, ignore: Collection[str] = ()) -> list[str]:
    """Settings in which two recipes differ, but for those that make no difference."""
    safe = tuple(key if key.endswith(".") else f"{key}:" for key in SAFE)
    return [line for line in different(saved, now, ignore=ignore) if not line.startswith(safe)]


def but_for_places(lines: list[str]) -> list[str]:
    """Those of `changes` that are not about where the data lies, for whoever compares the data itself."""
    return [line for line in lines if not line.startswith(tuple(f"{key}:" for key in PLACES))]


def recipe_changed(what: str, lines: list[str]) -> StateMismatch:
    return StateMismatch(
        listed(f"{what} was begun with another recipe:", lines),
        allowed="the recipe that the run was begun with",
        do="add --accept-recipe-change to go on with the new one, or --new for a folder of its own",
    )


def listed(title: str, lines: list[str]) -> str:
    """A title and its lines; of many, the first."""
    more = [f"... and {len(lines) - MOST_LINES + 1} more"] if len(lines) > MOST_LINES else []
    return "\n    ".join([title, *(lines[: MOST_LINES - 1] if more else lines), *more])
