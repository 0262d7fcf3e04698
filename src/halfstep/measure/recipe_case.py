"""Turn a recipe into a case: its model with random weights, its loss, its first batch and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfstep.data.layout import data_place
from halfstep.data.loader import TrainLoader
from halfstep.errors import BadData
from halfstep.measure.assumption import Assumption
from halfstep.measure.case import Case, CaseData
from halfstep.measure.setting import StepSetting
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import task_class
from halfstep.runs.resolve import resolved_recipe
from halfstep.train.freezing import freeze
from halfstep.train.loaders import make_train_loader
from halfstep.train.loop import planned_steps
from halfstep.train.optimizers import make_optimizer
from halfstep.train.setup import AnyRecipe, without_weights
from halfstep.train.task import Task

_DRAWN = "shapes"
"""The data that every task can draw."""
_TEXT, _NEW = "python", "none"
"""The text that is on every machine, and the name of a base that is none."""
_CLASSES = 1000
"""The classes that are assumed where neither the recipe nor the data tells how many there are."""


def case_of_recipe(text: str, settings: Iterable[str] = ()) -> Case:
    """Return the case of a recipe.

    Pretrained weights are not downloaded: the initial values affect neither speed nor memory.
    """
    resolved = resolved_recipe(read_recipe(text), list(settings))
    recipe = without_weights(resolved.recipe)
    return _case(resolved.label, recipe, task_class(recipe.task)(recipe))


def described_recipe(text: str, settings: Iterable[str] = ()) -> Case:
    """Return the case of a recipe; where its data is not here, drawn samples of the recipe's sizes stand for it."""
    resolved = resolved_recipe(read_recipe(text), list(settings))
    recipe = without_weights(resolved.recipe)
    task = task_class(recipe.task)(recipe)
    # A language model may be larger than the main memory.
    large = task.reads == "text" and resolved.recipe.model.base == _NEW
    try:
        return _case(resolved.label, recipe, task, large)
    except BadData:
        if _is_here(task.recipe.data.path):
            raise
    data: Any = recipe.data
    if task.reads == "text":
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"name": _TEXT})})
        assumption = Assumption(f"data.path {data.path}, which does not exist here", "windows of the recipe's length")
        case = _case(resolved.label, recipe, task_class(recipe.task)(recipe), large)
        return replace(case, assumptions=(assumption,))
    sides = [side for side in (data.size, getattr(data, "crop", 0)) if isinstance(side, int)]
    needed = 4 * recipe.train.batch_size * recipe.train.microbatches
    drawn = {"name": _DRAWN, "val": 0.5, "samples": needed, "size": max(sides)}
    recipe = recipe.model_copy(update={"data": data.model_copy(update=drawn)})
    task = task_class(recipe.task)(recipe)
    classes = getattr(data, "classes", None)
    task.remember({"classes": [str(number) for number in range(classes or _CLASSES)]})
    what = f"samples of the recipe's sizes{'' if classes else f', and {_CLASSES} classes at most'}"
    assumption = Assumption(f"data.path {data.path}, which does not exist here", what)
    return replace(_case(resolved.label, recipe, task), assumptions=(assumption,))


def _is_here(path: str) -> bool:
    try:
        return data_place(path).exists()
    except BadData:  # a data set of the cache that was not made
        return False


def _case(name: str, recipe: AnyRecipe, task: Task, without_values: bool = False) -> Case:
    with torch.device("meta") if without_values else nullcontext():
        model = task.model().train()  # a pretrained base comes in evaluation mode
    freeze(model, recipe.model.freeze)
    return Case(
        name=name,
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
        weight_format=train.weight_format,
        gradient_sums=train.gradient_sums,
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
