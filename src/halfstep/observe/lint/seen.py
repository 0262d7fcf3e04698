"""An operation as the rules look at it: what it was given, and the narrow format that its result is in."""

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
from halfstep.formats import Format, format_of, is_narrow
from halfstep.observe.recorder import Operation
from halfstep.observe.rounding import run_wide


class Seen(NamedTuple):
    """A forward operation whose result is narrow."""

    operation: Operation
    packet: OpOverloadPacket
    inputs: list[Tensor]
    result: Tensor
    """The first of them."""
    format: Format
    buffer: str | None
    """The name of the model's buffer that it was given first, if that is one."""

    @property
    def has_values(self) -> bool:
        return not isinstance(self.result, FakeTensor) and not self.result.is_meta

    def scalars(self) -> list[float]:
        """Finite numbers that were given by themselves, or as tensors of one number without a dimension."""
        found = [leaf for leaf in _leaves(self.operation) if isinstance(leaf, float)]
        if self.has_values:
            found += [float(leaf) for leaf in self.inputs if not leaf.dim() and leaf.dtype.is_floating_point]
        return [number for number in found if math.isfinite(number)]

    def in_fp32(self) -> Tensor | None:
        """What the operation comes to with its inputs widened; None where torch cannot do that."""
        try:
            wide = pytree.tree_leaves(
                run_wide(self.operation.function, self.operation.arguments, self.operation.keywords)
            )
        except (RuntimeError, NotImplementedError):
            return None
        return wide[0] if wide and isinstance(wide[0], Tensor) else None

    def rounded(self, number: float) -> float:
        """A number as the format of the result has it."""
        return float(torch.tensor(number, dtype=torch.float64).to(self.format.dtype))


Rule = Callable[[Seen], Finding | None]
"""What is wrong with an operation, told without its place; None where nothing is."""


def seen(operation: Operation, buffers: dict[int, str]) -> Seen | None:
    """None where no rule has anything to say: in backward, and where the result is not narrow."""
    if operation.backward:
        return None
    results = [leaf for leaf in pytree.tree_leaves(operation.result) if isinstance(leaf, Tensor)]
    if not results or not is_narrow(results[0].dtype) or not results[0].numel():
        return None
    format = format_of(results[0].dtype)
    if format is None:
        return None
    inputs = [leaf for leaf in _leaves(operation) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    buffer = buffers.get(inputs[0].untyped_storage()._cdata) if inputs else None
    return Seen(operation, operation.function._overloadpacket, inputs, results[0], format, buffer)


def number(value: float) -> str:
    """A number for a sentence: 1000 rather than 1e+03, three digits where there are no more."""
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def _leaves(operation: Operation) -> list[Any]:
    return pytree.tree_leaves((operation.arguments, dict(operation.keywords)))
