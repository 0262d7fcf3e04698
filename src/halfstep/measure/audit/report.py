"""The parts of an audit: verdicts on islands, and a row for each module."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from halfstep.formats import name_dtype
from halfstep.measure.audit.watched import ModuleWork, ObservedStep
from halfstep.measure.survival import Gradients, sum_squares
from halfstep.measure.survival_report import describe_overflow, name_module
from halfstep.observe.emulate import BACKWARD, FORWARD, WEIGHTS, ModuleRanges, ValueRange
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.island import find_islands, is_inside

LEAST_HEADROOM = 1.0
"""Bits; training can use up a factor of two quickly."""
_FURTHER, _CLEARLY = 1.5, 0.05
"""An island is needed if, without it, the gradient error is this many times larger and grows by this share of the norm.
"""


@dataclass(frozen=True)
class IslandVerdict:
    """The verdict on one island of the model."""

    path: str
    needed: bool | None
    """None if it could not be decided."""
    why: str


def judge_island(
    path: str, format_name: str, with_it: ObservedStep, reference: ObservedStep, without: Callable[[str], ObservedStep]
) -> IslandVerdict:
    """Return the verdict: compare the step without the island with the step with it, and with fp32."""
    found = without(path)
    if found.stopped is not None:
        return IslandVerdict(path, True, f"without it the step ends: {found.stopped}")
    reason = (
        _explain_new_overflow(path, found, with_it, format_name)
        or _find_new_mistake(found, with_it)
        or _explain_gradient_difference(found, with_it, reference)
    )
    if reason:
        return IslandVerdict(path, True, f"without it {reason}")
    # Checked last: a broken step can still show that the island is needed, but never that it is not.
    if not with_it.fits:
        return IslandVerdict(path, None, "the step is not finite with it either, so the test is inconclusive")
    headroom = _compute_island_headroom(path, found)
    room = "nothing in it is cast" if math.isinf(headroom) else f"{headroom:.1f} bits, and gradients as near to fp32's"
    return IslandVerdict(path, False, f"{format_name} has room: {room}")


def _explain_new_overflow(path: str, found: ObservedStep, with_it: ObservedStep, format_name: str) -> str | None:
    ranges = found.ranges
    assert ranges is not None
    event = ranges.first_on_the_way_forward
    # A step that fails with the island, too, says nothing about it.
    if with_it.fits and not found.fits:
        event = event or ranges.first_overflow.get(BACKWARD)
        return f"the step overflows {describe_overflow(event)}" if event is not None else "the step is not finite"
    headroom = _compute_island_headroom(path, found)
    if headroom < LEAST_HEADROOM:
        near = f"are {headroom:.1f} bits from the end of" if headroom >= 0 else "do not fit"
        return f"its numbers {near} {format_name}"
    return None


def _find_new_mistake(found: ObservedStep, with_it: ObservedStep) -> str | None:
    """Return the first lint finding that appears only without the island."""
    before = {(one.finding.id, one.module) for one in with_it.spotted}
    new = [one for one in found.spotted if (one.finding.id, one.module) not in before]
    return f"{new[0].finding.id}: {new[0].finding.evidence}" if new else None


def _explain_gradient_difference(found: ObservedStep, with_it: ObservedStep, reference: ObservedStep) -> str | None:
    # Compared with the error that the precision has anyway, because rounding alone moves all gradients.
    near, far = (_compute_relative_difference(reference.gradients, step.gradients) for step in (with_it, found))
    if near is None or far is None or not (far > _FURTHER * near and far - near > _CLEARLY):
        return None
    return f"gradients differ from fp32's by {far:.0%}, with it by {near:.0%}"


def _compute_relative_difference(wanted: Gradients | None, found: Gradients | None) -> float | None:
    """Return the relative difference of the norms; None if it cannot be computed."""
    if not wanted or found is None:
        return None
    total = sum(sum_squares(true) for true in wanted.values())
    apart = sum(sum_squares(true - found.get(name, torch.zeros_like(true))) for name, true in wanted.items())
    return math.sqrt(apart / total) if total and math.isfinite(apart / total) else None


def _compute_island_headroom(path: str, found: ObservedStep) -> float:
    assert found.ranges is not None
    places = found.ranges.by_place.items()
    return min(
        (r.headroom for (module, part), r in places if part in (WEIGHTS, FORWARD) and is_inside(module, path)),
        default=math.inf,
    )


@dataclass(frozen=True)
class RangeOfValues:
    """The range of a module's values relative to the format, in forward or in backward."""

    largest: float
    headroom_bits: float | None
    """Powers of two from the largest value to the format's maximum; negative on overflow."""
    underflow: float
    """Share of the non-zero values that became zero."""


@dataclass(frozen=True, kw_only=True)
class ModuleRow:
    """One module, without its submodules."""

    module: str
    kind: str
    stored: Mapping[str, int]
    """Number of parameters by format, without those of submodules."""
    computed: Mapping[str, float]
    """Shares by format, largest first: of its FLOPs, or of its results if it has no matrix work."""
    flops: Mapping[str, int]
    saved: Mapping[str, int]
    """Bytes saved for backward, by format."""
    share: float
    """Share of the model's FLOPs."""
    island: str | None
    """The island that it is, or lies in."""
    forward: RangeOfValues | None
    backward: RangeOfValues | None


def build_module_rows(model: nn.Module, watched: ObservedStep) -> tuple[ModuleRow, ...]:
    """Return a row for each module with direct work or weights, in the model's order; then one for outside code."""
    # torch.compile wraps modules and puts this prefix in their paths; the recorder reports paths without it.
    modules = {path.replace("_orig_mod.", ""): module for path, module in model.named_modules()}
    total = sum(sum(work.flops.values()) for work in watched.works.values()) or 1
    declared = tuple(find_islands(model))
    found = []
    for path in (*modules, OUTSIDE):
        module, work = modules.get(path), watched.works.get(path, ModuleWork())
        stored = Counter(name_dtype(p.dtype) for p in module.parameters(recurse=False)) if module is not None else {}
        if not (work.computed or stored):
            continue
        found.append(
            ModuleRow(
                module=name_module(path),
                kind="" if module is None else type(module).__name__,
                stored=dict(stored),
                computed=work.computed,
                flops=dict(work.flops.most_common()),
                saved=dict(work.saved.most_common()),
                share=sum(work.flops.values()) / total,
                island=find_island(path, declared),
                forward=_build_value_range(watched.ranges, path, (WEIGHTS, FORWARD)),
                backward=_build_value_range(watched.ranges, path, (BACKWARD,)),
            )
        )
    return tuple(found)


def find_island(module: str, declared: tuple[str, ...]) -> str | None:
    """Return the declared island that contains the module, or None. The path "" is the whole model."""
    for path in declared:
        if module == path or module.startswith(f"{path}.") or (not path and module != OUTSIDE):
            return path
    return None


def _build_value_range(ranges: ModuleRanges | None, module: str, parts: tuple[str, ...]) -> RangeOfValues | None:
    together = ValueRange()
    for part in parts:
        together.add(ranges.by_place.get((module, part), ValueRange()) if ranges is not None else ValueRange())
    if not together.nonzero:
        return None
    headroom = together.headroom if math.isfinite(together.headroom) else None
    return RangeOfValues(together.largest, headroom, together.underflow_share)
