"""Find weights that are not finite although no applied step had gradients that are not: an update wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from halfstep.finding import Finding
from halfstep.observe.nonfinite_origin import extract_local_tensor, find_nonfinite_kinds
from halfstep.step.optimizer_slot import OptimizerSlot, stack_numbers


@torch.no_grad()
def find_bad_update(model: nn.Module, slots: Sequence[OptimizerSlot], applied: int) -> list[Finding]:
    """Return the finding on trained weights that are not finite after `applied` updates; reads the device once."""
    weights = [p for slot in slots for p in slot.gradients.trainable if extract_local_tensor(p).numel()]
    if not weights:
        return []
    finite = stack_numbers([extract_local_tensor(p).isfinite().all() for p in weights]).tolist()
    bad = next((p for p, is_finite in zip(weights, finite, strict=True) if not is_finite), None)
    if bad is None:
        return []
    name = next((name for name, parameter in model.named_parameters() if parameter is bad), "?")
    what = f"weight {name} contains {' and '.join(sorted(find_nonfinite_kinds(bad)))}, so every step is skipped"
    if not applied:
        return [_build_finding(f"{what}; no step was applied before", "load weights that are finite")]
    before = f"continue from a checkpoint before step {applied}"
    good = f"step {applied}, the last that was applied, had a finite loss and finite gradients"
    if fault := describe_update_fault(bad, [slot.optimizer for slot in slots]):
        return [_build_finding(f"{what}; {good}, and its update wrote it: {fault}", f"{before}, and change that")]
    return [_build_finding(f"{what}; {good}: its update wrote it, or code that ran after it", before)]


def describe_update_fault(parameter: Tensor, optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return what in an optimizer's state makes an update of the non-finite elements non-finite; empty if nothing."""
    bad = ~extract_local_tensor(parameter).isfinite()
    for optimizer in optimizers:
        group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
        if group is None or not bool(bad.any()):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            own = extract_local_tensor(value) if isinstance(value, Tensor) else None
            if own is None or own.shape != bad.shape or not own.is_floating_point():
                continue
            if not bool(own[bad].isfinite().all()):
                return f"{type(optimizer).__name__}'s {key} is not finite there"
            if key.endswith(("_sq", "square_avg")) and group.get("eps") == 0 and bool((own[bad] == 0).all()):
                return f"{type(optimizer).__name__} divides by the root of {key}, which is 0 there, with eps=0"
    return ""


def _build_finding(evidence: str, fix: str) -> Finding:
    return Finding("weight.not_finite", "warning", evidence, fix)
