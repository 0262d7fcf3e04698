"""A failed step of a run, run again here: its model and its batch from the record, its task from the recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.errors import BadData, HalfstepError
from halfstep.precision.ladder import Choice, choose_precision
from halfstep.step.attempt import Attempt
from halfstep.tasks._finished import task_of
from halfstep.train.black_box.loading import load_attempt, load_model
from halfstep.train.black_box.reading import recipe_digest, run_of
from halfstep.train.black_box.record import Record
from halfstep.train.environment import differences, environment
from halfstep.train.run_folder import RECIPE
from halfstep.train.setup import make_model, without_weights
from halfstep.train.start import AUTO, device_of
from halfstep.train.task import Task


@dataclass(frozen=True)
class Replayed:
    """A step that can be run again."""

    record: Record
    recipe: Any
    model: nn.Module
    choice: Choice
    attempts: tuple[Callable[[], Attempt], ...]
    """Of each process, its own; they are read one after the other, for each may be large."""
    notes: tuple[str, ...]
    """Why it may not come out as it did."""


def open_recorded(record: Record, *, precision: str | None, own: type[Task] | None) -> Replayed:
    """The step of `record`, in its own precision or in another one."""
    if record.without:
        raise BadData(
            f"attempt {record.report.attempt:,} was recorded without its tensors: {record.without}",
            allowed="a step whose weights and batch were kept",
            do="read what the run said about it: add --list",
        )
    run = run_of(record.path)
    task = task_of(run, own)
    recipe = task.recipe
    device = _device(recipe.train.device)
    task.recipe = without_weights(recipe)
    model, _ = make_model(task, task.recipe, device)
    load_model(record, model)
    choice = choose_precision(precision or record.precision, device=device)
    choice.precision.prepare(model.train(), device)
    loss = functools.partial(_loss, task)
    attempts = tuple(functools.partial(load_attempt, record, rank, loss, device) for rank in range(len(record.batches)))
    return Replayed(record, recipe, model, choice, attempts, tuple(_notes(record, run, device, choice, precision)))


def _loss(task: Task, model: nn.Module, batch: Any) -> Any:
    return task.loss(model, batch, None)


def _device(name: str) -> torch.device:
    """The run's own, or what there is here: a step that failed on a cluster is looked at on a desk."""
    try:
        return device_of(name)
    except HalfstepError:
        return device_of(AUTO)


def _notes(record: Record, run: Path, device: torch.device, choice: Choice, asked: str | None) -> list[str]:
    notes = differences(record.environment, environment(device))
    if record.recipe != recipe_digest(run):
        notes.append(f"{RECIPE} was changed since")
    if record.batch_changed:
        notes.append("something wrote into the batch during the step, so what was kept is not what the step began with")
    if choice.precision.name != (asked or record.precision):
        notes.append(f"{asked or record.precision} was asked for, and {choice.precision.name} is what this device has")
    if len(record.batches) > 1:
        notes.append(f"gradients of {len(record.batches)} processes are not summed here; each one's step is run alone")
    return notes
