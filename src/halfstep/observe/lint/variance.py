"""Find variances that are mostly rounding error: of values far from zero, or as a difference of nearly equal ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep.finding import Finding
from halfstep.observe.lint.seen import NarrowOperation, format_four_digits

_aten = torch.ops.aten
_SPREADS = (_aten.var, _aten.var_mean, _aten.std, _aten.std_mean)
_BATCH = (_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._batch_norm_with_update)
_NORMS = (_aten.native_layer_norm, _aten.native_group_norm, *_BATCH)
PACKETS = (*_SPREADS, *_NORMS)
_FIX = "subtract the mean in fp32, before rounding: {island}"


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for a group whose values differ by less than the format's spacing at their size, or None."""
    if not seen.has_values:
        return None
    groups = _reshape_groups(seen)
    if groups is None or groups.shape[1] < 2:
        return None
    wide = groups.float()
    spread, mean = wide.std(1), wide.mean(1).abs()
    noise = (spread > 0) & (spread < seen.format.epsilon * mean)
    if not 2 * int(noise.sum()) > noise.numel():
        return None
    worst = int((mean * noise).argmax())
    size = mean[worst].item()
    step = float(seen.format.epsilon * 2.0 ** math.floor(math.log2(size)))
    return Finding(
        "variance-of-rounding",
        "warning",
        f"numbers about {format_four_digits(size)} that spread by {format_four_digits(spread[worst].item())}: at "
        "that size "
        f"{seen.format.name} has steps of {format_four_digits(step)}, so the variance is rounding",
        _FIX,
    )


def _reshape_groups(seen: NarrowOperation) -> Tensor | None:
    """Return groups × values, for the variance of each group; None if they cannot be determined."""
    given: Tensor = seen.inputs[0]
    arguments: Any = seen.operation.arguments
    if not given.is_floating_point():
        return None
    if seen.packet is _aten.native_layer_norm:
        return given.reshape(-1, math.prod(arguments[1]))
    if seen.packet is _aten.native_group_norm:
        return given.reshape(given.shape[0] * int(arguments[6]), -1)
    if seen.packet in _BATCH:
        return given.transpose(0, 1).reshape(given.shape[1], -1)
    dimensions = arguments[1] if len(arguments) > 1 else None
    if not isinstance(dimensions, list | tuple) or not dimensions:
        return given.reshape(1, -1)
    last = [dimension % given.dim() for dimension in dimensions]
    return given.movedim(last, list(range(-len(last), 0))).reshape(-1, math.prod(given.shape[d] for d in last))


class DifferenceRule:
    """A rule that follows the difference of nearly equal narrow values until a root or logarithm of it is taken."""

    packets = (
        _aten.sub, _aten.add, _aten.clamp, _aten.clamp_min, _aten.relu, _aten.abs, _aten.mul, _aten.div,
        _aten.sqrt, _aten.rsqrt, _aten.log, _aten.reciprocal, _aten.pow,
    )  # fmt: skip
    _ends = (_aten.sqrt, _aten.rsqrt, _aten.log, _aten.reciprocal, _aten.pow)

    def __init__(self) -> None:
        # A weak reference keeps the storage's address from being reused, without keeping its memory alive.
        self._known: dict[int, tuple[StorageWeakRef, Finding]] = {}

    def __call__(self, seen: NarrowOperation) -> Finding | None:
        if not seen.has_values or not seen.inputs:
            return None
        known = self._known.get(seen.inputs[0].untyped_storage()._cdata)
        if known is not None and seen.packet in self._ends:
            return known[1] if self._is_a_root(seen) else None
        if seen.packet is _aten.sub and len(seen.inputs) == 2:
            self._remember_finding(seen, self._find_cancellation(seen))
        elif known is not None and len(seen.inputs) == 1:
            self._remember_finding(seen, known[1])
        return None

    def _is_a_root(self, seen: NarrowOperation) -> bool:
        return seen.packet is not _aten.pow or float(seen.operation.arguments[1]) in (0.5, -0.5, -1.0)

    def _remember_finding(self, seen: NarrowOperation, finding: Finding | None) -> None:
        if finding is not None:
            reference = StorageWeakRef(seen.result.untyped_storage())
            self._known[reference.cdata] = reference, finding

    def _find_cancellation(self, seen: NarrowOperation) -> Finding | None:
        first, second = seen.inputs
        if first.shape != second.shape or not first.is_floating_point():
            return None
        close = (seen.result.abs() <= 2 * seen.format.epsilon * first.abs()) & (first != 0)
        if not 2 * int(close.sum()) > close.numel():
            return None
        where = int((first.abs() * close).flatten().argmax())
        a, b = (float(t.flatten()[where]) for t in (first, second))
        return Finding(
            "variance-in-half",
            "warning",
            f"{format_four_digits(a)} - {format_four_digits(b)} in {seen.format.name} is mostly rounding, "
            "and a root or a logarithm is taken of it",
            "compute a variance with torch.var, or in fp32: {island}",
        )
