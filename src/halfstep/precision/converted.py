"""Layers that compute in fp8, by a precision or by a user's own conversion: recognized, counted, restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep.formats import FP8_E4M3, Format

_FP8 = Format("fp8", None, FP8_E4M3.largest, 0.0, FP8_E4M3.epsilon)
"""fp8 with a scale: no dtype rounds to it, and small numbers do not underflow."""
MARK = "_halfstep_converted"


class LayerConversion(NamedTuple):
    """What a converted layer was made from."""

    kind: str
    attributes: tuple[str, ...]
    """The names of those that it did not have."""
    own: type
    """Its class before."""
    device: torch.device
    """The device whose kernels it was converted for."""


_changes = 0


def record_model_change() -> None:
    """Count a change of islands or of converted layers, in any model."""
    global _changes
    _changes += 1


def count_model_changes() -> int:
    """Return the number of these changes; until it grows, every model computes as its precision left it."""
    return _changes


def restore_layers(model: nn.Module) -> None:
    """Undo `convert_layers`."""
    for module in list_precision_conversions(model):
        mark: LayerConversion = vars(module).pop(MARK)
        module.__class__ = mark.own
        for name in mark.attributes:
            del vars(module)[name]
        record_model_change()


@contextmanager
def suspend_conversion(model: nn.Module) -> Iterator[None]:
    """Undo `convert_layers` inside the context."""
    before = [
        (layer, type(layer), {name: vars(layer)[name] for name in (MARK, *vars(layer)[MARK].attributes)})
        for layer in list_precision_conversions(model)
    ]
    restore_layers(model)
    try:
        yield
    finally:
        for layer, converted, attributes in before:
            layer.__class__ = converted
            vars(layer).update(attributes)


def list_precision_conversions(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a precision has converted, without those of a user."""
    return [module for module in model.modules() if MARK in vars(module)]


def find_converted_layers(model: nn.Module) -> dict[str, str]:
    """Return the kind of each converted layer by path; of one that a user converted, the class."""
    found = {}
    for path, module in model.named_modules():
        if is_converted(module):
            own = type(module) if type(module) is not nn.Linear else type(module.weight)
            kind: str = vars(module)[MARK].kind if MARK in vars(module) else own.__name__
            found[path.replace("_orig_mod.", "")] = kind
    return found


def is_converted(module: nn.Module) -> bool:
    """Return whether a linear layer computes in fp8 by torchao: its class, or the class of its weight."""
    kinds = (*type(module).__mro__, *map(type, module._parameters.values()))
    return isinstance(module, nn.Linear) and any(kind.__module__.startswith("torchao.") for kind in kinds)


def has_converted_layer(model: nn.Module) -> bool:
    """Return whether a model has such a layer."""
    return any(map(is_converted, model.modules()))


def find_layer_format(module: nn.Module, format: Format) -> Format:
    """Return the format that a layer computes in, in a run of this format."""
    return _FP8 if is_converted(module) and "forward" not in vars(module) else format


@contextmanager
def compute_as_plain_linear(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Compute converted layers as plain ones, on the same weights, inside the context."""
    before = [(layer, dict(layer._parameters)) for layer in layers]
    for layer, parameters in before:
        layer.forward = MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign, assignment]
        wrapped = {name: p for name, p in parameters.items() if p is not None and unwrap_weight(p) is not p}
        layer._parameters.update({name: nn.Parameter(unwrap_weight(p).detach()) for name, p in wrapped.items()})
    try:
        yield
    finally:
        for layer, parameters in before:
            del layer.forward
            layer._parameters.update(parameters)


def unwrap_weight(tensor: Tensor) -> Tensor:
    """Return the numbers of a weight that a conversion has wrapped, such as torchao's for mxfp8."""
    inner = getattr(tensor, "_data", None)
    return inner if isinstance(inner, Tensor) else tensor
