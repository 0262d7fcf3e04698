"""A step that failed, run again: in its own precision or in another, with an island or without, and nothing changed.

The weights are as they were, because a skip changes nothing. The model itself runs, not a copy, so that code which
holds on to it sees what it saw; its buffers, gradients and the random numbers are put back afterwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import world
from halfstep.observe.finite import all_finite, local
from halfstep.observe.origins import Made, Origins
from halfstep.observe.recorder import Recorder, as_written
from halfstep.precision.island import trial_island
from halfstep.precision.precision import Precision, widen
from halfstep.step.attempt import Attempt, Factor, generator_states, set_generator_states
from halfstep.step.buffers import Buffers


@dataclass(frozen=True)
class Way:
    """How a step is run again."""

    precision: Precision
    islands: tuple[str, ...] = ()
    scale: float | None = None
    """In place of the loss scale of the step."""
    compiled: bool = False
    """As it ran, compiled code included, and then without looking at its operations."""


@dataclass(frozen=True)
class Rerun:
    """What came of it."""

    way: Way
    loss: float
    """Of all micro-batches, before any scale."""
    finite: bool
    """Loss and gradients."""
    origin: Made | None = None
    """What made them not finite; None where they are, and where compiled code hides it."""
    bad_parameters: tuple[str, ...] = ()
    """Parameters whose gradient is not finite, in the model's order."""
    grad_norm: float = math.nan
    """Over all parameters that this process has, without the scale that this ran with."""


def rerun(model: nn.Module, attempt: Attempt, way: Way) -> Rerun:
    """Forward and backward of all micro-batches. Gradients of several processes are not exchanged."""
    device = next(model.parameters()).device
    origins = Origins(model, attempt.microbatches)
    with undisturbed(model, device), trial_island(model, *way.islands):
        with ExitStack() as active:
            active.enter_context(way.precision.scope(device))
            if not way.compiled:
                active.enter_context(_eagerly())
                active.enter_context(Recorder(model, origins))
            set_generator_states(attempt.generators, device)
            losses = _run(model, attempt, way, device)
        scale = max(factor.scale for factor in attempt.factors.values()) if way.scale is None else way.scale
        return _judged(model, losses, origins, way, scale)


def _run(model: nn.Module, attempt: Attempt, way: Way, device: torch.device) -> list[Tensor]:
    assert attempt.loss_fn is not None, "the context form cannot be run again"
    losses = []
    autocast = way.precision.autocast(device)
    for microbatch in attempt.microbatches:
        with autocast:
            given = attempt.loss_fn(model, microbatch)
        plain, scaled = _weighed(given, attempt.factors, len(attempt.microbatches), way.scale)
        losses.append(plain.detach())
        scaled.backward()
    return losses


def _weighed(given: Any, factors: Mapping[str, Factor], divide: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """The loss as it is, and as backward gets it; of several optimizers, their sum."""
    by_name = given if isinstance(given, dict) else dict.fromkeys(list(factors)[:1], given)
    plain, scaled = [], []
    for name, factor in factors.items():
        loss, count = by_name[name] if isinstance(by_name[name], tuple) else (by_name[name], None)
        mean = widen(loss) / (divide if count is None else (factor.base or count * divide))
        plain.append(mean)
        scaled.append(mean * (factor.scale if scale is None else scale))
    return sum(plain[1:], plain[0]), sum(scaled[1:], scaled[0])


def _judged(model: nn.Module, losses: Sequence[Tensor], origins: Origins, way: Way, scale: float) -> Rerun:
    gradients = {as_written(name): local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    bad = tuple(name for name, gradient in gradients.items() if not all_finite(gradient))
    finite = not bad and all(map(all_finite, losses))
    # A loss that is not finite comes first: what its gradients are then says nothing more.
    origin = None if way.compiled else origins.reaching(losses) or _of_gradients(model, gradients, origins)
    norm = math.sqrt(sum(gradient.double().norm().item() ** 2 for gradient in gradients.values())) / scale
    return Rerun(way, float(sum(loss.item() for loss in losses)), finite, origin, bad, norm)


def _of_gradients(model: nn.Module, gradients: Mapping[str, Tensor], origins: Origins) -> Made | None:
    found = origins.reaching(gradients.values())
    if found is None or not any(map(world.is_shard, model.parameters())):
        return found
    return origins.reaching_backward() or found


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Whatever runs inside leaves buffers, gradients and torch's random numbers as they were."""
    buffers, generators = Buffers(model), generator_states(device)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers.remember()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_generator_states(generators, device)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled code shows none of its operations; before Dynamo is loaded there is none."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
