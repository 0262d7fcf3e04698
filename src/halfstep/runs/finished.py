"""Load a finished run: its task, its recipe and its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData, NoCheckpoint, WrongUse, choose_caller_wording, format_option_with_value
from halfstep.files import read_json
from halfstep.guard.repair.remedies import Remedies
from halfstep.journal.events import Journal
from halfstep.page import Page, Paragraph
from halfstep.precision.select import Choice, choose_precision
from halfstep.random_state import preserve_random_state
from halfstep.recipe.resolve import validate_against_schema
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_class
from halfstep.step.to_device import move_model_to_device
from halfstep.train.environment import AutoChoices
from halfstep.train.evaluation import SampleChooser
from halfstep.train.guarding import read_guard_remedies, read_result_remedies, reapply_remedies
from halfstep.train.loop import Loop
from halfstep.train.outputs import BEST, FACTS, LAST
from halfstep.train.process_group import resolve_device
from halfstep.train.resume_proof import Build
from halfstep.train.run import make_loop
from halfstep.train.run_folder import RECIPE, RESULT, find_recipe_file
from halfstep.train.setup import remove_initial_weights
from halfstep.train.state import State
from halfstep.train.task import MissingTaskMethod, Prediction, Task
from halfstep.train.weights import load_weights

WHICH = {"best": BEST, "last": LAST}


@dataclass(frozen=True)
class TrainedModel(PageResult):
    """The model of a run on its device, with its task and its precision."""

    folder: Path
    task: Task
    model: nn.Module
    """The model on its device, ready to call: `model(preprocessing(image))`."""
    choice: Choice
    device: torch.device

    def __str__(self) -> str:
        task, weights = self.task.recipe.task, sum(p.numel() for p in self.model.parameters())
        return f"{self.folder}: {task}, {weights:,} weights, in {self.choice.precision.name} on {self.device}"

    def page(self) -> Page:
        """Return the page about it: what it predicts, and with what."""
        return Page(f"model of {self.folder}", (Paragraph(str(self), wrap=False),))

    def channels(self) -> int:
        """Return how many channels the task reads of an image."""
        channels: int = getattr(self.task, "channels_read", getattr(self.task.recipe.data, "channels", 3))
        return channels

    def predict_tensor(self, image: torch.Tensor, *, allowed: str, do: str) -> Prediction:
        """Return the prediction for an image or a clip.

        Raise `WrongUse` with `allowed` and `do` for a task that predicts nothing about images.
        """
        try:
            with self.choice.precision.inference(self.device):
                return self.task.predict(self.model, image.to(self.device))
        except MissingTaskMethod:
            raise WrongUse(f"the model of {self.folder} does not take images", allowed=allowed, do=do) from None


@dataclass(frozen=True)
class FinishedRun(TrainedModel):
    """The task, model, recipe and weights of a run, ready to use."""

    recipe: Any
    weights: Path


def open_finished(folder: Path, *, weights: str, precision: str | None, own: type[Task] | None) -> FinishedRun:
    """Load a run with its `best` or `last` weights or a file, in its own precision or another.

    Raise `BadData` if the weights are missing or non-finite.
    """
    task = load_saved_task(folder, own)
    recipe = task.recipe
    device = resolve_device(recipe.train.device)
    path = folder / WHICH[weights] if weights in WHICH else Path(weights)
    # A model is built with random weights before its own are loaded.
    with preserve_random_state(device):
        model = move_model_to_device(load_task_model(task, path), device, recipe.train.channels_last)
    if precision is None:
        # The guard's islands belong to the run's own precision; another precision may not need them.
        remedies = _read_run_remedies(folder)
        reapply_remedies(model, remedies)
        precision = remedies.precision
    choice = choose_precision(precision or recipe.precision, device=device, fallback=not recipe.train.strict)
    task.store_frozen(model, choice.precision)
    if choice.precision.changes_model:
        choice.precision.prepare(model, device)
    return FinishedRun(folder, task, model.eval(), choice, device, recipe, path)


def load_saved_task(folder: Path, own: type[Task] | None) -> Task:
    """Return the task of a run with its recipe and its saved facts, without reading the data."""
    found = read_recipe(str(find_recipe_file(folder)))
    kind = own or find_task_class(str(found.raw.get("task")))
    return restore_task_facts(kind(validate_against_schema(found.raw, kind.schema, str(folder / RECIPE))), folder)


def restore_task_facts(task: Task, folder: Path) -> Task:
    """Restore the facts of the run in `folder` into `task`, and return it."""
    task.remember(read_json(folder / FACTS) or {})
    return task


def _read_run_remedies(folder: Path) -> Remedies:
    """Return the remedies the run's guard applied: from its result, or from the newest checkpoint."""
    result = read_json(folder / RESULT)
    if result is not None:
        return read_result_remedies(result)
    try:
        newest, _ = find_newest_intact(folder / CHECKPOINTS)
    except NoCheckpoint:
        newest = None  # the weights are files of their own and usable without a checkpoint
    if newest is None:
        return Remedies()
    where = newest.generation
    return read_guard_remedies(State.from_parts(*read_rank_state(where, 0), where=str(where.path)).guards) or Remedies()


def load_task_model(task: Task, weights: Path) -> nn.Module:
    """Return the model of a task with the weights of a file. Raise `BadData` if they are missing or non-finite."""
    if weights.name == BEST and not weights.is_file() and weights.with_name(LAST).is_file():
        raise BadData(
            f"no weights at {weights}: no evaluation of the run was finite",
            allowed=f"{', '.join(WHICH)}, or a .safetensors file",
            do=f"write {format_option_with_value('weights', 'last')}",
        )
    if not weights.is_file():
        raise BadData(
            f"no weights at {weights}",
            allowed=f"{', '.join(WHICH)}, or a .safetensors file",
            do=f"train the run to its first evaluation, or give {format_option_with_value('weights', 'PATH')}",
        )
    # The weights are loaded below; fetching pretrained ones first would be wasted, and may fail offline.
    task.recipe = remove_initial_weights(task.recipe)
    model = task.model()
    load_weights(model, weights)
    return model


DRAWN = "shapes"


def replace_validation_data(finished: FinishedRun, place: Path) -> FinishedRun:
    """Return the run with all samples of a folder as validation data; its classes stay those of training.

    Raise `WrongUse` for a task without labeled evaluation, `BadData` for a folder of another layout.
    """
    data = finished.recipe.data
    fields = set(type(data).model_fields)
    if not SampleChooser(finished.task).judges or not {"path", "val", "name"} <= fields:
        raise WrongUse(
            f"a folder for {finished.folder}: the task {finished.recipe.task} is evaluated on its own data alone",
            allowed="runs of segmentation and classification",
            do=_suggest_evaluate_call(finished),
        )
    _check_sample_folder(place, finished)
    name = str(data.name)
    if data.name == DRAWN:
        # Generated data has no folder: the kind that this one looks like.
        name = "shards" if any(place.glob("*.tar")) else str(type(data).model_fields["name"].default)
    # Absolute: a relative name would be looked up below the data folder first.
    changes: dict[str, object] = {"name": name, "path": str(place), "val": str(place.resolve())}
    # data.masks belongs to the training images.
    changes |= {"masks": None} if "masks" in fields else {}
    recipe = finished.recipe.model_copy(update={"data": data.model_copy(update=changes)})
    task = restore_task_facts(type(finished.task)(recipe), finished.folder)
    try:
        task.source("val")
    except BadData as error:
        do = f"lay {place} out like the training data, or give a folder inside it"
        raise BadData(error.given, allowed=error.allowed, do=do) from None
    return replace(finished, recipe=recipe, task=task)


def _suggest_evaluate_call(finished: FinishedRun, data: str | Path | None = None) -> str:
    """Return how the caller evaluates a run, on a folder if one is given."""
    run = finished.folder
    if data is None:
        return choose_caller_wording(f"halfstep evaluate {run}", f'halfstep.evaluate("{run}")')
    return choose_caller_wording(f"halfstep evaluate {run} {data}", f'halfstep.evaluate("{run}", "{data}")')


def _check_sample_folder(place: Path, finished: FinishedRun) -> None:
    if not place.is_dir():
        raise BadData(
            f"{place} {'is not a folder' if place.exists() else 'does not exist'}",
            allowed="a folder of labeled samples, laid out like the training data",
            do=f"{_suggest_evaluate_call(finished, 'FOLDER')}, or without FOLDER for its own validation data",
        )
    # A class may be called test or val as well.
    splits = [name for name in ("test", "val") if (place / name).is_dir()]
    if splits and not set(splits) & set(finished.task.facts().get("classes", ())):
        raise BadData(
            f"{place} contains the folder {splits[0]}, which is a separate set",
            allowed="the folder of one set",
            do=_suggest_evaluate_call(finished, place / splits[0]),
        )


def build_run_rebuilder(folder: Path, own: Callable[[], type[Task]] | None) -> Build:
    """Return a function that rebuilds the run in `folder`, to train in another folder.

    `own` returns the class of a user's task. It is loaded anew each time: module state of the user's file is lost when
    a process ends, so it must be lost here too.
    """
    found = read_recipe(str(find_recipe_file(folder)))

    def build(where: Path, auto_choices: AutoChoices | None, remedies: Remedies | None) -> Loop:
        kind = own() if own else find_task_class(str(found.raw.get("task")))
        recipe = validate_against_schema(found.raw, kind.schema, str(folder / RECIPE))
        order = auto_choices.order if auto_choices else None
        return make_loop(
            kind(recipe), recipe, where, Journal(), auto_choices=auto_choices, remedies=remedies, order=order
        )

    return build
