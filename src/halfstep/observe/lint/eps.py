"""Small numbers that are added or clamped to so that nothing is divided by zero, and are zero themselves."""

from __future__ import annotations

import torch

from halfstep.finding import Finding
from halfstep.observe.lint.seen import Seen, number

_aten = torch.ops.aten
_BOUNDS = (_aten.clamp, _aten.clamp_min, _aten.clamp_max, _aten.maximum, _aten.clamp_, _aten.clamp_min_)
PACKETS = (_aten.add, _aten.add_, _aten.sub, _aten.rsub, *_BOUNDS)


def look(seen: Seen) -> Finding | None:
    for scalar in seen.scalars():
        rounded = seen.rounded(scalar)
        if scalar and not rounded:
            return _vanished(seen, scalar)
        if seen.packet in _BOUNDS and scalar != 1 and rounded == 1:
            return _is_one(seen, scalar)
    return _one_minus_nothing(seen) if seen.packet is _aten.rsub else None


def _vanished(seen: Seen, scalar: float) -> Finding | None:
    facts = torch.finfo(seen.result.dtype)
    return Finding(
        "eps-vanishes",
        "warning",
        f"{number(scalar)} is 0 in {seen.format.name}, whose smallest number is "
        f"{facts.smallest_normal * facts.eps:.1g}: {_name(seen)} with it protects nothing",
        f"take one that the format has, such as {facts.smallest_normal:.1g}, or widen first: halfstep.widen(x)",
    )


def _is_one(seen: Seen, bound: float) -> Finding:
    return Finding(
        "eps-vanishes",
        "warning",
        f"the bound {bound:.7g} is 1 in {seen.format.name}: {_name(seen)} with it lets 1 through, "
        "and log(1 - x) is -inf",
        "widen first: halfstep.widen(x).clamp(...), or use a loss with logits",
    )


def _one_minus_nothing(seen: Seen) -> Finding | None:
    """A schedule in a narrow format: 1 - 1e-4 is 1. What is learnt may be as small as it likes."""
    given = seen.inputs[0]
    if not seen.has_values or given.requires_grad or not given.dim():
        return None
    small = (given > 0) & (given < 1)
    lost = small & (seen.result == 1)
    if not 2 * int(lost.sum()) > int(small.sum()):
        return None
    return Finding(
        "eps-vanishes",
        "warning",
        f"1 - x is 1 in {seen.format.name} for {int(lost.sum())} of {given.numel()} numbers, "
        f"such as x = {number(float(given[lost].max()))}",
        "compute schedules in fp32, and cast what comes out of them",
    )


def _name(seen: Seen) -> str:
    return str(seen.packet).removeprefix("aten.").rstrip("_")
