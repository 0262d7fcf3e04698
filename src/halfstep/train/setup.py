"""Build the model, optimizer, schedule and Stepper of a run from its recipe and task."""

from __future__ import annotations

import difflib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn, optim
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep import distributed
from halfstep.data.dataset import derive
from halfstep.data.to_device import placed
from halfstep.errors import BadRecipe, UnknownName, WrongUse
from halfstep.guard.repair.remedies import Remedies
from halfstep.precision.precision import Precision
from halfstep.precision.select import Choice, choose_precision
from halfstep.recipe.schema import (
    NO_FILE,
    DataOptions,
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    Recipe,
    ScheduleOptions,
)
from halfstep.status_line import OnProgress
from halfstep.step.ema import Ema
from halfstep.step.loss import DynamicScale
from halfstep.step.optimizer_slot import owned_by
from halfstep.step.shard_units import shard_units
from halfstep.step.stepper import Stepper
from halfstep.train.activation_checkpointing import checkpoint_activations
from halfstep.train.environment import seed_all
from halfstep.train.guarding import reapply_remedies
from halfstep.train.sharding import (
    StateSize,
    choose_sharding,
    compile_blocks,
    device_memory,
    ranks_a_node,
    reduced_in_fp32,
    shard,
    synchronize_batchnorm,
)
from halfstep.train.task import Task, no_progress
from halfstep.train.weights import load_weights


def freeze(model: nn.Module, parts: list[str]) -> list[str]:
    """Freeze `parts`, dotted names of modules or parameters; return a line for each.

    The statistics of their batch normalization are frozen too, also after `model.train()`. Raises UnknownName for an
    unknown name, and BadRecipe where nothing is left to train.
    """
    # All names are resolved first, so that a wrong one leaves the model unchanged.
    found = {part: _parameters(model, part) for part in parts}
    frozen = {id(parameter) for parameters in found.values() for parameter in parameters}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in frozen]
    if parts and not trained:
        raise BadRecipe(
            f"model.freeze: {', '.join(parts)} leaves nothing to train",
            allowed="at least one trainable part",
            do=f"leave out one of {', '.join(parts)}",
        )
    for part, parameters in found.items():
        for parameter in parameters:
            parameter.requires_grad_(False)
        if part in dict(model.named_modules()):
            _still(model.get_submodule(part))
    return [f"{part} is frozen: {sum(p.numel() for p in each):,} parameters" for part, each in found.items()]


def _parameters(model: nn.Module, part: str) -> list[nn.Parameter]:
    # The final dot makes `layer1` match `layer1.weight` and not `layer10.weight`.
    found = [p for name, p in model.named_parameters() if part and f"{name}.".startswith(f"{part}.")]
    if not found:
        raise _unknown(model, part)
    return found


def _unknown(model: nn.Module, part: str) -> UnknownName:
    names = {name for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
    names |= {name for name, _ in model.named_parameters()}
    near = difflib.get_close_matches(part, sorted(names), n=1, cutoff=0.6)
    top = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    return UnknownName(
        f"model.freeze: the model has no module {part!r} with parameters",
        allowed=f"{', '.join(top[:20])}, or a part of one, such as {max(names, key=len, default='none')}",
        do=f"did you mean {near[0]!r}?" if near else "use one of the allowed names",
    )


def _still(module: nn.Module) -> None:
    for below in module.modules():
        if isinstance(below, _NormBase) and below.track_running_stats:
            below.eval()
            # A class, not a hook or an instance method: copies of the model, such as an EMA, are frozen too.
            below.__class__ = _still_class(type(below))  # type: ignore[assignment]


class Still:
    """A mixin for normalization layers with frozen statistics: `train()` has no effect."""

    def train(self, mode: bool = True) -> Any:
        """Set evaluation mode, ignoring `mode`."""
        return super().train(False)  # type: ignore[misc]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _still_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, Still):
        return kind
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Still{kind.__name__}", (Still, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]


_KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adafactor": optim.Adafactor,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}
_WITH_BETAS = ("adamw", "adam", "nadam", "radam", "adamax")
# Those of torch that accept `fused`.
_WITH_FUSED = ("adamw", "adam", "sgd", "adagrad")


class ParameterGroup(TypedDict, total=False):
    """Parameters of an optimizer; without `weight_decay`, the optimizer's own applies."""

    params: list[nn.Parameter]
    weight_decay: float


def make_optimizer(options: OptimizerOptions, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer, with fused kernels where requested and available.

    Raises `WrongUse` for muon and a model without a matrix that it could train.
    """
    if options.name == "muon":
        return _muon(options, model)
    return _made(options, _groups([p for p in model.parameters() if p.requires_grad]))


def _made(options: OptimizerOptions, groups: list[ParameterGroup]) -> optim.Optimizer:
    arguments: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name == "sgd":
        arguments |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    elif options.name == "rmsprop":
        arguments["momentum"] = options.momentum
    elif options.name == "rprop":
        del arguments["weight_decay"]
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    elif options.name in _WITH_BETAS:
        # The recipe has one momentum for all optimizers; beta2 stays at torch's default.
        arguments["betas"] = (options.momentum, 0.999)
    if options.fused and options.name in _WITH_FUSED:
        try:
            return _KINDS[options.name](groups, fused=True, **arguments)
        except RuntimeError:  # raised by torch where the device has no fused kernel
            pass
    return _KINDS[options.name](groups, **arguments)


class MuonWithAdamW(optim.Optimizer):
    """Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

    Both work on this optimizer's own groups and state, so that it is saved, restored and scheduled as any other is.
    """

    def __init__(self, muon: optim.Muon, adamw: optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state; torch replaces both objects."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        muon, adamw = self.parts
        muon.param_groups = [group for group in self.param_groups if "ns_steps" in group]
        adamw.param_groups = [group for group in self.param_groups if "betas" in group]
        muon.state = adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def _muon(options: OptimizerOptions, model: nn.Module) -> optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    # torch's docs: hidden layers only. Rows of an embedding are looked up, not multiplied.
    looked_up = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in looked_up]
    if not matrices:
        raise WrongUse(
            f"optimizer.name=muon for {type(model).__name__}, which has no trainable matrix",
            allowed="a model with linear or attention layers: muon takes 2-D weights, convolutions have 4-D ones",
            do="write optimizer.name=adamw",
        )
    hidden = {id(p) for p in matrices}
    # match_rms_adamw: updates as large as AdamW's, so that one learning rate and one decay serve both.
    muon = optim.Muon(
        [{"params": matrices}],
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        nesterov=options.momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    others = _groups([p for p in trained if id(p) not in hidden])
    if not others:
        return muon
    return MuonWithAdamW(muon, _made(options.model_copy(update={"name": "adamw"}), others))


def _optimizer_notes(optimizer: optim.Optimizer) -> list[str]:
    if not isinstance(optimizer, MuonWithAdamW):
        return []
    muon, adamw = (sum(p.numel() for p in owned_by(part)) for part in optimizer.parts)
    return [f"muon trains {muon / (muon + adamw):.0%} of the weights, the matrices; adamw trains the rest"]


def moments_of(options: OptimizerOptions) -> int:
    """Return how many numbers the optimizer keeps for each element of a weight, from a step with tiny ones."""
    # Zeros, not a layer with random weights: a run's generators stay as they are.
    tiny = nn.ParameterList([torch.zeros(5, 3), torch.zeros(5, 3, 1)])
    for weight in tiny:
        weight.grad = torch.zeros_like(weight)
    optimizer = make_optimizer(options, tiny)
    optimizer.step()
    kept = ([v.shape for v in optimizer.state[weight].values() if torch.is_tensor(v)] for weight in tiny)
    # The most of any: muon keeps fewer for a matrix than AdamW does for the rest.
    return max(shapes.count(weight.shape) for weight, shapes in zip(tiny, kept, strict=True))


def _groups(trained: list[nn.Parameter]) -> list[ParameterGroup]:
    """Return parameter groups without weight decay for vectors, such as biases and scales of normalization."""
    groups: list[ParameterGroup] = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


REWARM_SHARE = 20
"""A new warm-up takes one in so many updates of its part, where the recipe has no warm-up."""


class SchedulePart(NamedTuple):
    """A range of updates with one warm-up and one decay."""

    begin: int
    end: int
    warmup: int

    @property
    def length(self) -> int:
        """The number of updates of the decay."""
        return max(self.end - self.begin - self.warmup, 1)


class LRSchedule(ABC):
    """A factor of the learning rate. An object, not a function: LambdaLR saves the state of objects only."""

    parts: Sequence[Sequence[int]] = ()
    """The parts of an extended run; the curve stays at the end of a part until the next one starts."""

    def __init__(self, options: ScheduleOptions, total: int, per_epoch: int) -> None:
        found = parts_of(options, total, per_epoch)
        self.warmup, self.length = found[0].warmup, found[0].length
        if options.extensions:
            self.parts = [list(part) for part in found]
        self.prepare(options, per_epoch)

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        """Store the options that the shape needs."""
        return

    @abstractmethod
    def after(self, step: int, part: SchedulePart) -> float:
        """Return the factor after `step` updates of a part, counted from the end of its warm-up."""

    def progress(self, metric: float | None) -> None:
        """Record an evaluation; `metric` is None where it did not improve."""
        return

    def __call__(self, step: int) -> float:
        part, at = self._place(step)
        if at < part.warmup:
            # One more than the warm-up in the divisor, so that the full lr is first reached after it; never 0.
            return self.after(0, part) * (at + 1) / (part.warmup + 1)
        return self.after(at - part.warmup, part)

    def _place(self, step: int) -> tuple[SchedulePart, int]:
        """Return the part of an update, and its number in that part."""
        if not self.parts:
            return SchedulePart(0, self.warmup + self.length, self.warmup), step
        part = SchedulePart(*[part for part in self.parts if part[0] <= step][-1])
        return part, min(step, part.end - 1) - part.begin


class Constant(LRSchedule):
    """A constant learning rate."""

    def after(self, step: int, part: SchedulePart) -> float:
        return 1.0


class Cosine(LRSchedule):
    """Half a cosine, from 1 to `final`."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.final = options.final

    def after(self, step: int, part: SchedulePart) -> float:
        return self.final + (1.0 - self.final) * _falling(step / part.length)


class Steps(LRSchedule):
    """A multiplication by `factor` every few epochs."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.every, self.factor = options.every_epochs * per_epoch, options.factor

    def after(self, step: int, part: SchedulePart) -> float:
        # Epochs count from the beginning of the part, warm-up included.
        return float(self.factor ** ((step + part.warmup) // self.every))


class Plateau(LRSchedule):
    """A multiplication by `factor` after more than `patience` evaluations without improvement."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.patience, self.factor = options.patience, options.factor
        self.num_reductions = self.num_bad_evaluations = 0

    def progress(self, metric: float | None) -> None:
        self.num_bad_evaluations = 0 if metric is not None else self.num_bad_evaluations + 1
        if self.num_bad_evaluations > self.patience:
            self.num_reductions, self.num_bad_evaluations = self.num_reductions + 1, 0

    def after(self, step: int, part: SchedulePart) -> float:
        return float(self.factor**self.num_reductions)


class OneCycle(LRSchedule):
    """A rise from 1/25 over the first 0.3 of the run, then a decay to 1e-4."""

    # The rise and the start are the defaults of torch's OneCycleLR.
    rise, beginning, end = 0.3, 1 / 25, 1e-4

    def after(self, step: int, part: SchedulePart) -> float:
        at = min(step / part.length, 1.0)
        if at < self.rise:
            return self.beginning + (1.0 - self.beginning) * (1.0 - _falling(at / self.rise))
        return self.end + (1.0 - self.end) * _falling((at - self.rise) / (1.0 - self.rise))


_SHAPES: dict[str, type[LRSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Steps,
    "plateau": Plateau,
    "one-cycle": OneCycle,
}


def make_schedule(
    options: ScheduleOptions, optimizer: Optimizer, total: int, per_epoch: int
) -> tuple[LambdaLR, LRSchedule]:
    """Return the schedule for `total` updates, `per_epoch` of them in an epoch, and the shape it follows."""
    shape = _SHAPES[options.name](options, total, per_epoch)
    return LambdaLR(optimizer, shape), shape


def parts_of(options: ScheduleOptions, total: int, per_epoch: int) -> list[SchedulePart]:
    """Return the first part, and one for each extension with a new warm-up; other extensions hold the last value."""
    ends = [(extension.steps or (extension.epochs or 1) * per_epoch) for extension in options.extensions] + [total]
    found = [SchedulePart(0, ends[0], min(options.warmup_steps, ends[0]))]
    for extension, begin, end in zip(options.extensions, ends, ends[1:], strict=False):
        if extension.rewarm:
            added = max(end - begin, 1)
            found.append(SchedulePart(begin, end, min(options.warmup_steps or -(-added // REWARM_SHARE), added // 2)))
    return found


def _falling(share: float) -> float:
    """Return half a cosine, from one to zero."""
    return 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))


AnyRecipe = Recipe[ModelOptions, DataOptions, LossOptions]


@dataclass
class Parts:
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


def prepare(
    task: Task,
    recipe: AnyRecipe,
    device: torch.device,
    *,
    total: int,
    per_epoch: int,
    precision: str | None = None,
    remedies: Remedies | None = None,
    on_progress: OnProgress = no_progress,
) -> Parts:
    """Build everything for `total` updates, `per_epoch` of them in an epoch.

    `precision` is what `auto` resolved to when the run began; it is not measured again. `remedies` are those of the
    run's guard, and override it. `on_progress` is called with the progress of the task's own preparation.
    """
    train = recipe.train
    seed = train.seed or 0
    # Every rank starts with the same weights, and draws different dropout masks afterward.
    seed_all(seed)
    model, notes = make_model(task, recipe, device)
    seed_all(derive(seed, distributed.rank()))
    if remedies is not None:
        notes += reapply_remedies(model, remedies)
        precision = remedies.precision or precision
    choice = choose_precision(precision or recipe.precision, device=device, fallback=not train.strict)
    notes += task.ready(model, choice.precision, on_progress)
    notes += _shared_out(task, recipe, model, choice.precision, device)
    optimizer = make_optimizer(recipe.optimizer, model)
    notes += _optimizer_notes(optimizer)
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
    )
    return Parts(model, optimizer, schedule, shape, stepper, notes)


def _shared_out(
    task: Task, recipe: AnyRecipe, model: nn.Module, precision: Precision, device: torch.device
) -> list[str]:
    """Shard the model where the recipe asks for it or it does not fit otherwise, and compile it; return notes.

    Raises BadRecipe for settings that do not go with it.
    """
    if recipe.world.sync_batchnorm:
        synchronize_batchnorm(model, device)
    sharding = choose_sharding(
        recipe.world,
        state=lambda: StateSize.of(model, moments_of(recipe.optimizer), recipe.train.ema is not None),
        memory=device_memory(device),
        ranks=distributed.size(),
        ranks_a_node=ranks_a_node(),
    )
    if not sharding.is_sharded:
        compile_in_place(model, recipe)
        return reduced_in_fp32(recipe.world)
    units = shard_units(model, precision.narrow)
    if recipe.train.compile:
        compile_blocks(units)
    return [shard(model, units, precision.narrow, sharding, recipe.world, device, task.forward_methods)]


def without_weights(recipe: AnyRecipe) -> AnyRecipe:
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
    notes += freeze(model, recipe.model.freeze)
    model = placed(model, device, recipe.train.channels_last)
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
