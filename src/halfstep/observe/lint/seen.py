"""An operation as the rules see it: its inputs, and the narrow format of its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from halfstep.finding import Finding
from halfstep.formats import Format, find_format, is_narrow
from halfstep.observe.emulate import run_in_fp32
from halfstep.observe.recorder import Operation


class NarrowOperation(NamedTuple):
    """A forward operation whose result is narrow."""

    operation: Operation
    packet: OpOverloadPacket
    inputs: list[Tensor]
    result: Tensor
    """The first result."""
    format: Format
    buffer: str | None
    """The name of the model's buffer that is the first input, if it is one."""

    @property
    def has_values(self) -> bool:
        """Whether the result has values, unlike fake and meta tensors."""
        return not isinstance(self.result, FakeTensor) and not self.result.is_meta

    def scalars(self) -> list[float]:
        """Return the finite numbers among the arguments, plain or as tensors without dimensions."""
        found = [leaf for leaf in _list_leaves(self.operation) if isinstance(leaf, float)]
        if self.has_values:
            found += [float(leaf) for leaf in self.inputs if not leaf.dim() and leaf.dtype.is_floating_point]
        return [number for number in found if math.isfinite(number)]

    def in_fp32(self) -> Tensor | None:
        """Return the result with inputs widened to fp32; None if torch cannot compute it."""
        try:
            wide = pytree.tree_leaves(
                run_in_fp32(self.operation.function, self.operation.arguments, self.operation.keywords)
            )
        except (RuntimeError, NotImplementedError):
            return None
        return wide[0] if wide and isinstance(wide[0], Tensor) else None

    def rounded(self, number: float) -> float:
        """Return a number rounded to the format of the result."""
        return float(torch.tensor(number, dtype=torch.float64).to(self.format.dtype))


Rule = Callable[[NarrowOperation], Finding | None]
"""Returns the defect of an operation, without its location, or None."""


def find_narrow_operation(operation: Operation, buffers: dict[int, str]) -> NarrowOperation | None:
    """Return the operation for the rules; None in backward, and if the result is not narrow."""
    if operation.backward:
        return None
    results = [leaf for leaf in pytree.tree_leaves(operation.result) if isinstance(leaf, Tensor)]
    if not results or not is_narrow(results[0].dtype) or not results[0].numel():
        return None
    format = find_format(results[0].dtype)
    if format is None:
        return None
    inputs = [leaf for leaf in _list_leaves(operation) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    buffer = buffers.get(inputs[0].untyped_storage()._cdata) if inputs else None
    return NarrowOperation(operation, operation.function._overloadpacket, inputs, results[0], format, buffer)


def format_four_digits(value: float) -> str:
    """Return a number for a sentence: 1000 rather than 1e+03, and four digits of others."""
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _list_leaves(operation: Operation) -> list[Any]:
    return pytree.tree_leaves((operation.arguments, dict(operation.keywords)))
