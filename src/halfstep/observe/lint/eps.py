"""Find small constants that should prevent a division by zero, and are zero themselves in a narrow format."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.finding import Finding
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits

_aten = torch.ops.aten
_BOUNDS = (
    _aten.clamp, _aten.clamp_min, _aten.clamp_max, _aten.maximum, _aten.minimum, _aten.clamp_, _aten.clamp_min_,
    _aten.clamp_max_,
)  # fmt: skip
_FILLS = (
    _aten.masked_fill, _aten.masked_fill_, _aten.full, _aten.full_like, _aten.new_full, _aten.scalar_tensor,
)  # fmt: skip
_NORMS = (_aten.norm, _aten.linalg_vector_norm)


class EpsRule:
    """A rule that knows which tensors are norms: CUDA's autocast computes those in fp32, the CPU's does not."""

    packets = (_aten.add, _aten.add_, _aten.sub, _aten.rsub, _aten.logit, *_BOUNDS, *_FILLS, *_NORMS)

    def __init__(self) -> None:
        # A weak reference keeps the storage's address from being reused, without keeping its memory alive.
        self._norms: dict[int, StorageWeakRef] = {}

    def __call__(self, seen: NarrowOperation) -> Finding | None:
        if seen.packet in _NORMS:
            reference = StorageWeakRef(seen.result.untyped_storage())
            self._norms[reference.cdata] = reference
            return None
        for scalar in seen.scalars():
            if scalar and not seen.rounded(scalar):
                return _find_vanished_eps(seen, scalar, self._describe_rules(seen))
            bound = 1 - scalar if seen.packet is _aten.logit else scalar
            if seen.packet in (*_BOUNDS, _aten.logit) and abs(bound) < 1 == abs(seen.rounded(bound)):
                return _build_bound_finding(seen, bound)
        return _find_vanished_beta(seen) if seen.packet is _aten.rsub else None

    def _describe_rules(self, seen: NarrowOperation) -> str:
        of_a_norm = bool(seen.inputs) and seen.inputs[0].untyped_storage()._cdata in self._norms
        if not of_a_norm or seen.result.device.type != "cpu":
            return ""
        return "; by the CPU's rules: CUDA's autocast computes norms in fp32"


def _find_vanished_eps(seen: NarrowOperation, scalar: float, by: str) -> Finding | None:
    facts = torch.finfo(seen.result.dtype)
    return Finding(
        "eps-vanishes",
        "warning",
        f"{format_four_digits(scalar)} is 0 in {seen.format.name}, whose smallest number is "
        f"{facts.smallest_normal * facts.eps:.1g}: {_name_operation(seen)} with it protects nothing{by}",
        f"use a number of the format, such as {facts.smallest_normal:.1g}, or widen first: halfstep.widen(x)",
    )


def _build_bound_finding(seen: NarrowOperation, bound: float) -> Finding:
    one, sign = ("1", "-") if bound > 0 else ("-1", "+")
    return Finding(
        "eps-vanishes",
        "warning",
        f"the bound {bound:.7g} is {one} in {seen.format.name}: {_name_operation(seen)} with it lets {one} through, "
        f"and log(1 {sign} x) is -inf",
        "widen first: halfstep.widen(x).clamp(...), or use a loss with logits",
    )


def _find_vanished_beta(seen: NarrowOperation) -> Finding | None:
    """Return a finding for a schedule in a narrow format, where 1 - 1e-4 is 1; trained values may be that small."""
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
        f"such as x = {format_four_digits(float(given[lost].max()))}",
        "compute schedules in fp32, and cast the results",
    )


def _name_operation(seen: NarrowOperation) -> str:
    name = str(seen.packet).removeprefix("aten.").rstrip("_")
    return "where" if seen.packet is _aten.scalar_tensor else name  # torch.where makes a tensor of its number first
