"""Large negative numbers in masks, such as -1e9, which a narrow format has no room for."""

from __future__ import annotations

import torch
from torch import nn

from halfstep.finding import Finding
from halfstep.observe.lint.seen import Seen, number

_aten = torch.ops.aten
_FILLS = (_aten.masked_fill, _aten.masked_fill_, _aten.where, _aten.fill_, _aten.fill, _aten.add, _aten.sub)
PACKETS = (*_FILLS, _aten._to_copy)


def look(seen: Seen) -> Finding | None:
    if seen.packet is _aten._to_copy:
        return _cast(seen)
    for scalar in seen.scalars():
        if abs(scalar) > seen.format.largest:
            return _too_large(seen, scalar, _raises(seen))
    return None


def _cast(seen: Seen) -> Finding | None:
    """A tensor of two numbers, the lower of which becomes -inf."""
    given = seen.inputs[0]
    if not seen.has_values or not given.is_floating_point() or given.requires_grad or isinstance(given, nn.Parameter):
        return None
    low, high = (end.item() for end in given.aminmax())
    is_mask = low < -seen.format.largest and high <= 0 and bool(((given == low) | (given == high)).all())
    if not is_mask or low == -torch.inf or not bool(seen.result.isinf().any()):
        return None
    return _too_large(seen, low, "a row that is masked whole becomes NaN")


def _raises(seen: Seen) -> str:
    """torch checks numbers that are filled in, and raises."""
    filled = seen.packet in (_aten.masked_fill, _aten.masked_fill_, _aten.fill_, _aten.fill)
    return "torch refuses to fill it in" if filled else "a row that is masked whole becomes NaN"


def _too_large(seen: Seen, scalar: float, so: str) -> Finding:
    return Finding(
        "mask-overflows",
        "error" if so.startswith("torch") else "warning",
        f"{number(scalar)} is {seen.rounded(scalar)} in {seen.format.name}, "
        f"which ends at {number(seen.format.largest)}: {so}",
        "mask with torch.finfo(x.dtype).min, or with a boolean mask: scaled_dot_product_attention(attn_mask=keep)",
    )
