"""Run a step without applying it, in its own or another precision, with or without an island, without side effects.

The weights are unchanged, because a skip changes nothing. The model itself runs, not a copy, so that code which holds a
reference to it sees the same object; everything that the rerun writes is restored afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.finding import Finding
from halfstep.formats import FP32, is_narrow
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.observe.nonfinite_origin import (
    NonfiniteOrigins,
    NonfiniteSource,
    compute_norm,
    compute_total_norm,
    extract_local_tensor,
    is_all_finite,
)
from halfstep.observe.reachable import (
    find_reachable_instances,
    iterate_reachable,
    iterate_tensor_leaves,
    select_generators,
    select_outermost_modules,
)
from halfstep.observe.recorder import Recorder, run_eagerly
from halfstep.precision.converted import compute_as_plain_linear, list_precision_conversions
from halfstep.precision.island import has_precision_changes, make_temporary_islands, undo_policy
from halfstep.precision.precision import Precision, widen
from halfstep.random_state import GeneratorObject, preserve_random_state
from halfstep.step.census import Census
from halfstep.step.loss import Counted, divide_and_scale_loss, estimate_window_count, split_loss_and_aux
from halfstep.step.objective import Objective
from halfstep.step.rollback import Rollback
from halfstep.step.step_inputs import LossFactors, StepInputs

HELD = "the loss function's "
"""The prefix of tensors that are reached only through the loss function."""
ATTRIBUTE = "tensor "
"""The prefix of tensors that are attributes of a module and not registered."""


@dataclass(frozen=True)
class HeldTensors:
    """The modules, tensors and generators that a step uses besides its model and its batch."""

    modules: tuple[tuple[str, nn.Module], ...]
    """The modules that the loss function holds outside the model; only the outermost ones."""
    tensors: dict[str, Tensor]
    """The weights and buffers of these modules, and plain tensors of the model and the loss function."""
    generators: tuple[GeneratorObject, ...]
    """Of torch, NumPy and Python."""


def collect_held_tensors(model: nn.Module, loss_fn: Any, batch: Any = None) -> HeldTensors:
    """Return what the model, the loss function and the batch hold."""
    found = list(iterate_reachable(loss_fn))
    on_model = list(iterate_reachable(model))
    named = {id(thing): name or type(thing).__name__ for name, thing in found if isinstance(thing, nn.Module)}
    held = select_outermost_modules((thing for _, thing in found if isinstance(thing, nn.Module)), model)
    modules = tuple((named[id(module)], module) for module in held)
    tensors = {f"{HELD}{name or 'tensor'}": thing for name, thing in found if _is_plain_tensor(thing)}
    tensors |= {
        f"{ATTRIBUTE}{strip_compile_wrappers(name)}": thing for name, thing in on_model if _is_plain_tensor(thing)
    }
    for holder, module in modules:
        tensors |= {f"buffer {_format_held_path(name, holder)}": buffer for name, buffer in module.named_buffers()}
        tensors |= {f"weight {_format_held_path(name, holder)}": weight for name, weight in module.named_parameters()}
    everything = [thing for _, thing in (*found, *on_model, *iterate_reachable(batch))]
    return HeldTensors(modules, tensors, tuple(select_generators([*everything, *model.modules()])))


def _is_plain_tensor(thing: Any) -> bool:
    return isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter)


def _format_held_path(name: str, holder: str) -> str:
    return f"{holder}.{strip_compile_wrappers(name)}"


@contextmanager
def preserve_training_state(
    model: nn.Module,
    attempt: StepInputs,
    holdings: HeldTensors,
    device: torch.device,
    *,
    compiled: bool,
    include: Sequence[Any] = (),
) -> Iterator[Rollback]:
    """Restore what the block writes, gradients and random numbers; a recorder announces the writes to the rollback.

    Of compiled code no recorder learns what it is about to write, so parameters are copied in advance. `include` are
    modules and objects that are restored as a whole, as by `Stepper.include`.
    """
    modules = [model, *(module for _, module in holdings.modules)]
    trained = [parameter for reach in (attempt.reaches or {}).values() for parameter in reach.parameters]
    every = [*(parameter for module in modules for parameter in module.parameters()), *trained]
    parameters = list({id(parameter): parameter for parameter in every}.values())
    census = Census(model)
    census.look_beside(modules[1:])
    rollback = Rollback(_ignore_findings, census)
    for thing in include:
        rollback.include(thing)
    if compiled:
        # Of a large model only the untrained ones, since a copy of all may not fit.
        fits = sum(parameter.numel() for parameter in parameters) <= MOST_COPIED
        rollback.copy_parameters(parameter for parameter in parameters if fits or not parameter.requires_grad)
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    census.update()
    rollback.remember()
    # Backward adds to existing gradients, so a rerun must start without any, as the step did.
    for parameter in parameters:
        parameter.grad = None
    with preserve_random_state(device, [*holdings.generators, *(generator for generator, _ in attempt.own_generators)]):
        try:
            yield rollback
        finally:
            rollback.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _ignore_findings(_findings: Sequence[Finding]) -> None:
    """A rerun writes what the step wrote, which the step itself reports."""


class ReplayLoss:
    """The sum of the micro-batches of one loss."""

    def __init__(self, factor: LossFactors, microbatches: int, scale: float | None) -> None:
        self._microbatches, self._base = microbatches, factor.base
        self.scale = factor.scale if scale is None else scale
        self.totals: list[Tensor] = []
        self.count: float | None = None
        """The number of elements, for a loss that is a Counted sum."""
        self.unscaled = False
        """Whether the gradients are unscaled already, for on_gradients."""

    def weigh_loss(self, given: Any) -> Tensor:
        """Return the value that backward runs on."""
        loss, count = given if isinstance(given, Counted) else (given, None)
        value = widen(loss)
        self.totals.append(value.detach())
        divisor: float = self._microbatches
        if count is not None:
            self.count = (self.count or 0.0) + float(count)
            if self._base is None:
                # The step exchanged the counts between ranks. Here one rank may fail, and must not leave the others
                # waiting: an estimate that all micro-batches share takes their place.
                self._base = estimate_window_count(float(count), self._microbatches, distributed.count_ranks())
            divisor = self._base or 1.0
        return divide_and_scale_loss(value, divisor, self.scale)

    @property
    def counts_nothing(self) -> bool:
        return self.count is not None and not self.count > 0.0

    @property
    def mean(self) -> float:
        """Return the loss as in a report; NaN for no element."""
        if self.counts_nothing:
            return math.nan
        total = sum(float(total.item()) for total in self.totals)
        return total / (len(self.totals) if self.count is None else self.count)

    @property
    def unscale(self) -> float:
        """Return the factor that turns the gradients of backward into those of the mean."""
        if self.unscaled:
            return 1.0
        if self.count is None or self.counts_nothing:
            return 1.0 / self.scale
        return (self._base or 1.0) / self.count / self.scale


MOST_COPIED = 1_000_000_000
"""The number of parameters up to which all are copied before compiled code runs; above, only untrained ones."""
ON_GRADIENTS = "(on_gradients)"
"""The module of operations that a Stepper's on_gradients runs."""
OnGradients = Callable[[list[Tensor]], object]


@dataclass(frozen=True)
class ReplayConfig:
    """The way in which a step is run again."""

    precision: Precision
    islands: tuple[str, ...] = ()
    scale: float | None = None
    """The loss scale that replaces the step's own, or None."""
    compiled: bool = False
    """Whether compiled code runs as it did; then operations cannot be observed."""
    on_gradients: OnGradients | None = None
    """The Stepper's on_gradients, to be run after backward; None to leave it out: it may have side effects."""


@dataclass(frozen=True)
class RerunResult:
    """The result of a rerun."""

    config: ReplayConfig
    loss: float
    """The loss of all micro-batches, unscaled."""
    finite: bool
    """Whether the step would be applied: loss, gradient norm in fp32 and buffers are finite."""
    origin: NonfiniteSource | None = None
    """The origin of non-finite values; None if there are none, or if compiled code hides it."""
    bad_parameters: tuple[str, ...] = ()
    """The parameters with a non-finite gradient, in the model's order."""
    grad_norm: float = math.nan
    """The unscaled norm over all parameters that this rank has and the step trains."""
    weight: float = 1.0
    """The number of elements that the loss is the mean of, to weigh it against other ranks; 1 if unknown."""
    bad_buffers: tuple[str, ...] = ()
    """The buffers that became non-finite."""
    norm_too_large: bool = False
    """Whether every gradient is finite, but their norm overflows fp32."""
    loss_too_large: bool = False
    """Whether the loss of every micro-batch is finite, but their sum overflows fp32."""


OtherWeights = Sequence[tuple[Tensor, Tensor]]
"""Parameters, each with the values that it has in a rerun."""


def rerun_step(model: nn.Module, attempt: StepInputs, config: ReplayConfig, weights: OtherWeights = ()) -> RerunResult:
    """Run forward and backward of all micro-batches; gradients are not exchanged between ranks.

    `weights` replace those of the model in the rerun, such as the ones from before the last update.
    """
    with _exchange_weights(weights):
        return _rerun(model, attempt, config)


@contextmanager
def _exchange_weights(weights: OtherWeights) -> Iterator[None]:
    """Give parameters other memory inside the context; nothing is copied."""
    kept = [(parameter, parameter.data) for parameter, _ in weights]
    try:
        for parameter, other in weights:
            parameter.data = other
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _rerun(model: nn.Module, attempt: StepInputs, config: ReplayConfig) -> RerunResult:
    device = next(model.parameters()).device
    held = collect_held_tensors(model, attempt.loss_fn, attempt.microbatches)
    origins = NonfiniteOrigins(model, attempt.microbatches, held.tensors)
    bad_before = set(_find_nonfinite_buffers(model, held))
    kept = preserve_training_state(model, attempt, held, device, compiled=config.compiled)
    with (
        kept as rollback,
        make_temporary_islands(model, *config.islands),
        widen_trained_weights(model, config.precision),
    ):
        with ExitStack() as active:
            active.enter_context(config.precision.scope(device))
            if not config.precision.changes_model:
                active.enter_context(compute_as_plain_linear(list_precision_conversions(model)))
            elif not has_precision_changes(model):
                config.precision.prepare(model, device)
                active.callback(undo_policy, model)
            if not config.compiled:
                active.enter_context(run_eagerly())
                active.enter_context(Recorder(model, origins, memory=rollback))
            # Last before the run, so that nothing else draws from them in between.
            attempt.restore_generators(device)
            shares = run_microbatches(model, attempt, config, device)
            after_backward = origins.order
            if config.on_gradients is not None:
                _run_on_gradients(model, attempt, shares, config.on_gradients)
        buffers = {
            name: buffer for name, buffer in _find_nonfinite_buffers(model, held).items() if name not in bad_before
        }
        found = _build_rerun_result(model, attempt, shares, buffers, origins, config)
    if found.origin is None or found.origin.order <= after_backward:
        return found
    return replace(found, origin=replace(found.origin, module=ON_GRADIENTS))


@contextmanager
def widen_trained_weights(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Store trained weights in fp32 inside the context, for a precision that does not cast them."""
    trained = [] if precision.casts else [p for p in model.parameters() if p.requires_grad]
    stored = [(p, p.data, getattr(p, "grad_dtype", None)) for p in trained if is_narrow(p.dtype)]
    try:
        for parameter, data, _ in stored:  # inside: there may be no room for the last ones
            _set_parameter_data(parameter, data.float(), torch.float32)
        yield
    finally:
        for parameter, data, dtype in stored:
            _set_parameter_data(parameter, data, dtype)


def _set_parameter_data(parameter: Tensor, data: Tensor, gradient_dtype: torch.dtype | None) -> None:
    parameter.grad = None
    parameter.data = data
    if gradient_dtype is not None and hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = gradient_dtype


def _find_nonfinite_buffers(model: nn.Module, held: HeldTensors) -> dict[str, Tensor]:
    """Return the non-finite buffers, by name."""
    named = [(strip_compile_wrappers(name), buffer) for name, buffer in model.named_buffers()]
    for holder, module in held.modules:
        named += [(f"{holder}.{strip_compile_wrappers(name)}", buffer) for name, buffer in module.named_buffers()]
    return {name: buffer for name, buffer in named if _has_numbers(buffer) and not is_all_finite(buffer)}


def _has_numbers(buffer: Tensor) -> bool:
    strided = buffer.layout is torch.strided and not buffer.is_meta
    return strided and (buffer.is_floating_point() or buffer.is_complex())


def run_microbatches(
    model: nn.Module,
    attempt: StepInputs,
    config: ReplayConfig,
    device: torch.device,
    pair: Callable[[Any], Sequence[Objective]] | None = None,
) -> dict[str, ReplayLoss]:
    """Run forward and backward of every micro-batch; gradients add up in the parameters, unexchanged and scaled.

    `pair` matches losses with optimizers for a step that has not run yet.
    """
    assert attempt.loss_fn is not None, "the context form cannot be run again"
    shares: dict[str, ReplayLoss] = {}
    microbatches = len(attempt.microbatches)
    autocast = config.precision.autocast(device)
    for microbatch in attempt.microbatches:
        with autocast:
            given, _ = split_loss_and_aux(attempt.loss_fn(model, microbatch))
        if pair is not None and not attempt.factors:
            attempt.has(pair(given))
        shares = shares or {
            name: ReplayLoss(factor, microbatches, config.scale) for name, factor in attempt.factors.items()
        }
        by_name = given if isinstance(given, dict) else dict.fromkeys(list(shares)[:1], given)
        ready = {name: share.weigh_loss(by_name[name]) for name, share in shares.items()}
        last = list(ready)[-1]
        for name, loss in ready.items():
            reach = None if attempt.reaches is None else attempt.reaches[name]
            inputs = None if reach is None or reach.alone else list(reach.parameters)
            loss.backward(inputs=inputs, retain_graph=name != last)
    return shares


def _run_on_gradients(
    model: nn.Module, attempt: StepInputs, shares: Mapping[str, ReplayLoss], on_gradients: OnGradients
) -> None:
    """Unscale the gradients and run on_gradients as the step does; tensors that it holds are restored."""
    parameters: list[Tensor] = []
    for name, share in shares.items():
        reached = model.parameters() if attempt.reaches is None else attempt.reaches[name].parameters
        for parameter in reached:
            if parameter.grad is not None:
                parameter.grad.mul_(share.unscale)
                parameters.append(parameter)
        share.unscaled = True
    held = [
        each
        for each in find_reachable_instances(on_gradients, Tensor)
        if not isinstance(each, nn.Parameter) and _has_numbers(each)
    ]
    with preserve_batch(held):
        on_gradients(parameters)


def _build_rerun_result(
    model: nn.Module,
    attempt: StepInputs,
    shares: Mapping[str, ReplayLoss],
    buffers: Mapping[str, Tensor],
    origins: NonfiniteOrigins,
    config: ReplayConfig,
) -> RerunResult:
    """Judge a rerun by what the step judges, in the same way, and by nothing else that backward may have reached."""
    losses = [total for share in shares.values() for total in share.totals]
    gradients = _collect_gradients(model, attempt)
    bad = tuple(name for name, (_, gradient) in gradients.items() if not is_all_finite(gradient))
    # If this rank counts no element, others may still do.
    counted = distributed.count_ranks() > 1 or not any(share.counts_nothing for share in shares.values())
    plain = {name: extract_local_tensor(gradient) for name, (_, gradient) in gradients.items()}
    # The loss first: if it is non-finite, its gradients say nothing more.
    origin = (
        (origins.reaching(losses) or _find_gradient_origin(model, plain, origins) or origins.reaching(buffers.values()))
        if not config.compiled
        else None
    )
    fits, summed = _norm_fits(gradients, shares), all(map(_has_finite_sum, shares.values()))
    norm = math.hypot(*(compute_norm(gradient) * shares[lane].unscale for lane, gradient in gradients.values()))
    first = next(iter(shares.values()))
    return RerunResult(
        config,
        sum(share.mean for share in shares.values()),
        fits and summed and counted and not bad and not buffers,
        origin,
        bad,
        norm,
        1.0 if first.count is None else first.count,
        tuple(buffers),
        not fits and not bad,
        not summed and all(map(is_all_finite, losses)),
    )


def _norm_fits(gradients: Mapping[str, tuple[str, Tensor]], shares: Mapping[str, ReplayLoss]) -> bool:
    """Return whether the unscaled norm of each optimizer's gradients fits fp32, as the step defines it."""
    by_lane: dict[str, list[Tensor]] = {}
    for lane, gradient in gradients.values():
        by_lane.setdefault(lane, []).append(gradient)
    return all(compute_total_norm(its) * shares[lane].unscale <= FP32.largest for lane, its in by_lane.items())


def _has_finite_sum(share: ReplayLoss) -> bool:
    """Return whether the losses add up to a finite number, in the format in which the step adds them."""
    total = share.totals[0]
    for more in share.totals[1:]:
        total = total + more
    return is_all_finite(total)


def _collect_gradients(model: nn.Module, attempt: StepInputs) -> dict[str, tuple[str, Tensor]]:
    """Return the optimizer and the gradient of each parameter, in the model's order."""
    names = {id(parameter): strip_compile_wrappers(name) for name, parameter in model.named_parameters()}
    first = next(iter(attempt.factors))
    reaches = attempt.reaches or {}
    owners = {id(p): name for name, reach in reaches.items() for p in reach.parameters}
    trained = [*model.parameters(), *(p for reach in reaches.values() for p in reach.parameters if id(p) not in names)]
    return {
        names.get(id(p), f"parameter {number} of the optimizer, which is not the model's"): (owner, p.grad)
        for number, p in enumerate(trained)
        if p.grad is not None and (owner := first if attempt.reaches is None else owners.get(id(p))) is not None
    }


def _find_gradient_origin(
    model: nn.Module, gradients: Mapping[str, Tensor], origins: NonfiniteOrigins
) -> NonfiniteSource | None:
    found = origins.reaching(gradients.values())
    if found is None or not distributed.is_sharded(model.parameters()):
        return found
    # A sharded gradient is reduced over all ranks, so no chain of local operations leads to it: any bad operation of
    # backward counts.
    return origins.reaching_backward() or found


@contextmanager
def preserve_batch(microbatches: Sequence[Any]) -> Iterator[None]:
    """Restore tensors of the batch that the block writes to, so that the next rerun starts with the same batch."""
    found = [
        leaf
        for _, leaf in iterate_tensor_leaves(microbatches)
        if leaf.layout is torch.strided and not leaf.is_inference()
    ]
    kept = [(leaf.detach(), leaf.detach().clone(), leaf._version) for leaf in found]
    try:
        yield
    finally:
        for leaf, copy, version in kept:
            # _version counts in-place writes, so an untouched tensor is not written again.
            if leaf._version != version:
                leaf.copy_(copy)
