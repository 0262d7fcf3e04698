"""Linear layers that torchao converted to fp8: which they are, and the same layers computed plainly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

from torch import Tensor, nn

from halfstep.formats import FP8_E4M3, Format

_FP8 = Format("fp8", None, FP8_E4M3.largest, 0.0, FP8_E4M3.epsilon)
"""fp8 with a scale: no dtype rounds to it, and small numbers do not underflow."""


def is_converted(module: nn.Module) -> bool:
    """Return whether torchao converted a linear layer to fp8: its class, or the class of its weight."""
    kinds = (type(module), *map(type, module._parameters.values()))
    return isinstance(module, nn.Linear) and any(kind.__module__.startswith("torchao.") for kind in kinds)


def format_in(module: nn.Module, format: Format) -> Format:
    """Return the format that a layer computes in, in a run of this format."""
    return _FP8 if is_converted(module) and "forward" not in vars(module) else format


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Compute converted layers as plain ones, on the same weights, inside the context."""
    before = [(layer, dict(layer._parameters)) for layer in model.modules() if is_converted(layer)]
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
