"""How many updates a whole run of a recipe takes, by its steps, or by its epochs and its data."""

from __future__ import annotations

import torch

from halfstep.tasks._folder import task_class
from halfstep.train.loaders import make_train_loader
from halfstep.train.loop import planned_steps
from halfstep.train.setup import AnyRecipe, without_weights


def updates_of(recipe: AnyRecipe) -> int:
    """Its data is looked at only where epochs are counted."""
    if recipe.train.steps is not None:
        return int(recipe.train.steps)
    plain = without_weights(recipe)
    alone = plain.model_copy(update={"train": plain.train.model_copy(update={"num_workers": 0})})
    loader = make_train_loader(task_class(plain.task)(plain), alone, torch.empty(0).device)
    return planned_steps(plain, loader.steps_per_epoch)
