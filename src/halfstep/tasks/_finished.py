"""A finished run, opened again: its task, its recipe, and the weights that it left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from halfstep.errors import BadData, NoCheckpoint
from halfstep.files import read_json
from halfstep.guard.remedy.remedies import Remedies
from halfstep.precision.ladder import Choice, choose_precision
from halfstep.tasks._folder import task_class
from halfstep.train.checkpoint.generation import CHECKPOINTS
from halfstep.train.checkpoint.reading import newest_whole, read_state
from halfstep.train.cures import cures_in, cures_of, placed_again
from halfstep.train.keeping import BEST, FACTS, LAST
from halfstep.train.placing import placed
from halfstep.train.recipe.complaints import bad_recipe, complaints_from
from halfstep.train.recipe.sources import read_recipe
from halfstep.train.run_folder import RECIPE, RESULT
from halfstep.train.setup import without_weights
from halfstep.train.start import device_of
from halfstep.train.state import State
from halfstep.train.task import Task
from halfstep.train.weights import load_weights

WHICH = {"best": BEST, "last": LAST}


@dataclass(frozen=True)
class Finished:
    """What a run left, ready to be used."""

    folder: Path
    recipe: Any
    task: Task
    model: nn.Module
    choice: Choice
    device: torch.device
    weights: Path


def open_finished(folder: Path, *, weights: str, precision: str | None, own: type[Task] | None) -> Finished:
    """The task of a run with its weights, `best`, `last` or a file, on a device; in the run's precision or another."""
    task = task_of(folder, own)
    recipe = task.recipe
    device = device_of(recipe.train.device)
    path = folder / WHICH[weights] if weights in WHICH else Path(weights)
    model = placed(model_with(task, path), device, recipe.train.channels_last)
    if precision is None:
        # As it was trained: in another precision, what its guard had cured may be no trouble.
        cures = _cures(folder)
        placed_again(model, cures)
        precision = cures.precision
    choice = choose_precision(precision or recipe.precision, device=device, strict=recipe.train.strict)
    return Finished(folder, recipe, task, model.eval(), choice, device, path)


def task_of(folder: Path, own: type[Task] | None) -> Task:
    """The task of a run, with its recipe, and with what it must know without its data."""
    found = read_recipe(str(recipe_in(folder)))
    kind = own or task_class(str(found.raw.get("task")))
    return remembering(kind(checked(found.raw, kind.schema, folder / RECIPE)), folder)


def remembering(task: Task, folder: Path) -> Task:
    task.remember(read_json(folder / FACTS) or {})
    return task


def _cures(folder: Path) -> Remedies:
    """What the run's guard placed: from its result, or while it has none, from its newest checkpoint."""
    result = read_json(folder / RESULT)
    if result is not None:
        return cures_of(result)
    try:
        newest, _ = newest_whole(folder / CHECKPOINTS)
    except NoCheckpoint:
        newest = None  # the weights lie beside them, and can be used without
    if newest is None:
        return Remedies()
    where = newest.generation
    return cures_in(State.from_parts(*read_state(where, 0), where=str(where.path)).guards) or Remedies()


def recipe_in(folder: Path) -> Path:
    """The recipe of a run's folder, or BadData where there is no run."""
    if not (folder / RECIPE).is_file():
        raise BadData(
            f"{folder} holds no run",
            allowed=f"the folder of a run, with its {RECIPE}",
            do="give the folder that `halfstep train` named, such as runs/segmentation_tiny",
        )
    return folder / RECIPE


def checked(raw: Any, schema: Any, path: Path) -> Any:
    """A run's recipe may have been edited since, or come from another version."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise bad_recipe(str(path), complaints_from(error, schema)) from None


def model_with(task: Task, weights: Path) -> nn.Module:
    """The model of a task with the weights of a file, which are finite."""
    if weights.name == BEST and not weights.is_file() and weights.with_name(LAST).is_file():
        raise BadData(
            f"no weights at {weights}: no evaluation of the run was finite",
            allowed=f"{', '.join(WHICH)}, or a .safetensors file",
            do="write --weights last",
        )
    if not weights.is_file():
        raise BadData(
            f"no weights at {weights}",
            allowed=f"{', '.join(WHICH)}, or a .safetensors file",
            do="train the run to its first evaluation, or give --weights PATH",
        )
    task.recipe = without_weights(task.recipe)
    model = task.model()
    load_weights(model, weights)
    return model
