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
from halfstep.guard.replay.share import Share
from halfstep.observe.finite import all_finite, local, norm_of
from halfstep.observe.leaves import leaves
from halfstep.observe.origins import Made, Origins
from halfstep.observe.recorder import Recorder, as_written
from halfstep.precision.island import trial_island
from halfstep.precision.precision import Precision
from halfstep.step.attempt import Attempt, generator_states, set_generator_states
from halfstep.step.buffers import Buffers
from halfstep.step.held import held_by


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
    """Over all parameters that this process has and the step trains, without the scale that this ran with."""
    weight: float = 1.0
    """Beside those of other processes: how many elements the loss is the mean of; 1 where that is not known."""


def rerun(model: nn.Module, attempt: Attempt, way: Way) -> Rerun:
    """Forward and backward of all micro-batches. Gradients of several processes are not exchanged."""
    device = next(model.parameters()).device
    origins = Origins(model, attempt.microbatches)
    with undisturbed(model, attempt, device), trial_island(model, *way.islands):
        with ExitStack() as active:
            active.enter_context(way.precision.scope(device))
            if not way.compiled:
                active.enter_context(_eagerly())
                active.enter_context(Recorder(model, origins))
            set_generator_states(attempt.generators, device)
            for generator, state in attempt.own_generators:
                generator.set_state(state)
            shares = _run(model, attempt, way, device)
        return _judged(model, attempt, shares, origins, way)


def _run(model: nn.Module, attempt: Attempt, way: Way, device: torch.device) -> dict[str, Share]:
    assert attempt.loss_fn is not None, "the context form cannot be run again"
    microbatches = len(attempt.microbatches)
    shares = {name: Share(factor, microbatches, way.scale) for name, factor in attempt.factors.items()}
    autocast = way.precision.autocast(device)
    for microbatch in attempt.microbatches:
        with autocast:
            given = attempt.loss_fn(model, microbatch)
        by_name = given if isinstance(given, dict) else dict.fromkeys(list(shares)[:1], given)
        ready = {name: share.weighed(by_name[name]) for name, share in shares.items()}
        last = list(ready)[-1]
        for name, loss in ready.items():
            reach = None if attempt.reaches is None else attempt.reaches[name]
            inputs = None if reach is None or reach.alone else list(reach.parameters)
            loss.backward(inputs=inputs, retain_graph=name != last)
    return shares


def _judged(model: nn.Module, attempt: Attempt, shares: Mapping[str, Share], origins: Origins, way: Way) -> Rerun:
    """By what the step looks at, and by nothing else that backward may have reached."""
    losses = [total for share in shares.values() for total in share.totals]
    gradients = _gradients(model, attempt)
    bad = tuple(name for name, (_, gradient) in gradients.items() if not all_finite(gradient))
    # Where this process counts nothing, others may.
    counted = world.size() > 1 or not any(share.counts_nothing for share in shares.values())
    plain = {name: local(gradient) for name, (_, gradient) in gradients.items()}
    # A loss that is not finite comes first: what its gradients are then says nothing more.
    origin = None if way.compiled else origins.reaching(losses) or _of_gradients(model, plain, origins)
    norm = math.hypot(*(norm_of(gradient) * shares[lane].unscale for lane, gradient in gradients.values()))
    first = next(iter(shares.values()))
    return Rerun(
        way,
        sum(share.mean for share in shares.values()),
        not bad and counted and all(map(all_finite, losses)),
        origin,
        bad,
        norm,
        1.0 if first.count is None else first.count,
    )


def _gradients(model: nn.Module, attempt: Attempt) -> dict[str, tuple[str, Tensor]]:
    """By parameter, in the model's order: the optimizer that it belongs to, and its gradient."""
    names = {id(parameter): as_written(name) for name, parameter in model.named_parameters()}
    first = next(iter(attempt.factors))
    owners = {id(p): name for name, reach in (attempt.reaches or {}).items() for p in reach.parameters}
    trained = [*model.parameters(), *(p for p in _trained(attempt) if id(p) not in names)]
    return {
        names.get(id(p), f"parameter {number} of the optimizer, which is not the model's"): (owner, p.grad)
        for number, p in enumerate(trained)
        if p.grad is not None and (owner := first if attempt.reaches is None else owners.get(id(p))) is not None
    }


def _trained(attempt: Attempt) -> list[Tensor]:
    return [parameter for reach in (attempt.reaches or {}).values() for parameter in reach.parameters]


def _of_gradients(model: nn.Module, gradients: Mapping[str, Tensor], origins: Origins) -> Made | None:
    found = origins.reaching(gradients.values())
    if found is None or not any(map(world.is_shard, model.parameters())):
        return found
    return origins.reaching_backward() or found


@contextmanager
def undisturbed(model: nn.Module, attempt: Attempt, device: torch.device) -> Iterator[None]:
    """Whatever runs inside leaves buffers, gradients and random numbers as they were.

    Also of other modules that the loss function holds.
    """
    modules = [model, *held_by(attempt.loss_fn, nn.Module)]
    buffers, generators = [Buffers(module) for module in modules], generator_states(device)
    own = [(generator, generator.get_state()) for generator in held_by(attempt.loss_fn, torch.Generator)]
    own += [(generator, generator.get_state()) for generator, _ in attempt.own_generators]
    everything = [parameter for module in modules for parameter in module.parameters()] + _trained(attempt)
    gradients = [(parameter, parameter.grad) for parameter in everything]
    for kept in buffers:
        kept.remember()
    for parameter in everything:
        parameter.grad = None
    try:
        yield
    finally:
        for kept in buffers:
            kept.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_generator_states(generators, device)
        for generator, state in own:
            generator.set_state(state)


@contextmanager
def batch_kept(microbatches: Sequence[Any]) -> Iterator[None]:
    """What a loss function writes into the batch is taken back, so that the next rerun begins with the same."""
    found = [leaf for _, leaf in leaves(microbatches) if leaf.layout is torch.strided and not leaf.is_inference()]
    kept = [(leaf.detach(), leaf.detach().clone(), leaf._version) for leaf in found]
    try:
        yield
    finally:
        for leaf, copy, version in kept:
            if leaf._version != version:
                leaf.copy_(copy)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled code shows none of its operations; before Dynamo is loaded there is none."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
