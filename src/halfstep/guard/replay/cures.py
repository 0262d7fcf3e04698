"""What would have made the same step finite: smaller things first, each of them tried."""

from __future__ import annotations

from torch import nn

from halfstep.formats import BF16, FP16
from halfstep.guard.replay.rerun import Way
from halfstep.guard.replay.trials import Outcome, Trials
from halfstep.guard.verdict import Culprit, Cure
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.abilities import ability
from halfstep.precision.hardware import describe
from halfstep.precision.precision import Precision
from halfstep.precision.registry import precision_named

_MODULES = 3
"""The culprit's own module and so many of those round it, in all."""


def cures_for(
    trials: Trials, precision: Precision, culprit: Culprit | None, fp32: Outcome, scale: float | None = 1.0
) -> tuple[Cure, ...]:
    """For a step that fails in `precision` at a scale, None for its own, and not in fp32."""
    tried = _islands(trials, precision, culprit, scale)
    if precision.computes is FP16:
        tried += _bf16(trials)
    tried.append(Cure("precision", "fp32", None if fp32.error else True))
    return tuple(sorted(tried, key=lambda cure: not cure.works))


def candidates(model: nn.Module, module: str) -> list[str]:
    """The module and those round it, without the model itself: an island of everything is another precision."""
    found: list[str] = []
    while module and module != OUTSIDE and len(found) < _MODULES:
        found.append(module)
        module = module.rpartition(".")[0]
    # A list of modules runs nothing, and an island round it would do nothing.
    return [path for path in found if not isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict))]


def _islands(trials: Trials, precision: Precision, culprit: Culprit | None, scale: float | None) -> list[Cure]:
    """Up to the first that works: what is round it works as well, and is larger."""
    tried: list[Cure] = []
    for path in candidates(trials.model, culprit.module) if culprit is not None else ():
        outcome = trials.run(Way(precision, islands=(path,), scale=scale))
        tried.append(Cure("island", path, None if outcome.error else outcome.finite))
        if outcome.finite:
            break
    return tried


def _bf16(trials: Trials) -> list[Cure]:
    device = next(trials.model.parameters()).device
    # Where it is only emulated, a run that asks for it gets something else.
    if not ability(describe(device), BF16.name).native:
        return []
    outcome = trials.run(Way(precision_named("bf16"), scale=1.0))
    return [Cure("precision", "bf16", None if outcome.error else outcome.finite)]
