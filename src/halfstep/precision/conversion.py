"""fp8 and mxfp8: which linear layers the kernels can compute, their conversion, and its undoing.

A layer is converted in place, by its class: its path, its parameters, its hooks and every reference to it stay the
same, and its weights stay plain. Layers that a user has converted with torchao are recognized, and left as they are.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.formats import FP8_E4M3, Format
from halfstep.precision.hardware import ability, describe, present
from halfstep.precision.island import count_change, is_island, islands, lift_island

MULTIPLES = {"fp8": 16, "fp8-rowwise": 16, "fp8-rowwise-gw-hp": 16, "mxfp8": 32}
"""The kinds of conversion, with the number that both dimensions of a weight must be a multiple of."""
NEEDS_TORCHAO = "torchao is not installed: pip install 'halfstep[narrow]'"
_FP8 = Format("fp8", None, FP8_E4M3.largest, 0.0, FP8_E4M3.epsilon)
"""fp8 with a scale: no dtype rounds to it, and small numbers do not underflow."""
_MARK = "_halfstep_converted"
PLACED = "_halfstep_island_of_policy"
"""The mark of an island that a policy has made."""


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
    """What it computes in; empty where it is not converted."""
    reason: str
    """Why not; empty where it is converted."""
    rows: int | None = None
    """M, the rows of a batch; None where no batch was run."""
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
    wide = [path for path, module in islands(model).items() if PLACED not in vars(module)]
    found = []
    for path, module in model.named_modules():
        weight = next((p for p in module._parameters.values() if p is not None and p.ndim > 1), None)
        if weight is None:
            continue
        kind = kinds if isinstance(kinds, str) else kinds.get(path, "")
        reason = _not_converted(module, weight, kind, tied=used[id(weight)] > 1)
        if any(path == island or path.startswith(f"{island}.") or not island for island in wide):
            reason = "it is in an fp32 island"
        inputs, outputs = weight.shape[1:].numel(), weight.shape[0]
        found.append(LayerRow(path, inputs, outputs, "" if reason else kind, reason, (rows or {}).get(path)))
    work = [(row.rows or 0) * row.inputs * row.outputs for row in found]
    if not sum(work):
        return found
    return [row._replace(share=each / sum(work)) for row, each in zip(found, work, strict=True)]


def _not_converted(module: nn.Module, weight: Tensor, kind: str, *, tied: bool) -> str:
    if _base(type(module)) is not nn.Linear and not hasattr(module, _MARK):
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

    multiplying = [(path, m) for path, m in model.named_modules() if list(_weights(m))]
    hooks = [module.register_forward_hook(counts(path)) for path, module in multiplying]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def _weights(module: nn.Module) -> Iterable[Tensor]:
    # Of an embedding rows are looked up, and nothing is multiplied.
    embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return () if embeds else (p for p in module._parameters.values() if p is not None and p.ndim > 1)


# -- conversion -------------------------------------------------------------------------------------------------------


class _Conversion(NamedTuple):
    """What a converted layer was made from."""

    kind: str
    attributes: tuple[str, ...]
    """The names of those that it did not have."""
    own: type
    """Its class before."""
    device: torch.device
    """The device whose kernels it was converted for."""


def convert_layers(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Convert the layers at these paths, each to its kind; on a device without fp8 it is emulated."""
    if not kinds:
        return
    from halfstep.precision.float8_layers import computing_in

    count_change()
    emulated: dict[tuple[torch.device, str], bool] = {}
    for path, kind in kinds.items():
        layer: Any = model.get_submodule(path)
        place = layer.weight.device, kind
        if place not in emulated:
            emulated[place] = _is_emulated(*place)
        converted, attributes = computing_in(kind, emulate=emulated[place])
        own = type(layer)
        layer.__class__ = converted if own is nn.Linear else _sharded(own, converted)  # type: ignore[arg-type]  # a class can be hashed
        vars(layer).update(attributes)
        setattr(layer, _MARK, _Conversion(kind, tuple(attributes), own, layer.weight.device))


def _base(own: type) -> type:
    """Return the class of a module before FSDP2 made its own of it, as it does of each that is sharded by itself."""
    first, *others = own.__bases__
    return others[0] if others and first.__name__ == "FSDPModule" else own


@cache
def _sharded(own: type, converted: type) -> type:
    """Return the class that FSDP2 would have made of the converted class."""
    inside = {name: value for name, value in vars(own).items() if name == "__deepcopy__"}
    return type(own.__name__, (own.__bases__[0], converted), inside)


def _is_emulated(device: torch.device, kind: str) -> bool:
    if device.type not in present():  # fake tensors of an absent GPU, which would have the kernels
        return device.type == "meta"
    return not ability(describe(device), kind.partition("-")[0]).native


def restore_layers(model: nn.Module) -> None:
    """Undo `convert_layers`."""
    for module in own_conversions(model):
        mark: _Conversion = vars(module).pop(_MARK)
        module.__class__ = mark.own
        for name in mark.attributes:
            del vars(module)[name]
        count_change()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Undo `convert_layers` inside the context."""
    before = [
        (layer, type(layer), {name: vars(layer)[name] for name in (_MARK, *vars(layer)[_MARK].attributes)})
        for layer in own_conversions(model)
    ]
    restore_layers(model)
    try:
        yield
    finally:
        for layer, converted, attributes in before:
            layer.__class__ = converted
            vars(layer).update(attributes)


def undo_policy(model: nn.Module) -> None:
    """Restore the layers that a precision has converted, and lift the islands that its policy made."""
    restore_layers(model)
    for path, module in model.named_modules():
        if vars(module).pop(PLACED, False):
            lift_island(model, path)


def converted_layers(model: nn.Module) -> dict[str, str]:
    """Return the kind of each converted layer by path; of one that a user converted, the class."""
    found = {path: module for path, module in model.named_modules() if is_converted(module)}
    return {
        path.replace("_orig_mod.", ""): vars(module)[_MARK].kind if _MARK in vars(module) else _class_of(module)
        for path, module in found.items()
    }


def _class_of(module: nn.Module) -> str:
    own = type(module) if type(module) is not nn.Linear else type(module.weight)
    return own.__name__


# -- converted layers, of halfstep and of others ----------------------------------------------------------------------


def is_converted(module: nn.Module) -> bool:
    """Return whether a linear layer computes in fp8 by torchao: its class, or the class of its weight."""
    kinds = (*type(module).__mro__, *map(type, module._parameters.values()))
    return isinstance(module, nn.Linear) and any(kind.__module__.startswith("torchao.") for kind in kinds)


def format_in(module: nn.Module, format: Format) -> Format:
    """Return the format that a layer computes in, in a run of this format."""
    return _FP8 if is_converted(module) and "forward" not in vars(module) else format


def is_changed(model: nn.Module) -> bool:
    """Return whether a precision has converted layers of a model, or made islands of some."""
    return any(_MARK in vars(module) or PLACED in vars(module) for module in model.modules())


def changed_parts(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return the kinds of the layers that were converted for their device, and the islands that a policy has made."""
    named = list(model.named_modules())
    marks = {path: vars(module)[_MARK] for path, module in named if _MARK in vars(module)}
    kinds = {path: mark.kind for path, mark in marks.items() if model.get_submodule(path).weight.device == mark.device}
    return kinds, sorted(path for path, module in named if PLACED in vars(module) and is_island(module))


def own_conversions(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a precision has converted, without those of a user."""
    return [module for module in model.modules() if _MARK in vars(module)]


@contextmanager
def as_plain(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Compute converted layers as plain ones, on the same weights, inside the context."""
    before = [(layer, dict(layer._parameters)) for layer in layers]
    for layer, parameters in before:
        layer.forward = MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign, assignment]
        wrapped = {name: p for name, p in parameters.items() if p is not None and plain(p) is not p}
        layer._parameters.update({name: nn.Parameter(plain(p).detach()) for name, p in wrapped.items()})
    try:
        yield
    finally:
        for layer, parameters in before:
            del layer.forward
            layer._parameters.update(parameters)


def plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a weight that a conversion has wrapped, such as torchao's for mxfp8."""
    inner = getattr(tensor, "_data", None)
    return inner if isinstance(inner, Tensor) else tensor
