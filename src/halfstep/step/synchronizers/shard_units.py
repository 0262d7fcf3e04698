"""Divide a model into the units that FSDP2's `fully_shard` gathers and reduces as one, and choose their policies.

A unit costs two all-gathers and one reduce-scatter a step, and its parameters are in memory together while it runs:
units should be few, and each a small part of the model. Repeated blocks are both. Only the plan is made here; it needs
no process group, so that a run and a count of its collectives on absent ranks follow the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep.errors import WrongUse
from halfstep.formats import BF16, FP32
from halfstep.precision.island import find_islands

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

BLOCK, ISLAND, NORMS, ROOT = "block", "island", "norms", "root"
NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that autocast leaves in fp32, or whose kernels refuse 16-bit weights with fp32 inputs, as on a CPU."""
_ENOUGH, _MANY = 1 / 256, 1 << 20
"""A block is a unit with this share of the model's parameters, or with this many: Llama 3 405B has 126 blocks."""
_LARGE = 1 / 8
"""A block with more than this share of the parameters is a stage: the blocks in it are units too."""
_CHAINS = (nn.ModuleList, nn.Sequential)
"""Not ModuleDict: its members are chosen by name, and a unit that runs on some ranks only stops all of them."""


@dataclass(frozen=True)
class ShardUnit:
    """Modules to which `fully_shard` is applied together: one module, or the normalization layers of one."""

    name: str
    """The path of the module in the model, or of the module that the layers are in; empty for the model."""
    modules: tuple[nn.Module, ...]
    kind: str
    """`block`, `island`, `norms` or `root`."""
    wide: bool
    """Whether its parameters are gathered as they are stored, in fp32, in every precision."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters in its modules, those of inner units too."""
        return (parameter for module in self.modules for parameter in module.parameters())

    def policy(self, narrow: torch.dtype | None, reduce: str = FP32.name) -> MixedPrecisionPolicy:
        """Return the unit's policy for parameters gathered in `narrow`, None for fp32, under autocast to it.

        Weights that autocast would cast are gathered as they would be cast, so that a forward pass has the bits that
        it has on one rank, with half the bytes on the wire. Gradients are summed in `reduce`, fp32 or bf16.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # slow to load

        return MixedPrecisionPolicy(
            param_dtype=None if self.wide else narrow,
            reduce_dtype={FP32.name: FP32, BF16.name: BF16}[reduce].dtype,
            # Inputs are autocast's matter: rounding the timesteps of a denoiser to 16 bits would move them.
            cast_forward_inputs=False,
        )


def list_shard_units(model: nn.Module, narrow: torch.dtype | None) -> list[ShardUnit]:
    """Return the units of a model in the order in which to shard them: inner ones first, the model itself last.

    Units are the repeated blocks of ModuleLists and Sequentials that are large enough and, where weights are gathered
    in `narrow` instead of fp32, islands and the normalization layers of each block together. The rest belongs to the
    model. Every rank has to run every unit in every step: a list of experts that is not inside such a block must not be
    sharded by this plan. Raises `WrongUse` for a parameter without a dimension, which FSDP2 cannot divide.
    """
    _refuse_scalars(model)
    special = {} if narrow is None else _find_fp32_modules(model)
    whole = sum(parameter.numel() for parameter in model.parameters())
    wanted = {**dict.fromkeys(_iterate_blocks("", model, special, whole * _LARGE), BLOCK), **special}
    wanted.pop("", None)
    units = [*_select_units(model, wanted, min(whole * _ENOUGH, _MANY)), ShardUnit("", (model,), ROOT, wide=False)]
    if "" in special:
        return [replace(unit, wide=True) for unit in units if unit.kind != NORMS]
    taken = {unit.name for unit in units}
    # An fp32 module that cannot be a unit makes the unit around it fp32: a unit has one policy.
    left = [name for name in special if name not in taken]
    holders = {max((u.name for u in units if _is_inside(name, u.name)), key=len) for name in left}
    return list(_group_units([replace(unit, wide=True) if unit.name in holders else unit for unit in units]))


def apply_fully_shard(
    units: Sequence[ShardUnit], mesh: DeviceMesh, narrow: torch.dtype | None, reduce: str = FP32.name
) -> None:
    """Shard the units in place over a mesh, with the policies of `ShardUnit.policy`."""
    from torch.distributed.fsdp import fully_shard  # slow to load

    for unit in units:
        fully_shard(list(unit.modules), mesh=mesh, mp_policy=unit.policy(narrow, reduce))


def create_shard_mesh(device: torch.device, ranks: int, shard_size: int) -> DeviceMesh:
    """Return the mesh for shards over groups of `shard_size` ranks: of one dimension if there is one group."""
    from torch.distributed.device_mesh import init_device_mesh

    if shard_size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def _refuse_scalars(model: nn.Module) -> None:
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise WrongUse(
            f"a parameter without a dimension: {', '.join(scalars[:5])}",
            allowed="parameters with at least one dimension, which FSDP2 divides among the ranks",
            do=f"make it a vector of one number: nn.Parameter(torch.ones(1)) for {scalars[0]}",
        )


def _find_fp32_modules(model: nn.Module) -> dict[str, str]:
    """Return the kinds of the modules that stay in fp32, by path: islands, and normalization outside of them."""
    found = dict.fromkeys(find_islands(model), ISLAND)
    for name, module in model.named_modules():
        if isinstance(module, NORM_LAYERS) and not any(_is_inside(name, island) for island in found):
            found.setdefault(name, NORMS)
    return {name: kind for name, kind in found.items() if any(True for _ in model.get_submodule(name).parameters())}


def _iterate_blocks(name: str, module: nn.Module, special: Mapping[str, str], large: float) -> Iterator[str]:
    """Yield the paths of repeated blocks below a module, stages before the blocks in them."""
    kinds = Counter(type(child) for child in module.children())
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if path in special:
            continue
        repeated = isinstance(module, _CHAINS) and kinds[type(child)] > 1
        # A ModuleList has no forward, before which its parameters could be gathered.
        if not repeated or isinstance(child, nn.ModuleList):
            yield from _iterate_blocks(path, child, special, large)
            continue
        yield path
        if sum(parameter.numel() for parameter in child.parameters()) > large:
            yield from _iterate_stage_blocks(path, child, special, large)


def _iterate_stage_blocks(name: str, stage: nn.Module, special: Mapping[str, str], large: float) -> Iterator[str]:
    """Yield the blocks in the stage's own lists; deeper lists may be of experts, which not every rank runs."""
    if isinstance(stage, _CHAINS):
        yield from _iterate_blocks(name, stage, special, large)
        return
    for key, child in stage.named_children():
        if isinstance(child, _CHAINS):
            yield from _iterate_blocks(f"{name}.{key}", child, special, large)


def _select_units(model: nn.Module, wanted: Mapping[str, str], enough: float) -> list[ShardUnit]:
    """Return those that can be units, inner ones first: with enough parameters of their own, none of them tied."""
    places = _count_parameter_uses(model)
    held: set[int] = set()
    units = []
    for name, module in reversed(list(model.named_modules())):
        kind = wanted.get(name)
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in held} if kind else {}
        if kind is None or not own:
            continue
        # A parameter belongs to one unit: one that is tied to a parameter outside belongs to a unit around both.
        here = _count_parameter_uses(module)
        if any(here[key] < places[key] for key in own) or (kind == BLOCK and sum(own.values()) < enough):
            continue
        held |= own.keys()
        units.append(ShardUnit(name, (module,), kind, wide=kind != BLOCK))
    return units


def _count_parameter_uses(module: nn.Module) -> Counter[int]:
    """Return the number of modules that have each parameter, by its id."""
    return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)


def _group_units(units: list[ShardUnit]) -> Iterator[ShardUnit]:
    """Yield the units, with the normalization layers of each block as one: every unit costs collectives."""
    norms: dict[str, list[nn.Module]] = {}
    for unit in units:
        if unit.kind == NORMS:
            around = [one for one in units if one.kind != NORMS and _is_inside(unit.name, one.name)]
            holder = max(around, key=lambda one: len(one.name))
            # Where the block is gathered in fp32 anyway, they belong to it.
            if not holder.wide:
                norms.setdefault(holder.name, []).extend(unit.modules)
    for unit in units:
        if unit.name in norms and unit.kind != NORMS:
            yield ShardUnit(unit.name, tuple(reversed(norms[unit.name])), NORMS, wide=True)
        if unit.kind != NORMS:
            yield unit


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(f"{outer}.")
