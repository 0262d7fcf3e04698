"""Find angles so large that a narrow format cannot tell neighbors apart: positions times frequencies."""

from __future__ import annotations

import math

import torch

from halfstep.finding import Finding
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits

_aten = torch.ops.aten
PACKETS = (_aten.sin, _aten.cos)
_COARSE = 0.05
"""Radians between adjacent numbers of the format."""
_MANY = 1 / 8
"""Share of the angles."""


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for large angles with a fraction, which were rounded before; whole numbers may be intended."""
    given = seen.inputs[0]
    if not seen.has_values or given.dtype is not seen.result.dtype:
        return None
    size = given.detach().float().abs()
    # The power of two from which on the spacing of the format is coarse.
    first_coarse = float(2.0 ** math.ceil(math.log2(_COARSE / seen.format.epsilon)))
    coarse = size.isfinite() & (size >= first_coarse) & (size != size.round())
    if not int(coarse.sum()) >= _MANY * size.numel():
        return None
    largest = float(size[coarse].max())
    step = seen.format.epsilon * 2.0 ** math.floor(math.log2(largest))
    return Finding(
        "angles-rounded",
        "warning",
        f"{str(seen.packet).removeprefix('aten.')} of angles up to {format_four_digits(largest)} in "
        f"{seen.format.name}, which has "
        f"a spacing of {format_four_digits(step)} there: adjacent positions are indistinguishable",
        "compute positions times frequencies, and the sine of them, in fp32: {island}, or under "
        "torch.autocast(device, enabled=False)",
    )
