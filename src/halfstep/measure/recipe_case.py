"""A recipe as a case: its model with random weights, its loss, its first batch, and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from halfstep.measure.case import Case, Data
from halfstep.measure.setting import Setting
from halfstep.tasks._folder import task_class
from halfstep.tasks._resolving import resolved_recipe
from halfstep.train.data.loader import TrainLoader
from halfstep.train.freeze import freeze
from halfstep.train.loaders import make_train_loader
from halfstep.train.optimizers import make_optimizer
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.setup import AnyRecipe, without_weights
from halfstep.train.task import Task


def case_of_recipe(text: str, settings: Iterable[str] = ()) -> Case:
    """Nothing is downloaded for it: which numbers a pretrained model begins with changes no speed and no size."""
    resolved = resolved_recipe(read_recipe(text), list(settings))
    recipe = without_weights(resolved.recipe)
    task = task_class(recipe.task)(recipe)
    model = task.model()
    freeze(model, recipe.model.freeze)
    return Case(
        name=resolved.label,
        model=model,
        loss_fn=task.loss,
        batch=_loader(task, recipe, num_workers=0).read_batch().tensors,
        optimizer=partial(make_optimizer, recipe.optimizer),
        data=partial(_data, task, recipe),
        setting=_setting(recipe),
        average=recipe.train.ema is not None,
    )


def _setting(recipe: AnyRecipe) -> Setting:
    train = recipe.train
    return Setting(
        precision=recipe.precision,
        channels_last=train.channels_last,
        compile=train.compile,
        batch=train.batch_size,
        microbatches=train.microbatches,
        recompute=train.checkpoint_activations,
    )


def _loader(task: Task, recipe: AnyRecipe, **changed: Any) -> TrainLoader:
    """As the recipe says, but in the main memory and laid out plainly: a setting lays a batch out as it wants it."""
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"channels_last": False, **changed})})
    return make_train_loader(task, plain, torch.empty(0).device)


def _data(task: Task, recipe: AnyRecipe) -> Data:
    loader = _loader(task, recipe)
    return Data(partial(_batches, loader), lambda: loader.read_batch().tensors, loader.workers)


def _batches(loader: TrainLoader) -> Iterator[Any]:
    for window in loader.windows(epoch=0):
        for batch in window:
            yield batch.tensors
