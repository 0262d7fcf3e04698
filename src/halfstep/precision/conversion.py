"""fp8 and mxfp8: which linear layers the kernels can compute, and their conversion.

A layer is converted in place, by its class: its path, its parameters, its hooks and every reference to it stay the
same, and its weights stay plain; `converted.restore_layers` undoes it. Layers that a user has converted with torchao
are recognized, and left as they are.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.precision.converted import MARK, LayerConversion, record_model_change
from halfstep.precision.hardware import describe_device, find_format_support, list_device_types
from halfstep.precision.island import PLACED, find_islands, is_inside

MULTIPLES = {"fp8": 16, "fp8-rowwise": 16, "fp8-rowwise-gw-hp": 16, "mxfp8": 32}
"""The kinds of conversion, with the number that both dimensions of a weight must be a multiple of."""
NEEDS_TORCHAO = "torchao is not installed: pip install 'halfstep[narrow]'"


def has_torchao() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


# -- eligibility ------------------------------------------------------------------------------------------------------


class LayerRow(NamedTuple):
    """A row of the eligibility table: a module with a weight matrix."""

    path: str
    inputs: int
    """K, the length of the sums."""
    outputs: int
    """N."""
    kind: str
    """What it computes in; empty if it is not converted."""
    reason: str
    """Why not; empty if it is converted."""
    rows: int | None = None
    """M, the rows of a batch; None if no batch was run."""
    share: float | None = None
    """The share of the FLOPs of all modules in the table."""


def eligible_layers(
    model: nn.Module, kinds: str | Mapping[str, str], rows: Mapping[str, int] | None = None
) -> list[LayerRow]:
    """Return the eligibility table of a model.

    Args:
        model: The model.
        kinds: One kind for all layers, or a kind for each path; a path without one is left out by a pattern.
        rows: The rows that each module was given (`count_rows`).
    """
    used = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    wide = [path for path, module in find_islands(model).items() if PLACED not in vars(module)]
    found = []
    for path, module in model.named_modules():
        weight = next((p for p in module._parameters.values() if p is not None and p.ndim > 1), None)
        if weight is None:
            continue
        kind = kinds if isinstance(kinds, str) else kinds.get(path, "")
        reason = _explain_skip(module, weight, kind, tied=used[id(weight)] > 1)
        if any(is_inside(path, island) for island in wide):
            reason = "it is in an fp32 island"
        inputs, outputs = weight.shape[1:].numel(), weight.shape[0]
        found.append(LayerRow(path, inputs, outputs, "" if reason else kind, reason, (rows or {}).get(path)))
    work = [(row.rows or 0) * row.inputs * row.outputs for row in found]
    if not sum(work):
        return found
    return [row._replace(share=each / sum(work)) for row, each in zip(found, work, strict=True)]


def _explain_skip(module: nn.Module, weight: Tensor, kind: str, *, tied: bool) -> str:
    # FSDP2 makes another class of each module that is sharded by itself.
    first, *others = type(module).__bases__
    before = others[0] if others and first.__name__ == "FSDPModule" else type(module)
    if before is not nn.Linear and not hasattr(module, MARK):
        return f"{type(module).__name__} is not a plain Linear"
    if not kind:
        return "the policy leaves it out"
    if tied:
        return "its weight is tied to another module's"
    odd = [f"{name}={size}" for name, size in (("K", weight.shape[1]), ("N", len(weight))) if size % MULTIPLES[kind]]
    return f"{' and '.join(odd)}: {kind} needs multiples of {MULTIPLES[kind]}" if odd else ""


@contextmanager
def count_rows(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the rows that each module with a weight is given inside the context; positions of a convolution too."""
    rows: Counter[str] = Counter()

    def counts(path: str) -> Any:
        def ended(module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.numel():
                rows[path] += output.numel() // next(len(p) for p in module._parameters.values() if p is not None)

        return ended

    # Of an embedding rows are looked up, and nothing is multiplied.
    multiplying = [
        (path, module)
        for path, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and any(p is not None and p.ndim > 1 for p in module._parameters.values())
    ]
    hooks = [module.register_forward_hook(counts(path)) for path, module in multiplying]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


# -- conversion -------------------------------------------------------------------------------------------------------


def convert_layers(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Convert the layers at these paths, each to its kind; on a device without fp8 it is emulated."""
    if not kinds:
        return
    from halfstep.precision.float8_layers import build_float8_class

    record_model_change()
    emulated: dict[tuple[torch.device, str], bool] = {}
    for path, kind in kinds.items():
        layer: Any = model.get_submodule(path)
        place = layer.weight.device, kind
        if place not in emulated:
            emulated[place] = _is_emulated(*place)
        converted, attributes = build_float8_class(kind, emulate=emulated[place])
        own = type(layer)
        layer.__class__ = converted if own is nn.Linear else _build_sharded_class(own, converted)  # type: ignore[arg-type]  # a class can be hashed
        vars(layer).update(attributes)
        setattr(layer, MARK, LayerConversion(kind, tuple(attributes), own, layer.weight.device))


@cache
def _build_sharded_class(own: type, converted: type) -> type:
    """Return the class that FSDP2 would have made of the converted class."""
    inside = {name: value for name, value in vars(own).items() if name == "__deepcopy__"}
    return type(own.__name__, (own.__bases__[0], converted), inside)


def _is_emulated(device: torch.device, kind: str) -> bool:
    if device.type not in list_device_types():  # fake tensors of an absent GPU, which would have the kernels
        return device.type == "meta"
    return not find_format_support(describe_device(device), kind.partition("-")[0]).native
