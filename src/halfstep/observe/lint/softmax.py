"""Softmax whose probabilities are no longer those that were computed, because they are kept in a narrow format."""

from __future__ import annotations

import torch

from halfstep.finding import Finding
from halfstep.observe.lint.seen import Seen

_aten = torch.ops.aten
PACKETS = (_aten._softmax, _aten._log_softmax)
TOLERATED = 0.005
"""Of probability, on average: what rounding to bf16 does to any tensor is half of that."""


def look(seen: Seen) -> Finding | None:
    wide = seen.in_fp32() if seen.has_values else None
    if wide is None:
        return None
    dimension = int(seen.operation.arguments[1])
    found = seen.result.float()
    if seen.packet is _aten._log_softmax:
        # -inf of a masked place is the same in both.
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
        f"{name} over {wide.shape[dimension]} numbers is kept in {seen.format.name}, "
        f"and its probabilities are {error:.1%} off",
        f"widen before it: halfstep.widen(x).{name}(...), or use F.cross_entropy, which does",
    )
