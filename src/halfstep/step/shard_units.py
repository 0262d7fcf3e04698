"""Divide a model into the units that FSDP2's `fully_shard` gathers and reduces as one, and choose their policies.

A unit costs two all-gathers and one reduce-scatter a step, and its parameters are in memory together while it runs:
units should be few, and each a small part of the model. Repeated blocks are both. Only the plan is made here; it needs
no process group, so that a run and a count of its collectives on absent ranks follow the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep.errors import WrongUse
from halfstep.precision.island import islands

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

BLOCK, ISLAND, STATISTICS, ROOT = "block", "island", "batch statistics", "root"
_ENOUGH, _MANY = 1 / 256, 1 << 20
"""A block is a unit with this share of the model's parameters, or with this many: Llama 3 405B has 126 blocks."""
_LARGE = 1 / 8
"""A block with more than this share of the parameters is a stage: the blocks in it are units too."""
_CHAINS = (nn.ModuleList, nn.Sequential)
"""Not ModuleDict: its members are chosen by name, and a unit that runs on some ranks only stops all of them."""


@dataclass(frozen=True)
class ShardUnit:
    """A module to which `fully_shard` is applied by itself."""

    name: str
    """Its path in the model; empty for the model."""
    module: nn.Module
    kind: str
    """`block`, `island`, `batch statistics` or `root`."""
    wide: bool
    """Whether its parameters are gathered as they are stored, in fp32, in every precision."""

    def policy(self, narrow: torch.dtype | None) -> MixedPrecisionPolicy:
        """Return the unit's policy for parameters gathered in `narrow`, None for fp32; gradients reduce in fp32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # slow to load

        # Batch normalization in 16 bits fails beside its fp32 statistics, and the layer after it expects 16 bits. An
        # island casts its own output back, and must not where it is a loss.
        return MixedPrecisionPolicy(
            param_dtype=None if self.wide else narrow,
            reduce_dtype=torch.float32,
            output_dtype=narrow if self.kind == STATISTICS else None,
        )


def shard_units(model: nn.Module) -> list[ShardUnit]:
    """Return the units of a model in the order in which to shard them: inner ones first, the model itself last.

    Units are islands, normalization layers with batch statistics, and the repeated blocks of ModuleLists and
    Sequentials that are large enough. The rest belongs to the model. Every rank has to run every unit in every step: a
    list of experts that is not inside such a block must not be sharded by this plan. Raises `WrongUse` for a parameter
    without a dimension, which FSDP2 cannot divide.
    """
    _refuse_scalars(model)
    special = _special(model)
    whole = sum(parameter.numel() for parameter in model.parameters())
    wanted = {**dict.fromkeys(_blocks("", model, special, whole * _LARGE), BLOCK), **special}
    wanted.pop("", None)
    units = [*_taken(model, wanted, min(whole * _ENOUGH, _MANY)), ShardUnit("", model, ROOT, wide=False)]
    if "" in special:
        return [replace(unit, wide=True) for unit in units]
    taken = {unit.name for unit in units}
    return _widened(units, [name for name in special if name not in taken])


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise WrongUse(
            f"a parameter without a dimension: {', '.join(scalars[:5])}",
            allowed="parameters with at least one dimension, which FSDP2 divides among the ranks",
            do=f"make it a vector of one number: nn.Parameter(torch.ones(1)) for {scalars[0]}",
        )


def _special(model: nn.Module) -> dict[str, str]:
    """Return the kinds of the modules that stay in fp32, by path: islands, and batch statistics outside of them."""
    found = dict.fromkeys(islands(model), ISLAND)
    for name, module in model.named_modules():
        norm = isinstance(module, _NormBase) and module.track_running_stats
        if norm and not any(_is_inside(name, island) for island in found):
            found.setdefault(name, STATISTICS)
    return {name: kind for name, kind in found.items() if any(True for _ in model.get_submodule(name).parameters())}


def _blocks(name: str, module: nn.Module, special: Mapping[str, str], large: float) -> Iterator[str]:
    """Yield the paths of repeated blocks below a module, stages before the blocks in them."""
    kinds = Counter(type(child) for child in module.children())
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if path in special:
            continue
        repeated = isinstance(module, _CHAINS) and kinds[type(child)] > 1
        # A ModuleList has no forward, before which its parameters could be gathered.
        if not repeated or isinstance(child, nn.ModuleList):
            yield from _blocks(path, child, special, large)
            continue
        yield path
        if sum(parameter.numel() for parameter in child.parameters()) > large:
            yield from _blocks_of_stage(path, child, special, large)


def _blocks_of_stage(name: str, stage: nn.Module, special: Mapping[str, str], large: float) -> Iterator[str]:
    """Yield the blocks in the stage's own lists; deeper lists may be of experts, which not every rank runs."""
    if isinstance(stage, _CHAINS):
        yield from _blocks(name, stage, special, large)
        return
    for key, child in stage.named_children():
        if isinstance(child, _CHAINS):
            yield from _blocks(f"{name}.{key}", child, special, large)


def _taken(model: nn.Module, wanted: Mapping[str, str], enough: float) -> list[ShardUnit]:
    """Return those that can be units, inner ones first: with enough parameters of their own, none of them tied."""
    places = _places(model)
    held: set[int] = set()
    units = []
    for name, module in reversed(list(model.named_modules())):
        kind = wanted.get(name)
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in held} if kind else {}
        if kind is None or not own:
            continue
        # A parameter belongs to one unit: one that is tied to a parameter outside belongs to a unit around both.
        here = _places(module)
        if any(here[key] < places[key] for key in own) or (kind == BLOCK and sum(own.values()) < enough):
            continue
        held |= own.keys()
        units.append(ShardUnit(name, module, kind, wide=kind != BLOCK))
    return units


def _places(module: nn.Module) -> Counter[int]:
    """Return the number of modules that have each parameter, by its id."""
    return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)


def _widened(units: list[ShardUnit], left: list[str]) -> list[ShardUnit]:
    """Widen the units that hold fp32 modules which could not be units: a unit has one policy."""
    holders = {max((u.name for u in units if _is_inside(name, u.name)), key=len) for name in left}
    return [replace(unit, wide=True) if unit.name in holders else unit for unit in units]


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(f"{outer}.")
