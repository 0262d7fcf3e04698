"""Find integers beyond those that a format represents exactly: timesteps and positions that become equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.finding import Finding
from halfstep.formats import FP32, Format, widest_dtype
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits

_aten = torch.ops.aten
_ARITHMETIC = (_aten.mul, _aten.add, _aten.sub, _aten.div)
PACKETS = (_aten._to_copy, _aten.arange, *_ARITHMETIC)
_FIX = (
    "keep them in fp32 until they are embedded: {island}, or compute the embedding "
    "under torch.autocast(device, enabled=False)"
)


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for integers that the result's format rounds, or None."""
    if not seen.has_values:
        return None
    if seen.packet is _aten.arange:
        return _find_rounded_range(seen.result, seen.format)
    taken = seen.inputs[:1] if seen.packet is _aten._to_copy else [t for t in seen.inputs if not t.is_floating_point()]
    for given in taken:
        # One number per sample or token: integer images lose no more than other values.
        sizes = [size for size in given.shape if size > 1]
        if not given.dim() or len(sizes) > 2 or given.dtype is torch.bool or isinstance(given, nn.Parameter):
            continue
        found = _find_rounded_integers(given, seen.format)
        if found is not None:
            return found
    return None


def _find_rounded_integers(given: Tensor, format: Format) -> Finding | None:
    wide = given.detach().to(widest_dtype(given.device))
    largest = wide.max().item()
    counts = format.largest_exact_integer
    # Every large number in fp32 is an integer, and masks are negative.
    if not counts < largest <= FP32.largest_exact_integer or wide.min() < 0 or not bool((wide == wide.round()).all()):
        return None
    after = wide.to(format.dtype).to(wide.dtype)
    changed = (wide != after).flatten()
    if not changed.any():
        return None
    before, became = (t.flatten()[changed][0].item() for t in (wide, after))
    left, distinct = after.unique().numel(), wide.unique().numel()
    merged = f"; of {distinct} different ones {left} are left" if left < distinct else ""
    return Finding(
        "integers-rounded",
        "warning",
        f"integers up to {format_four_digits(largest)} are rounded to {format.name}, which counts to {counts}: "
        f"{format_four_digits(before)} becomes {format_four_digits(became)}{merged}",
        _FIX,
    )


def _find_rounded_range(result: Tensor, format: Format) -> Finding | None:
    counts, length = format.largest_exact_integer, result.numel()
    wide = result.detach().to(widest_dtype(result.device))
    distinct = wide.unique().numel()
    if distinct == length or wide.abs().max().item() < counts:
        return None
    return Finding(
        "integers-rounded",
        "warning",
        f"arange of {length} numbers is counted in {format.name}, which counts to {counts}: {distinct} of them differ",
        "create it in fp32, dtype=torch.float32, and cast the values computed from it",
    )
