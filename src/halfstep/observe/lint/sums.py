"""Find sums, means and norms with a narrow result: too large for it, or counts that it cannot represent."""

from __future__ import annotations

import torch

from halfstep.finding import Finding
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits
from halfstep.observe.nonfinite_origin import find_largest_finite, is_all_finite

_aten = torch.ops.aten
PACKETS = (_aten.sum, _aten.cumsum, _aten.mean, _aten.norm, _aten.linalg_vector_norm, _aten.logsumexp, _aten.prod)


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for a reduction that overflows or miscounts, or None."""
    if not seen.has_values or not seen.inputs or not all(map(is_all_finite, seen.inputs)):
        return None
    if not is_all_finite(seen.result):
        return _find_overflow(seen)
    return _find_rounded_cumsum(seen) if seen.packet is _aten.cumsum else None


def _find_overflow(seen: NarrowOperation) -> Finding | None:
    wide = seen.in_fp32()
    if wide is None or not find_largest_finite(wide) > seen.format.largest:
        return None
    length = seen.inputs[0].numel() // max(seen.result.numel() if seen.packet is not _aten.cumsum else 1, 1)
    return Finding(
        "reduction-overflows",
        "error",
        f"{_name_reduction(seen)} over {length} numbers is {format_four_digits(find_largest_finite(wide))}, "
        f"and {seen.format.name} ends at {format_four_digits(seen.format.largest)}",
        f"widen before it: halfstep.widen(x).{_name_reduction(seen)}(...), or {{island}}",
    )


def _find_rounded_cumsum(seen: NarrowOperation) -> Finding | None:
    """Return a finding for positions found by counting ones: neighbors become equal. A sum is rounded only once."""
    given = seen.inputs[0]
    counts = seen.format.largest_exact_integer
    if not float(seen.result.abs().max()) > counts or not bool(((given == 0) | (given == 1)).all()):
        return None
    wide = seen.in_fp32()
    if wide is None or bool((wide == seen.result).all()):
        return None
    off = (wide - seen.result).abs().argmax()
    true, found = wide.flatten()[off].item(), seen.result.flatten()[off].item()
    return Finding(
        "count-rounded",
        "warning",
        f"{_name_reduction(seen)} counts {format_four_digits(true)} ones as {format_four_digits(found)}: "
        f"{seen.format.name} counts to {counts}",
        "count in integers or in fp32: mask.cumsum(-1) before the cast",
    )


def _name_reduction(seen: NarrowOperation) -> str:
    return {"linalg_vector_norm": "norm"}.get(name := str(seen.packet).removeprefix("aten."), name)
