"""Decide what each rank holds of the model, and shard it with FSDP2 where a rank holds only a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfstep import distributed, numbers
from halfstep.errors import BadRecipe
from halfstep.formats import BF16
from halfstep.journal.events import Journal
from halfstep.launch_variables import read_launched_rank
from halfstep.recipe.schema import WorldOptions
from halfstep.step.stepper import Stepper
from halfstep.step.synchronizers.shard_units import BLOCK, ShardUnit, apply_fully_shard, create_shard_mesh

if TYPE_CHECKING:
    from halfstep.step.experiment.reduction_error import ReductionErrorMeter

Mode = Literal["ddp", "fsdp", "hsdp"]
STATE_SHARE = 0.6
"""The share of a device's memory that weights, gradients and optimizer state may take; the rest is for activations."""
_BYTES = 4
"""Weights are kept in fp32, and so is everything that is of their shape."""
LARGE_REDUCTION_ERROR = 0.03
"""The relative error of summed gradients that is worth a warning; one rounding to bf16 makes about 0.0015."""


@dataclass(frozen=True)
class Sharding:
    """The part of the model that each rank holds: all of it (`ddp`), or one of `shard_size` parts."""

    mode: Mode
    shard_size: int
    reason: str

    @property
    def is_sharded(self) -> bool:
        """Return whether a rank holds only a part of the model."""
        return self.mode != "ddp"


@dataclass(frozen=True)
class StateSize:
    """The bytes of a run's weights, gradients, averages and optimizer state, whole or as one of several shards."""

    shapes: Sequence[tuple[Sequence[int], float]]
    """The shape of each parameter, and how many fp32 numbers there are for each of its elements."""

    @classmethod
    def of(cls, model: nn.Module, moments: float, ema: bool) -> StateSize:
        """Return it for a model, with so many optimizer numbers for each element that is trained."""
        trained = 2 + moments + ema
        return cls([(p.shape, trained if p.requires_grad else 1 + ema) for p in model.parameters()])

    def a_rank(self, shard_size: int) -> int:
        """Return the bytes on each rank; FSDP2 pads the rows of a parameter to a multiple of the ranks."""
        return int(
            sum(
                _BYTES * numbers * math.ceil(shape[0] / shard_size) * math.prod(shape[1:])
                for shape, numbers in self.shapes
                if len(shape)
            )
        )


def choose_sharding(
    options: WorldOptions, *, state: Callable[[], StateSize], memory: int | None, ranks: int, ranks_a_node: int
) -> Sharding:
    """Return what each rank holds; `auto` is the least sharding whose state fits into `memory` bytes of a device.

    `state` is called only where it decides. `memory` is None if it is not known or shared, as on a CPU. Raises
    BadRecipe for groups that do not divide the ranks.
    """
    group = options.shard_size or ranks_a_node
    if options.mode == "hsdp" and (ranks % group or group >= ranks):
        raise BadRecipe(
            f"world=hsdp in groups of {group}, on {ranks} ranks",
            allowed="two groups or more, of the same size",
            do="write world.shard_size=N, a divisor of the ranks, or world=fsdp",
        )
    if options.mode != "auto":
        size = {"ddp": 1, "fsdp": ranks, "hsdp": group}[options.mode]
        return Sharding(options.mode if ranks > 1 else "ddp", size if ranks > 1 else 1, "as the recipe requests")
    if ranks == 1:
        return Sharding("ddp", 1, "one rank")
    if memory is None:
        return Sharding("ddp", 1, "the ranks share the memory of the host")
    return _choose_least_sharding(state(), memory, ranks, group)


def _choose_least_sharding(state: StateSize, memory: int, ranks: int, group: int) -> Sharding:
    """Return the least sharding that fits; where none does, the one that takes the least."""
    # Groups grow from a node, whose own links are several times faster than the network.
    sizes, doubled = [1], group
    while 1 < doubled < ranks:
        if ranks % doubled == 0:
            sizes.append(doubled)
        doubled *= 2
    sizes.append(ranks)
    fitting = (size for size in sizes if state.a_rank(size) <= memory * STATE_SHARE)
    # Not always all ranks: a parameter with fewer rows than ranks is padded.
    size = next(fitting, None) or min(sizes, key=state.a_rank)
    mode: Mode = "ddp" if size == 1 else "fsdp" if size == ranks else "hsdp"
    said = (
        f"weights, gradients and optimizer state take {numbers.format_bytes(state.a_rank(1))} of "
        f"{numbers.format_bytes(memory)}"
    )
    return Sharding(
        mode, size, said if size == 1 else f"{said}, and {numbers.format_bytes(state.a_rank(size))} in shards"
    )


def check_reduce_format(options: WorldOptions) -> list[str]:
    """Return a note where `world.reduce` has no effect on ranks that hold all weights; raise BadRecipe for ddp."""
    if options.reduce != BF16.name or distributed.count_ranks() == 1:
        return []
    if options.mode == "ddp":
        raise BadRecipe(
            f"world.reduce={options.reduce} together with world=ddp, which sums gradients in fp32",
            allowed="world.reduce=fp32; bf16 with shards",
            do="write world=fsdp or world=hsdp, or leave world.reduce out",
        )
    return [f"world.reduce={options.reduce} is for shards: each rank holds all weights, gradients are summed in fp32"]


def count_ranks_per_node() -> int:
    """Return how many ranks the launcher started on this node."""
    return read_launched_rank().local_world_size or distributed.count_ranks()


def read_device_memory(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory; None on a CPU, whose memory all ranks share."""
    if torch.empty(0, device=device).is_cpu:
        return None
    return torch.accelerator.get_memory_info(device)[1]


def synchronize_batchnorm(model: nn.Module, device: torch.device) -> None:
    """Make all batch normalization compute its statistics over all ranks; raise BadRecipe on a CPU."""
    if torch.empty(0, device=device).is_cpu:
        raise BadRecipe(
            "world.sync_batchnorm on a CPU",
            allowed="GPUs: torch's SyncBatchNorm has no other kernel",
            do="write world.sync_batchnorm=false, or use a norm without batch statistics",
        )
    norms = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm)
    ]
    for parent, name, norm in norms:
        setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(norm))


def compile_blocks(units: Sequence[ShardUnit]) -> None:
    """Compile each block of a model that will be sharded; raise BadRecipe for a model without blocks.

    Not the whole model: a graph through it would be broken by the gathers of every unit, and by those of the norms in
    a block only a few times. Blocks of the same kind share the code of the first.
    """
    # torch.compile silently skips torch's own layers if they are called directly.
    blocks = [
        module
        for unit in units
        for module in unit.modules
        if unit.kind == BLOCK and not type(module).__module__.startswith("torch.nn")
    ]
    if not blocks:
        raise BadRecipe(
            "train.compile and shards of a model without repeated blocks",
            allowed="one of them; a sharded model is compiled block by block",
            do="write train.compile=false, or world=ddp if the model fits",
        )
    for block in blocks:
        block.compile()


def shard_model(
    model: nn.Module,
    units: Sequence[ShardUnit],
    narrow: torch.dtype | None,
    sharding: Sharding,
    options: WorldOptions,
    device: torch.device,
    forward_methods: Sequence[str] = (),
) -> str:
    """Shard `model` in place, in `units`, with FSDP2 over the ranks of `sharding`, and return a line about it.

    Weights are gathered in `narrow`, None for fp32.

    `forward_methods` are the methods besides `forward` that the task calls on the model: FSDP2 gathers for them too.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    for parameter in model.parameters():
        # FSDP2 cuts contiguous tensors only. Activations keep channels_last, which comes with the images.
        parameter.data = parameter.data.contiguous()
    mesh = create_shard_mesh(device, distributed.count_ranks(), sharding.shard_size)
    apply_fully_shard(units, mesh, narrow, options.reduce)
    for name in forward_methods:
        register_fsdp_forward_method(model, name)
    holds = f"every rank holds 1/{sharding.shard_size} of the weights, in {len(units)} units"
    return f"{sharding.mode}: {holds}; {sharding.reason}"


class ReductionNotes:
    """Measure the error of gradients that are summed in bf16, and write it to the journal; else do nothing."""

    def __init__(self, options: WorldOptions, stepper: Stepper, journal: Journal) -> None:
        self._journal, self._was_large = journal, False
        self._error: ReductionErrorMeter | None = None
        if options.reduce == BF16.name and distributed.is_sharded(stepper.model.parameters()):
            from halfstep.step.experiment.reduction_error import (
                ReductionErrorMeter,  # loads FSDP2, which takes a second
            )

            self._error = ReductionErrorMeter(stepper.model, lambda: stepper.counts.attempted)

    def after_step(self, attempt: int) -> None:
        """Write a note about the step if it was measured: the first one, and those that cross the limit."""
        error = None if self._error is None else self._error.read()
        if error is None:
            return
        is_large = not error <= LARGE_REDUCTION_ERROR  # NaN too
        said = f"step {attempt}: gradients summed in bf16 are {error:.2%} of their norm away from the sum in fp32"
        if is_large and not self._was_large:
            self._journal.note(f"{said}; write world.reduce=fp32 if the loss suffers", "warning")
        elif attempt == 1:
            self._journal.note(said, "info")
        self._was_large = is_large
