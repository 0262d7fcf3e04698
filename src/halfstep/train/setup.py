"""Build the model, optimizer, schedule and Stepper of a run from its recipe and task."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from halfstep import distributed
from halfstep.data.dataset import derive_seed
from halfstep.errors import BadRecipe
from halfstep.guard.repair.remedies import Remedies
from halfstep.precision.precision import Precision
from halfstep.precision.select import Choice, choose_precision
from halfstep.recipe.schema import (
    NO_FILE,
    DataOptions,
    LossOptions,
    ModelOptions,
    Recipe,
)
from halfstep.status_line import OnProgress
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.ema import Ema
from halfstep.step.loss import DynamicScale
from halfstep.step.stepper import Stepper
from halfstep.step.synchronizers.shard_units import list_shard_units
from halfstep.step.to_device import move_model_to_device
from halfstep.train.environment import seed_all
from halfstep.train.freezing import freeze_parts
from halfstep.train.guarding import reapply_remedies
from halfstep.train.optimizers import count_optimizer_moments, describe_optimizer_split, make_optimizer
from halfstep.train.schedules import LRSchedule, make_schedule
from halfstep.train.sharding import (
    StateSize,
    check_reduce_format,
    choose_sharding,
    compile_blocks,
    count_ranks_per_node,
    read_device_memory,
    shard_model,
    synchronize_batchnorm,
)
from halfstep.train.task import Task, ignore_progress
from halfstep.train.weights import load_weights

AnyRecipe = Recipe[ModelOptions, DataOptions, LossOptions]


@dataclass
class TrainingParts:
    """The objects that a run trains with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    shape: LRSchedule
    stepper: Stepper
    notes: list[str] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The precision of the run, which a guard may have changed."""
        return self.stepper.choice

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr


def build_training_parts(
    task: Task,
    recipe: AnyRecipe,
    device: torch.device,
    *,
    total: int,
    per_epoch: int,
    precision: str | None = None,
    remedies: Remedies | None = None,
    on_progress: OnProgress = ignore_progress,
) -> TrainingParts:
    """Build everything for `total` updates, `per_epoch` of them in an epoch.

    `precision` is what `auto` resolved to when the run began; it is not measured again. `remedies` are those of the
    run's guard, and override it. `on_progress` is called with the progress of the task's own preparation.
    """
    train = recipe.train
    seed = train.seed or 0
    # Every rank starts with the same weights, and draws different dropout masks afterward.
    seed_all(seed)
    model, notes = make_model(task, recipe, device)
    seed_all(derive_seed(seed, distributed.rank()))
    if remedies is not None:
        notes += reapply_remedies(model, remedies)
        precision = remedies.precision or precision
    choice = choose_precision(precision or recipe.precision, device=device, fallback=not train.strict)
    notes += task.ready(model, choice.precision, on_progress)
    notes += _shard_and_compile(task, recipe, model, choice.precision, device)
    optimizer = make_optimizer(recipe.optimizer, model)
    notes += describe_optimizer_split(recipe.optimizer, model)
    schedule, shape = make_schedule(recipe.schedule, optimizer, total, per_epoch)
    stepper = Stepper(
        model,
        optimizer,
        precision=choice,
        clip_norm=train.clip_norm,
        clip_value=train.clip_value,
        schedule=schedule,
        ema=Ema(model, train.ema) if train.ema is not None else None,
        loss_scale=DynamicScale(**recipe.loss_scale.model_dump()) if choice.precision.scaled else None,
        check=train.check,
        weight_format=train.weight_format,
        gradient_sums=train.gradient_sums,
        rounding_seed=seed,
    )
    stepper.order_norms_by_groups()  # runs of earlier versions resume to the bit
    notes += _describe_narrow_weights(stepper)
    return TrainingParts(model, optimizer, schedule, shape, stepper, notes)


def _describe_narrow_weights(stepper: Stepper) -> list[str]:
    if stepper.weights is None:
        return []
    narrow = sum(p.numel() for p in stepper.weights.parameters)
    share = narrow / sum(p.numel() for p in stepper.model.parameters() if p.requires_grad)
    return [f"{share:.1%} of the trained weights are stored as {stepper.weights.format}, the others in fp32"]


def _shard_and_compile(
    task: Task, recipe: AnyRecipe, model: nn.Module, precision: Precision, device: torch.device
) -> list[str]:
    """Shard the model where the recipe asks for it or it does not fit otherwise, and compile it; return notes.

    Raises BadRecipe for settings that do not go with it.
    """
    if recipe.world.sync_batchnorm:
        synchronize_batchnorm(model, device)
    sharding = choose_sharding(
        recipe.world,
        state=lambda: StateSize.of(model, count_optimizer_moments(recipe.optimizer), recipe.train.ema is not None),
        memory=read_device_memory(device),
        ranks=distributed.count_ranks(),
        ranks_a_node=count_ranks_per_node(),
    )
    if not sharding.is_sharded:
        compile_in_place(model, recipe)
        return check_reduce_format(recipe.world)
    units = list_shard_units(model, precision.narrow)
    if recipe.train.compile:
        compile_blocks(units)
    return [shard_model(model, units, precision.narrow, sharding, recipe.world, device, task.forward_methods)]


def remove_initial_weights(recipe: AnyRecipe) -> AnyRecipe:
    """Return a recipe that reads or downloads no initial weights."""
    fields = {"weights", "backbone_weights"} & set(type(recipe.model).model_fields)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=dict.fromkeys(fields, NO_FILE[0]))})


def make_model(task: Task, recipe: AnyRecipe, device: torch.device) -> tuple[nn.Module, list[str]]:
    """Return the task's model with its initial weights, on its device and in its memory format, and notes.

    Raises BadRecipe for settings that exclude each other.
    """
    model, notes = task.model(), []
    if recipe.model.weights not in NO_FILE:
        notes.append(str(load_weights(model, Path(os.path.expanduser(recipe.model.weights)), partial=True)))
    notes += freeze_parts(model, recipe.model.freeze)
    model = move_model_to_device(model, device, recipe.train.channels_last)
    if recipe.train.checkpoint_activations and recipe.train.compile:
        raise BadRecipe(
            "train.compile together with train.checkpoint_activations",
            allowed="one of them; torch cannot compile the hooks that freeze batch statistics during recomputation",
            do="write train.compile=false",
        )
    if recipe.train.checkpoint_activations:
        notes.append(f"activations of {checkpoint_activations(model)} blocks are computed again in backward")
    return model, notes


def compile_in_place(model: nn.Module, recipe: AnyRecipe) -> None:
    """Compile the model where the recipe asks for it."""
    if recipe.train.compile:
        # Unlike torch.compile(model), this keeps the names in the state dict.
        model.compile()
