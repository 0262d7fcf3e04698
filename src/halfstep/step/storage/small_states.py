"""Optimizer states of torchao in 8 or 4 bits as plain tensors: codes, scales and table, with the kind by its name.

torchao keeps a moment as a tensor subclass, which can be neither copied nor written to a file without pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.errors import BadData, WrongUse

KIND = "small_state"
"""The key of a saved small state that names its kind."""
CODES, SCALE = "codes", "scale"
_MODULES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_FACTS = {"OptimState8bit": ("signed",), "OptimState4bit": ("signed", "shape"), "OptimStateFp8": ()}
"""What a kind has besides its tensors and the dtype that it shows."""
_PARTS = {
    "OptimState8bit": (CODES, SCALE, "qmap"),
    "OptimState4bit": (CODES, SCALE, "qmap"),
    "OptimStateFp8": (CODES, SCALE),
}


def find_small_state_kind(value: object) -> str | None:
    """Return the kind of a small state, sharded or not; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    own: object = getattr(value, "_local_tensor", value)  # without the graph that to_local() makes
    name = type(own).__name__
    return name if _MODULES.get(name) == type(own).__module__ else None


def convert_to_plain_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict in which each small state is a dict of plain tensors."""
    return {
        **state,
        "state": _map_states(
            state["state"], lambda value: split_small_state(value) if find_small_state_kind(value) else value
        ),
    }


def convert_to_small_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict that `convert_to_plain_states` was given."""
    return {
        **state,
        "state": _map_states(
            state["state"], lambda value: build_small_state(value) if is_saved_small_state(value) else value
        ),
    }


def _map_states(states: Mapping[Any, Any], change: Any) -> dict[Any, Any]:
    return {
        number: {key: change(value) for key, value in kept.items()} if isinstance(kept, Mapping) else kept
        for number, kept in states.items()
    }


def is_saved_small_state(value: object) -> bool:
    """Return whether a value is a small state as `split_small_state` returns it."""
    return isinstance(value, Mapping) and KIND in value


def split_small_state(value: Any) -> dict[str, Any]:
    """Return the parts of a small state, which share its memory; of a sharded one, DTensors."""
    kind, own = find_small_state_kind(value), getattr(value, "_local_tensor", value)
    assert kind is not None
    parts = {name: getattr(own, name) for name in _PARTS[kind]}
    if own is not value:
        parts[CODES] = build_dtensor_like(value, parts[CODES], tuple(value.shape))
        blocks = value.numel() // own.block_size
        parts[SCALE] = build_dtensor_like(value, parts[SCALE], (blocks,))
    facts = {name: getattr(own, name) for name in _FACTS[kind]}
    return {KIND: kind, **parts, **{name: list(f) if isinstance(f, tuple) else f for name, f in facts.items()}}


def build_small_state(saved: Mapping[str, Any]) -> Tensor:
    """Return the small state with these parts; raise BadData for parts that do not fit together."""
    kind = saved[KIND]
    try:
        made = getattr(import_module(_MODULES[kind]), kind)
        codes, facts = saved[CODES], [saved[name] for name in _FACTS[kind]]
        locals_ = [distributed.unwrap_local_tensor(saved[name]) for name in _PARTS[kind]]
        elements = locals_[0].numel() * (2 if kind == "OptimState4bit" else 1)
        if elements % max(1, locals_[1].numel()):
            raise ValueError(f"{locals_[1].numel()} scales for {elements} elements")
        own: Tensor = made(*locals_, *facts, dtype=torch.float32)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise BadData(
            f"a state of an optimizer that is no {kind}: {type(error).__name__} {error}",
            allowed="what halfstep wrote",
            do="use another checkpoint",
        ) from error
    return build_dtensor_like(codes, own, tuple(codes.shape)) if distributed.is_dtensor_shard(codes) else own


def share_quantization_tables(states: Iterable[Any]) -> None:
    """Give loaded states of one kind one table again: for the smallest, it is a fifth of their bytes."""
    tables: dict[tuple[str, torch.device, bool], Tensor] = {}
    for value in (value for kept in states if isinstance(kept, Mapping) for value in kept.values()):
        kind, own = find_small_state_kind(value), getattr(value, "_local_tensor", value)
        if kind is not None and "qmap" in _PARTS[kind]:
            table = tables.setdefault((kind, own.device, own.signed), own.qmap)
            own.qmap = table if torch.equal(table, own.qmap) else own.qmap


def build_dtensor_like(other: Any, own: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a local tensor as the shard of a tensor of this shape that is cut as `other` is."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = other.device_mesh, other.placements
    made: Tensor = DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return made


def has_even_shards(parameter: Tensor, block_size: int) -> bool:
    """Return whether the shards of a parameter are of one size and end where blocks end; True for a whole one."""
    parts = 1
    for pieces in distributed.list_shard_counts(parameter):
        parts *= pieces
    if parameter.numel() % (parts * block_size):
        return False
    return parts == 1 or parameter.shape[0] % parts == 0


def create_scale_tensor(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor to read the scales of a sharded parameter into; raise WrongUse where shards cut a block."""
    import torch.distributed.tensor as sharded

    if not has_even_shards(parameter, parameter.numel() // shape[0]):
        parts = distributed.list_shard_counts(parameter)
        raise WrongUse(
            f"optimizer state in blocks of {parameter.numel() // shape[0]} elements, of a parameter of shape "
            f"{tuple(parameter.shape)} in {parts} shards",
            allowed="shards of equal size that end at the end of a block",
            do="use a number of ranks that divides the rows, or world=ddp",
        )
    whole: Any = parameter
    made: Tensor = sharded.empty(shape, dtype=dtype, device_mesh=whole.device_mesh, placements=whole.placements)
    return made
