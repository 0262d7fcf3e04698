"""Find large negative numbers in masks, such as -1e9, that a narrow format cannot represent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from halfstep.finding import Finding
from halfstep.formats import Format, find_format, is_narrow
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits

_aten = torch.ops.aten
_FILLS = (
    _aten.masked_fill, _aten.masked_fill_, _aten.fill_, _aten.fill, _aten.index_fill, _aten.index_fill_,
    _aten.full, _aten.full_like, _aten.new_full,
)  # fmt: skip
"""Operations for which torch checks the number, and raises."""
PACKETS = (*_FILLS, _aten.where, _aten.scalar_tensor, _aten.index_put_, _aten.add, _aten.sub, _aten.mul, _aten._to_copy)
_FILLS_BY_MASK = TorchVersion(torch.__version__) >= (2, 15)  # type: ignore[operator]
"""Whether `x[mask] = number` is `masked_fill_`, which checks the number; before torch 2.15, it is `index_put_`."""
_REFUSED = "torch refuses to fill it in"
_NAN = "a fully masked row becomes NaN"


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for a mask value that overflows the result's format, or None."""
    if seen.packet is _aten._to_copy:
        return _find_cast_overflow(seen)
    if seen.packet is _aten.mul:
        # If the first input has other values than zeros and ones, the product decides.
        given = seen.inputs[0]
        is_mask = seen.has_values and bool(seen.result.isinf().any()) and bool(((given == 0) | (given == 1)).all())
        if not is_mask:
            return None
    for scalar in seen.scalars():
        if abs(scalar) > seen.format.largest:
            return build_mask_overflow_finding(scalar, seen.format, _REFUSED if seen.packet in _FILLS else _NAN)
    return None


def find_unseen_overflow(function: Any, given: Sequence[Any], named: Mapping[str, object]) -> Finding | None:
    """Return a finding for a number that torch converts or refuses before any operation shows it, or None."""
    dtype, values, so = named.get("dtype"), given[:1], _NAN
    if function is Tensor.__setitem__:  # x[mask] = -1e9
        dtype, values = given[0].dtype, given[2:]
        if _FILLS_BY_MASK and isinstance(given[1], Tensor) and given[1].dtype is torch.bool:
            so = _REFUSED
    elif function is torch.full:
        values, so = [*given[1:2], named.get("fill_value")], _REFUSED
    elif function is not torch.tensor:
        return None
    format = find_format(dtype) if isinstance(dtype, torch.dtype) and is_narrow(dtype) else None
    numbers = [float(value) for value in values if isinstance(value, float | int)]
    if format is None or not numbers or not format.largest < abs(numbers[0]) < math.inf:
        return None
    return build_mask_overflow_finding(numbers[0], format, so)


def _find_cast_overflow(seen: NarrowOperation) -> Finding | None:
    """Return a finding for the cast of a tensor of two values, the lower of which becomes -inf."""
    given = seen.inputs[0]
    if not seen.has_values or not given.is_floating_point() or given.requires_grad or isinstance(given, nn.Parameter):
        return None
    low, high = (end.item() for end in given.aminmax())
    is_mask = low < -seen.format.largest and high <= 0 and bool(((given == low) | (given == high)).all())
    if not is_mask or low == -torch.inf or not bool(seen.result.isinf().any()):
        return None
    return build_mask_overflow_finding(low, seen.format, _NAN)


def build_mask_overflow_finding(scalar: float, format: Format, so: str) -> Finding:
    """Return the finding for a number that overflows a format, with its consequence `so`."""
    return Finding(
        "mask-overflows",
        "error" if so is _REFUSED else "warning",
        f"{format_four_digits(scalar)} is {math.copysign(math.inf, scalar)} in {format.name}, "
        f"which ends at {format_four_digits(format.largest)}: {so}",
        "mask with torch.finfo(x.dtype).min, or with a boolean mask: scaled_dot_product_attention(attn_mask=keep)",
    )
