"""From a recipe and a task to a Stepper that is ready to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from halfstep import world
from halfstep.errors import BadRecipe
from halfstep.guard.remedy.remedies import Remedies
from halfstep.precision.ladder import Choice, choose_precision
from halfstep.step.loss_scale import DynamicScale
from halfstep.step.riders import Ema
from halfstep.step.transaction import Stepper
from halfstep.train.cures import placed_again
from halfstep.train.data.order import derive
from halfstep.train.freeze import freeze
from halfstep.train.optimizers import make_optimizer
from halfstep.train.placing import placed
from halfstep.train.randomness import seed_all
from halfstep.train.recipe.schema import DataOptions, LossOptions, LossScaleOptions, ModelOptions, Recipe
from halfstep.train.recomputing import checkpoint_activations
from halfstep.train.schedules import Shape, make_schedule
from halfstep.train.task import Task, Told, unheard
from halfstep.train.weights import load_weights

AnyRecipe = Recipe[ModelOptions, DataOptions, LossOptions]
NOT_PATHS = ("none", "pretrained")
"""Values of `model.weights` that the task itself understands."""


@dataclass
class Parts:
    """What a run trains with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    shape: Shape
    stepper: Stepper
    notes: list[str] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The precision of the run, which a guard may have changed on the way."""
        return self.stepper.choice

    @property
    def lr(self) -> float:
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate


def prepare(
    task: Task,
    recipe: AnyRecipe,
    device: torch.device,
    *,
    total: int,
    per_epoch: int,
    precision: str | None = None,
    cures: Remedies | None = None,
    told: Told = unheard,
) -> Parts:
    """Build everything for `total` updates, `per_epoch` of them in an epoch.

    `precision` is the one that `auto` came to when the run began; it is not measured again. `cures` are what the run's
    guard had placed when it was saved, and come over it. `told` hears how far the task is that gets ready.
    """
    train = recipe.train
    seed = train.seed or 0
    seed_all(seed)  # the same weights on every process ...
    model, notes = make_model(task, recipe, device)
    seed_all(derive(seed, world.rank()))  # ... and other dropout on each
    if cures is not None:
        notes += placed_again(model, cures)
        precision = cures.precision or precision
    choice = choose_precision(precision or recipe.precision, device=device, strict=train.strict)
    notes += task.ready(model, choice.precision, told)
    optimizer = make_optimizer(recipe.optimizer, model)
    schedule, shape = make_schedule(recipe.schedule, optimizer, total, per_epoch)
    stepper = Stepper(
        model,
        optimizer,
        precision=choice,
        clip_norm=train.clip_norm,
        clip_value=train.clip_value,
        schedule=schedule,
        ema=Ema(model, train.ema) if train.ema is not None else None,
        loss_scale=_loss_scale(recipe.loss_scale) if choice.precision.scaled else None,
    )
    return Parts(model, optimizer, schedule, shape, stepper, notes)


def without_weights(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe of a model whose weights come from elsewhere: nothing is read or downloaded to begin with."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": NOT_PATHS[0]})})


def make_model(task: Task, recipe: AnyRecipe, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The task's model with the weights that the recipe begins with, where and how it will run."""
    model, notes = task.model(), []
    if recipe.model.weights not in NOT_PATHS:
        notes.append(str(load_weights(model, Path(recipe.model.weights).expanduser(), partial=True)))
    notes += freeze(model, recipe.model.freeze)
    model = placed(model, device, recipe.train.channels_last)
    if recipe.train.checkpoint_activations and recipe.train.compile:
        raise BadRecipe(
            "train.compile together with train.checkpoint_activations",
            allowed="one of them; torch cannot compile what keeps batch statistics still while it computes them again",
            do="write train.compile=false",
        )
    if recipe.train.checkpoint_activations:
        notes.append(f"activations of {checkpoint_activations(model)} blocks are computed again in backward")
    if recipe.train.compile:
        model.compile()
    return model, notes


def _loss_scale(options: LossScaleOptions) -> DynamicScale:
    return DynamicScale(**options.model_dump())
