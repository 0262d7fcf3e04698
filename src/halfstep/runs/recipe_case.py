"""Turn a recipe into a case: its model with random weights, its loss, its first batch and its settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfstep.data.layout import resolve_data_path
from halfstep.data.loader import TrainLoader
from halfstep.errors import BadData
from halfstep.measure.assumption import Assumption
from halfstep.measure.case import Case, CaseData
from halfstep.measure.setting import StepSetting
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_class
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.freezing import freeze_parts
from halfstep.train.loaders import make_train_loader
from halfstep.train.loop import count_planned_steps
from halfstep.train.optimizers import make_optimizer
from halfstep.train.setup import AnyRecipe, remove_initial_weights
from halfstep.train.task import Task

_DRAWN = "shapes"
"""The data that every task can draw."""
_TEXT, _NEW = "python", "none"
"""The text that is on every machine, and the name of a base that is none."""
_CLASSES = 1000
"""The classes that are assumed where neither the recipe nor the data tells how many there are."""


def build_recipe_case(text: str, settings: Iterable[str] = ()) -> Case:
    """Return the case of a recipe.

    Pretrained weights are not downloaded: the initial values affect neither speed nor memory.
    """
    resolved = resolve_run_recipe(read_recipe(text), list(settings))
    recipe = remove_initial_weights(resolved.recipe)
    return _build_task_case(resolved.label, recipe, find_task_class(recipe.task)(recipe))


def build_case_synthetic_fallback(text: str, settings: Iterable[str] = ()) -> Case:
    """Return the case of a recipe; where its data is not here, drawn samples of the recipe's sizes stand for it."""
    resolved = resolve_run_recipe(read_recipe(text), list(settings))
    recipe = remove_initial_weights(resolved.recipe)
    task = find_task_class(recipe.task)(recipe)
    # A language model may be larger than the main memory.
    large = task.reads == "text" and resolved.recipe.model.base == _NEW
    try:
        return _build_task_case(resolved.label, recipe, task, large)
    except BadData:
        if _has_data_here(task.recipe.data.path):
            raise
    data: Any = recipe.data
    if task.reads == "text":
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"name": _TEXT})})
        assumption = Assumption(f"data.path {data.path}, which does not exist here", "windows of the recipe's length")
        case = _build_task_case(resolved.label, recipe, find_task_class(recipe.task)(recipe), large)
        return replace(case, assumptions=(assumption,))
    sides = [side for side in (data.size, getattr(data, "crop", 0)) if isinstance(side, int)]
    needed = 4 * recipe.train.batch_size * recipe.train.microbatches
    drawn = {"name": _DRAWN, "val": 0.5, "samples": needed, "size": max(sides)}
    recipe = recipe.model_copy(update={"data": data.model_copy(update=drawn)})
    task = find_task_class(recipe.task)(recipe)
    classes = getattr(data, "classes", None)
    task.remember({"classes": [str(number) for number in range(classes or _CLASSES)]})
    what = f"samples of the recipe's sizes{'' if classes else f', and {_CLASSES} classes at most'}"
    assumption = Assumption(f"data.path {data.path}, which does not exist here", what)
    return replace(_build_task_case(resolved.label, recipe, task), assumptions=(assumption,))


def _has_data_here(path: str) -> bool:
    try:
        return resolve_data_path(path).exists()
    except BadData:  # a data set of the cache that was not made
        return False


def _build_task_case(name: str, recipe: AnyRecipe, task: Task, without_values: bool = False) -> Case:
    with torch.device("meta") if without_values else nullcontext():
        model = task.model().train()  # a pretrained base comes in evaluation mode
    freeze_parts(model, recipe.model.freeze)
    return Case(
        name=name,
        model=model,
        loss_fn=task.loss,
        batch=_build_host_loader(task, recipe, num_workers=0).read_batch().tensors,
        optimizer=partial(make_optimizer, recipe.optimizer),
        data=partial(_build_recipe_data, task, recipe),
        setting=_build_recipe_setting(recipe),
        average=recipe.train.ema is not None,
        is_recipe=True,
    )


def _build_recipe_setting(recipe: AnyRecipe) -> StepSetting:
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


def _build_host_loader(task: Task, recipe: AnyRecipe, **changed: Any) -> TrainLoader:
    """Return the recipe's loader in host memory, without channels_last; each candidate applies its own layout."""
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"channels_last": False, **changed})})
    return make_train_loader(task, plain, torch.empty(0).device)


def _build_recipe_data(task: Task, recipe: AnyRecipe) -> CaseData:
    loader = _build_host_loader(task, recipe)
    return CaseData(partial(_iterate_batch_tensors, loader), lambda: loader.read_batch().tensors, loader.workers)


def _iterate_batch_tensors(loader: TrainLoader) -> Iterator[Any]:
    for window in loader.windows(epoch=0):
        for batch in window:
            yield batch.tensors


def count_run_updates(recipe: AnyRecipe) -> int:
    """Return the number of updates of a whole run; the data is opened only if the recipe counts epochs."""
    if recipe.train.steps is not None:
        return int(recipe.train.steps)
    plain = remove_initial_weights(recipe)
    # Only the length is needed, so no worker is started.
    alone = plain.model_copy(update={"train": plain.train.model_copy(update={"num_workers": 0})})
    loader = make_train_loader(find_task_class(plain.task)(plain), alone, torch.empty(0).device)
    return count_planned_steps(plain, loader.steps_per_epoch)
