"""Turn a recipe into a case: its model with random weights, its loss, its first batch and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from halfstep.data.loader import TrainLoader
from halfstep.measure.case import Case, CaseData
from halfstep.measure.setting import StepSetting
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import task_class
from halfstep.runs.resolve import resolved_recipe
from halfstep.train.loaders import make_train_loader
from halfstep.train.loop import planned_steps
from halfstep.train.setup import AnyRecipe, freeze, make_optimizer, without_weights
from halfstep.train.task import Task


def case_of_recipe(text: str, settings: Iterable[str] = ()) -> Case:
    """Return the case of a recipe.

    Pretrained weights are not downloaded: the initial values affect neither speed nor memory.
    """
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
        is_recipe=True,
    )


def _setting(recipe: AnyRecipe) -> StepSetting:
    train = recipe.train
    return StepSetting(
        precision=recipe.precision,
        channels_last=train.channels_last,
        compile=train.compile,
        batch=train.batch_size,
        microbatches=train.microbatches,
        recompute=train.checkpoint_activations,
    )


def _loader(task: Task, recipe: AnyRecipe, **changed: Any) -> TrainLoader:
    """Return the recipe's loader in host memory, without channels_last; each candidate applies its own layout."""
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"channels_last": False, **changed})})
    return make_train_loader(task, plain, torch.empty(0).device)


def _data(task: Task, recipe: AnyRecipe) -> CaseData:
    loader = _loader(task, recipe)
    return CaseData(partial(_batches, loader), lambda: loader.read_batch().tensors, loader.workers)


def _batches(loader: TrainLoader) -> Iterator[Any]:
    for window in loader.windows(epoch=0):
        for batch in window:
            yield batch.tensors


def updates_of(recipe: AnyRecipe) -> int:
    """Return the number of updates of a whole run; the data is opened only if the recipe counts epochs."""
    if recipe.train.steps is not None:
        return int(recipe.train.steps)
    plain = without_weights(recipe)
    # Only the length is needed, so no worker is started.
    alone = plain.model_copy(update={"train": plain.train.model_copy(update={"num_workers": 0})})
    loader = make_train_loader(task_class(plain.task)(plain), alone, torch.empty(0).device)
    return planned_steps(plain, loader.steps_per_epoch)
