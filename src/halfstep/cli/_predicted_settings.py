"""What follows RUN in `halfstep predict`: a folder, and settings that change how a model is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import BadRecipe

if TYPE_CHECKING:
    from halfstep.tasks._finished import Finished

HOW = (
    *("model.sampler", "model.sample_steps", "model.guidance"),
    *("data.tile", "data.overlap", "data.frames", "data.every"),
)
"""Settings that weights do not depend on. All others say what was trained, and would be another model now."""


def folder_and_settings(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder, where the first word is one, and the settings after it."""
    first = words[0] if words else "-"
    if first.startswith("-") or ("=" in first and not Path(first).exists()):
        return None, list(words)
    return Path(first), list(words[1:])


def changed(finished: Finished, settings: Sequence[str]) -> Finished:
    """The run with another recipe in its task; its weights are as they were."""
    if not settings:
        return finished
    from halfstep.tasks._finished import recipe_in, remembering
    from halfstep.tasks._resolving import resolved_recipe
    from halfstep.train.recipe.fields import settings_of
    from halfstep.train.recipe.overrides import read_flags
    from halfstep.train.recipe.sources import read_recipe
    from halfstep.train.recipe.words import PRECISION_WORDS

    schema = type(finished.task).schema
    for key in (one.key for one in read_flags(list(settings), schema)):
        if key in PRECISION_WORDS:
            raise BadRecipe(f"{key} as a setting", allowed="--precision P, --bf16 or --fp16", do="write --precision P")
        if key not in HOW:
            allowed = [one for one in HOW if one in settings_of(schema)]
            raise BadRecipe(
                f"{key} is part of what {finished.folder} was trained with",
                allowed=", ".join(allowed) or f"no setting: {finished.recipe.task} has none that can change afterwards",
                do=f"leave it out, or train anew with {key} changed",
            )
    recipe = resolved_recipe(read_recipe(str(recipe_in(finished.folder))), settings, schema=schema).recipe
    task = remembering(type(finished.task)(recipe), finished.folder)
    return replace(finished, recipe=recipe, task=task)
