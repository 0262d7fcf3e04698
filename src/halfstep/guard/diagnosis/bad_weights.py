"""Find weights and statistics that were bad before a step began: which, where in them, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.guard.diagnosis.rerun import ATTRIBUTE, HeldTensors
from halfstep.guard.diagnosis.trials import TrialOutcome
from halfstep.guard.verdict import Cure
from halfstep.observe.nonfinite_origin import all_finite, local
from halfstep.observe.recorder import as_written

WEIGHT, BUFFER = "weight ", "buffer "
"""The prefixes of the names of a model's tensors."""
_SHOWN = 5
_VARIANCES = ("running_var", "moving_var", "running_variance", "moving_variance")
"""The usual names of buffers that cannot be negative."""


@dataclass(frozen=True)
class Past:
    """The run before the step, as far as it is known."""

    applied: int | None = None
    """The number of steps applied before."""
    checkpoint: str = ""
    """The name of the checkpoint that the run resumed from."""
    resumed_at: int = 0
    """The number of steps applied when that checkpoint was written."""

    @property
    def came_with_checkpoint(self) -> bool:
        return bool(self.checkpoint) and self.applied in (None, self.resumed_at)

    def since(self, looked_up: bool) -> str:
        """Return since when a tensor is bad; `looked_up`: a step may have succeeded without using it."""
        if self.came_with_checkpoint:
            return f"it came with the checkpoint {self.checkpoint}"
        if not self.applied:
            return "" if self.applied is None else "it was so before the first step"
        after = f", after the run was taken up from {self.checkpoint}" if self.checkpoint else ""
        good = f"step {self.applied}, the last that was applied, was finite{after}"
        return f"{good}{', or did not use it' if looked_up else ', so it was spoilt since'}"

    def cure(self, name: str) -> Cure:
        """Return what to do about the bad tensor of this name."""
        if self.came_with_checkpoint:
            return Cure("restore", f"go on from a checkpoint before {self.checkpoint}: {name} is spoilt in it", None)
        if not self.applied:
            return Cure("restore", f"look at what builds or loads {name}: it was spoilt before the first step", None)
        return Cure(
            "restore", f"go on from a checkpoint of before step {self.applied}, and see what wrote {name}", None
        )


def is_state(name: str) -> bool:
    """Return whether a tensor of this name belongs to a module."""
    return name.startswith((WEIGHT, BUFFER, ATTRIBUTE))


def is_table(name: str, model: nn.Module) -> bool:
    """Return whether a weight is looked up row by row, so that steps can succeed without using a bad row."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    paths = {as_written(path) for path, module in model.named_modules() if isinstance(module, tables)}
    return name.removeprefix(WEIGHT).rpartition(".")[0] in paths


def named_tensor(name: str, model: nn.Module, held: HeldTensors) -> Tensor | None:
    """Return the tensor of this name, or None."""
    if name in held.tensors:
        return held.tensors[name]
    ours: dict[str, Tensor] = {f"{WEIGHT}{as_written(path)}": weight for path, weight in model.named_parameters()}
    ours |= {f"{BUFFER}{as_written(path)}": buffer for path, buffer in model.named_buffers()}
    return ours.get(name)


def bad_rows(tensor: Tensor | None) -> str:
    """Return the non-finite rows of a tensor; empty if there are none, or all are bad."""
    if tensor is None or tensor.ndim < 2:
        return ""
    mine = local(tensor)
    bad = [int(row) for row in (~torch.isfinite(mine).flatten(1).all(1)).nonzero().flatten().tolist()]
    if not bad or len(bad) == len(mine):
        return ""
    shown = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    return f"row {shown}" if len(bad) == 1 else f"rows {shown}, {len(bad)} of {len(mine)}"


def impossible(model: nn.Module, held: HeldTensors, outcome: TrialOutcome) -> str:
    """Return the name of a negative variance in the module that failed, on any rank; empty if there is none."""
    # Every rank must reach this call: an early return on one of them would leave the others waiting.
    return next(filter(None, distributed.from_all(_negative_variance(model, held, outcome))), "")


def _negative_variance(model: nn.Module, held: HeldTensors, outcome: TrialOutcome) -> str:
    culprit = outcome.culprit
    if culprit is None or culprit.outside is not None:
        return ""
    modules = [(as_written(path), module) for path, module in model.named_modules()]
    for holder, top in held.modules:
        modules += [(".".join(filter(None, (holder, path))), module) for path, module in top.named_modules()]
    # Modules outside the model have no path in it, so the failing one is not known: all of them are checked.
    beside = {path for path, _ in modules[len(list(model.modules())) :]}
    for path, module in modules:
        if path == culprit.module or path in beside:
            for name in _VARIANCES:
                variance = module._buffers.get(name)
                if variance is not None and bool((local(variance) < 0).any()):
                    return f"{BUFFER}{path}.{name}" if path else f"{BUFFER}{name}"
    return ""


def optimizer_evidence(parameter: Tensor | None, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return which state of an optimizer is bad for this parameter."""
    # Worth reporting: bad moments would corrupt the parameter again after it was restored.
    found = []
    for optimizer in optimizers:
        for key, value in (optimizer.state.get(parameter, {}) if parameter is not None else {}).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
                if not all_finite(value):
                    found.append(f"the optimizer's {key} of it is not finite either")
                elif key.endswith("_sq") and bool((local(value) < 0).any()):
                    found.append(f"the optimizer's {key} of it is negative")
    return tuple(found)
