"""Find softmax results that lost accuracy, because they are stored in a narrow format."""

from __future__ import annotations

import torch

from halfstep.finding import Finding
from halfstep.observe.lint.seen import NarrowOperation

_aten = torch.ops.aten
PACKETS = (_aten._softmax, _aten._log_softmax)
TOLERATED = 0.005
"""Absolute error of the probabilities of a row, on average: rounding any tensor to bf16 causes half of that."""


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding if the probabilities differ too much from those in fp32, or None."""
    wide = seen.in_fp32() if seen.has_values else None
    if wide is None:
        return None
    dimension = int(seen.operation.arguments[1])
    found = seen.result.float()
    if seen.packet is _aten._log_softmax:
        # -inf at a masked position is the same in both, and inf - inf would be NaN.
        apart = torch.where(wide.isfinite(), (found - wide).abs() * wide.exp(), 0)
    else:
        apart = (found - wide).abs()
    error = float(apart.sum(dimension).mean())
    if not error > TOLERATED:
        return None
    name = "log_softmax" if seen.packet is _aten._log_softmax else "softmax"
    return Finding(
        "softmax-in-half",
        "warning",
        f"{name} over {wide.shape[dimension]} numbers is computed in {seen.format.name}, "
        f"and its probabilities are {error:.1%} off",
        f"widen before it: halfstep.widen(x).{name}(...), or use F.cross_entropy, which does",
    )
