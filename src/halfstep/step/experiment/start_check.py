"""The start check: one micro-batch in the run's precision and in fp32, on this device, before the first update.

Both runs have the same weights and random numbers, and nothing of them remains. Refused is what no rounding explains:
a parameter without a gradient, values that became zero, non-finite numbers that fp32 does not have. A result that is
further from fp32 than the format explains is a warning: discrete choices, such as routing, differ on healthy models
too. What roundings explain follows from the terms of each sum (`observe/layer_sums.py`).
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from halfstep import distributed
from halfstep.errors import StartCheckFailed, format_error_line
from halfstep.finding import Finding, Severity
from halfstep.formats import FP32
from halfstep.json_data import JsonResult
from halfstep.numbers import format_number, format_percent
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.observe.layer_sums import INPUT, PARAMETER, RESULT, ComparedPart, SumErrors
from halfstep.observe.module_values import ModuleValues
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.observe.recorder import has_compiled_code, list_compiled_modules, run_eagerly
from halfstep.out_of_memory import is_step_too_large
from halfstep.precision.converted import compute_as_plain_linear, find_layer_format, has_converted_layer, is_converted
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.step.experiment.rerun import (
    ATTRIBUTE,
    HELD,
    MOST_COPIED,
    ReplayConfig,
    collect_held_tensors,
    preserve_batch,
    preserve_training_state,
    run_microbatches,
    widen_trained_weights,
)
from halfstep.step.objective import Objective
from halfstep.step.step_inputs import StepInputs

NO_GRADIENT, ZEROS, NOT_FINITE = "start.no_gradient", "start.zeros", "start.not_finite"
OUTPUT, GRADIENT, CHOICES, COMPILED = "start.output", "start.gradient", "start.choices", "start.compiled"
UNDERFLOW, NOT_CHECKED = "start.underflow", "start.not_checked"

_ERROR, _SLOPE = 0.75, 0.25
"""The largest error of a layer's numbers, and the largest share that they may be off, in units of the format's epsilon:
rounding to nearest gives 0.2 and 0."""
_PLAIN_LAYER = 1e-3
"""The error in fp32 up to which a layer adds up the products of what it was given, and nothing else."""
_SIGNAL = 0.01
"""The size of a sum, relative to its terms, that rounding noise does not reach: fp32's epsilon times the root of their
number is below it for 10^9 terms."""
_OUTPUT, _COMPILED, _AT_MOST = 64, 16, 0.5
"""Distances that the roundings of a deep model explain, in epsilons, and at most."""
_SMALL = FP32.epsilon**0.5
"""The share of the largest gradient below which half of fp32's digits may be lost in what leads to it."""
_ZEROS = 0.25
_UNDERFLOWS = 1e-3
"""fp16 gradients that would be below this, scaled, may be zero by underflow of what they are summed from."""
_CUT = 8
"""The part of a batch that is taken where the whole does not fit."""
_LARGE = 2**24
"""Elements above which a tensor of the loss function is not copied: a data set, not a state."""


class Deviation(NamedTuple):
    """One result of the comparison; an error is a refusal."""

    id: str
    severity: Severity
    module: str
    figure: float
    evidence: str
    fix: str


@dataclass(frozen=True)
class StartCheck(JsonResult):
    """The result of the start check."""

    precision: str
    not_checked: str = ""
    """Why there is no result; empty if there is one."""
    deviations: tuple[Deviation, ...] = ()
    samples: int | None = None
    """The number of first samples that were taken, where the micro-batch did not fit in fp32."""
    loss_scale: float = 1.0
    """The loss scale at which gradients were finite."""
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """What a run reports: warnings, and that nothing was checked."""
        if self.not_checked:
            text = f"{self.precision} was not checked before the first update: {self.not_checked}"
            return [
                Finding(NOT_CHECKED, "note", text, "nothing: the run continues; train.check: false turns the check off")
            ]
        return [Finding(d.id, d.severity, d.evidence, d.fix) for d in self.deviations if d.severity != "error"]

    def refuse(self, *, but_for: str = "") -> None:
        """Raise StartCheckFailed if training would be wrong, for another reason than the id `but_for`."""
        refused = [each for each in self.deviations if each.severity == "error" and each.id != but_for]
        if refused:
            error = StartCheckFailed(
                f"start check of {self.precision}: " + "; ".join(each.evidence for each in refused),
                allowed="the gradients and values that fp32 has, up to rounding",
                do=f"{refused[0].fix}; check=False, or train.check=false, trains without this check",
                id=refused[0].id,
            )
            error.module, error.figure = refused[0].module, refused[0].figure
            raise error


Pair = Callable[[Any], Sequence[Objective]]


def check_start(
    model: nn.Module, attempt: StepInputs, precision: Precision, *, pair: Pair, include: Sequence[Any], ranks: int
) -> StartCheck | None:
    """Compare the first micro-batch of a step in `precision` and in fp32; None for fp32 and fp64, where all is plain.

    `pair` matches losses with optimizers; `include` are objects next to the model that are restored too. An error in a
    run is no result: if it is the step's own, the step will raise it again.
    """
    if precision.computes.epsilon <= FP32.epsilon and not has_converted_layer(model):
        return None
    begun, samples = time.perf_counter(), None
    try:
        _check_comparable(model, attempt, ranks)
        attempt = attempt._replace(microbatches=attempt.microbatches[:1])
        try:
            deviations, factor = _ComparisonRuns(model, attempt, precision, pair, include).compare()
        except Exception as error:
            if not is_step_too_large(error):
                raise
            traceback.clear_frames(error.__traceback__)
            attempt, samples = _cut_batch(attempt)
            deviations, factor = _ComparisonRuns(model, attempt, precision, pair, include).compare()
    except Exception as error:
        # The frames of the failed run hold its tensors, and the step needs the room.
        traceback.clear_frames(error.__traceback__)
        reason = str(error) if isinstance(error, _NotComparable) else format_error_line(error)
        return StartCheck(precision.name, reason, seconds=time.perf_counter() - begun)
    return StartCheck(precision.name, "", tuple(deviations), samples, factor, time.perf_counter() - begun)


class _NotComparable(Exception):
    """A reason why there is no result."""


def _check_comparable(model: nn.Module, attempt: StepInputs, ranks: int) -> None:
    if attempt.loss_fn is None or not attempt.microbatches:
        raise _NotComparable("there is no loss function and batch to run again; step(loss_fn, batch) has them")
    if distributed.is_sharded(model.parameters()):
        raise _NotComparable("the model is under fully_shard, which gathers weights in the format of the run")
    if isinstance(model, DistributedDataParallel):
        raise _NotComparable("the model is in DistributedDataParallel, whose runs exchange gradients")
    if ranks > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise _NotComparable("SyncBatchNorm waits for all ranks, and one may have no room for fp32")


def _cut_batch(attempt: StepInputs) -> tuple[StepInputs, int]:
    """Return the same step with the first samples of its batch."""
    batch = attempt.microbatches[0]
    sizes = {leaf.shape[0] for _, leaf in iterate_tensor_leaves(batch) if leaf.ndim}
    kept = max(1, min(sizes, default=0) // _CUT)
    small = pytree.tree_map_only(Tensor, lambda leaf: leaf[:kept] if leaf.ndim else leaf, batch)
    # A batch of a class that torch does not know stays unchanged.
    if (
        len(sizes) != 1
        or sizes == {kept}
        or {leaf.shape[0] for _, leaf in iterate_tensor_leaves(small) if leaf.ndim} != {kept}
    ):
        raise _NotComparable("it does not fit into memory in fp32, and the batch cannot be cut into samples")
    return attempt._replace(microbatches=[small]), kept


# -- the runs ---------------------------------------------------------------------------------------------------------


class _RunValues(NamedTuple):
    """What one run computed."""

    values: ModuleValues
    gradients: dict[str, Tensor | None]
    """Of the trained parameters by name, unscaled."""
    loss: float

    def is_matrix(self, name: str) -> bool:
        gradient = self.gradients[name]
        return gradient is not None and gradient.ndim > 1


class _ComparisonRuns:
    """The runs of one check; everything that they write is restored."""

    def __init__(
        self, model: nn.Module, attempt: StepInputs, precision: Precision, pair: Pair, include: Sequence[Any]
    ) -> None:
        self._model, self._attempt, self._precision, self._pair = model, attempt, precision, pair
        self._device = next(model.parameters()).device
        self._held = collect_held_tensors(model, attempt.loss_fn, attempt.microbatches)
        self._include = [model, *(module for _, module in self._held.modules), *include]

    def compare(self) -> tuple[list[Deviation], float]:
        """Return the deviations, and the loss scale at which gradients were finite."""
        wide = self._run(resolve_precision_name("fp32"), 1.0, reference=True)
        if not math.isfinite(wide.loss):
            raise _NotComparable(f"the loss is {wide.loss} in fp32, too")
        # Halved until what fp32 has seen would fit, so that the first run is finite in nearly all cases.
        factor = max((each.scale for each in self._attempt.factors.values()), default=1.0)
        largest = max((float(each) for each in wide.values.gradients), default=0.0)
        while factor > 1.0 and factor * largest > self._precision.computes.largest / 2:
            factor /= 2.0
        narrow = self._run(self._precision, factor)
        while factor > 1.0 and math.isfinite(narrow.loss) and not _are_all_finite(narrow.gradients):
            factor /= 2.0
            narrow = self._run(self._precision, factor)
        judge = _RunComparison(self._model, self._precision, wide, narrow, factor)
        found = judge.deviations()
        if has_compiled_code(self._model, self._attempt.loss_fn):
            left_out = narrow.values.left_out
            found += judge.compare_compiled(None if left_out else self._run(self._precision, factor, compiled=True))
        return found, factor

    def _run(
        self, precision: Precision, factor: float, *, reference: bool = False, compiled: bool = False
    ) -> _RunValues:
        model, attempt = self._model, self._attempt
        names = {id(parameter): strip_compile_wrappers(name) for name, parameter in model.named_parameters()}
        fits = sum(parameter.numel() for parameter in model.parameters()) <= MOST_COPIED
        kept = preserve_training_state(model, attempt, self._held, self._device, compiled=fits, include=self._include)
        own = {name: tensor for name, tensor in self._held.tensors.items() if name.startswith((HELD, ATTRIBUTE))}
        batch = [*attempt.microbatches, *(tensor for tensor in own.values() if tensor.numel() <= _LARGE)]
        values = ModuleValues(model, precision.computes, gradients=reference and self._precision.scaled)
        with preserve_batch(batch), kept, ExitStack() as active:
            active.enter_context(widen_trained_weights(model, precision))
            if reference:
                active.enter_context(
                    compute_as_plain_linear(module for module in model.modules() if is_converted(module))
                )
            active.enter_context(precision.scope(self._device))
            if not compiled:
                active.enter_context(run_eagerly())
                active.enter_context(values)
            # Last before the run, so that nothing else draws from them in between.
            attempt.restore_generators(self._device)
            config = ReplayConfig(precision, scale=factor, compiled=compiled)
            losses = run_microbatches(model, attempt, config, self._device, self._pair)
            named = [(strip_compile_wrappers(name), parameter) for name, parameter in model.named_parameters()]
            gradients = {name: parameter.grad for name, parameter in named}
            values.sums.compare_gradients(named)
        reached = [id(p) for reach in (attempt.reaches or {}).values() for p in reach.parameters]
        trained = {names[key]: gradients[names[key]] for key in reached if key in names}
        found = {name: None if g is None else g.to_dense() / factor for name, g in trained.items()}
        return _RunValues(values, found, sum(each.mean for each in losses.values()))


def _are_all_finite(gradients: Mapping[str, Tensor | None]) -> bool:
    flags = [gradient.isfinite().all() for gradient in gradients.values() if gradient is not None]
    return not flags or bool(torch.stack(flags).all())


# -- the judgment ----------------------------------------------------------------------------------------------------


class _GradientDistance(NamedTuple):
    """How two gradients of one parameter differ."""

    reference: float
    """The largest element of the first."""
    largest: float
    """The largest element of the second; NaN if there is one."""
    norm: float
    """The norm of the first."""
    relative: float
    """The norm of the difference, as a share of the first one's norm."""


class _RunComparison:
    """The comparison of two runs."""

    def __init__(
        self, model: nn.Module, precision: Precision, wide: _RunValues, narrow: _RunValues, factor: float
    ) -> None:
        self._formats = {
            strip_compile_wrappers(path): find_layer_format(m, precision.computes) for path, m in model.named_modules()
        }
        self._wide, self._narrow = wide, narrow
        converted = has_converted_layer(model)
        theirs = converted and not precision.changes_model
        self._name = f"{precision.name} with fp8 layers" if theirs else precision.name
        self._epsilon = max(format.epsilon for format in self._formats.values())
        self._compiled = list_compiled_modules(model)
        self._smallest = _UNDERFLOWS / factor if precision.scaled else 0.0
        self._distances = _measure_gradient_distances(wide.gradients, narrow.gradients)
        self._top = max((each.norm for each in self._distances.values()), default=0.0)
        self._choices = _find_other_choices(wide.values, narrow.values)
        # A subclass may compute something else, such as a masked product; in fp32 it does so, too.
        self._plain = {part: sums for part, sums in wide.values.sums.read().items() if sums.error < _PLAIN_LAYER}
        self._sums = {part: sums for part, sums in narrow.values.sums.read().items() if part in self._plain}

    def deviations(self) -> list[Deviation]:
        """Return refusals, or warnings if there is none."""
        layers = [found for part, sums in self._sums.items() if (found := self._judge_sums(part, sums)) is not None]
        first = [*self._find_nonfinite(), *layers, *self._find_lost_gradients()]
        by_id = {each.id: each for each in reversed(first)}
        refused = [each for each in first if each.severity == "error" and each is by_id[each.id]]
        # A layer that is off explains the distances after it.
        return refused or [each for each in first if each is by_id[each.id]] or self._find_far_output()

    def _find_nonfinite(self) -> list[Deviation]:
        wide, narrow = self._wide.values.largest(), self._narrow.values.largest()
        # Masks make -inf on purpose, and a mask in the format's range may become one.
        bad = [path for path, largest in narrow.items() if not largest < math.inf and wide.get(path, 0.0) < math.inf]
        lost = [n for n, d in self._distances.items() if not math.isfinite(d.largest) and math.isfinite(d.reference)]
        if bad:
            module, what = bad[0], f"the output of {_format_path(bad[0])}"
            figure, reference = narrow[module], f"up to {format_number(wide.get(module, math.nan))}"
        elif lost or not math.isfinite(self._narrow.loss):
            module, what = (_parse_module_path(lost[-1]), f"the gradient of {lost[-1]}") if lost else ("", "the loss")
            figure, reference = math.nan, "finite"
        else:
            return []
        text = f"{what} is not finite in {self._name}, and {reference} in fp32"
        return [Deviation(NOT_FINITE, "error", module, figure, text, _advise_fp32(module))]

    def _judge_sums(self, part: ComparedPart, sums: SumErrors) -> Deviation | None:
        """Judge numbers of a layer by the roundings of its format; a gradient of zeros is judged by its parameter."""
        path = _parse_module_path(part.name) if part.kind == PARAMETER else part.name
        format, id = self._formats[path], OUTPUT if part.kind == RESULT else GRADIENT
        severity: Severity = "warning"
        # Roundings add up like noise, until a sum is so long that it swallows its terms: then nothing bounds it.
        many = sums.roundings**0.5 if sums.roundings * format.epsilon < 1.0 else math.inf
        # tf32 and fp8 round inside of the kernel: their roundings are part of the error, and may be truncations.
        units = format.epsilon * (1.0 if format.dtype is not None else 3.0) * many
        limit = _SLOPE * units + 3 * sums.doubt if format.dtype is not None else _AT_MOST / 2
        fix = f"look for what computes it (a conversion, a hook, a stale copy, a kernel), or {_advise_fp32(path)}"
        if sums.zeros > _ZEROS:
            if part.kind == PARAMETER:
                return None
            id, figure, severity = ZEROS if part.kind == RESULT else NO_GRADIENT, sums.zeros, "error"
            text = f"{format_percent(figure)} of its products are zero, and not small in fp32"
            if part.kind == RESULT:
                fix = f"clip or scale its input: one outlier sets the scale of a whole tensor; {fix}"
        elif abs(sums.slope) > limit and sums.signal > 0.1:
            figure, text = sums.slope, f"its products are {1.0 + sums.slope:.4g} times those of fp32"
        elif sums.error > _ERROR * units:
            figure = sums.error
            text = (
                f"its results are {format_percent(figure)} from fp32's, and rounding explains {format_percent(units)}"
            )
        else:
            return None
        shown = {RESULT: _format_path(path), INPUT: f"the gradient that {_format_path(path)} returns"}
        what = shown.get(part.kind, f"the gradient of {part.name}")
        return Deviation(id, severity, path, figure, f"{what} in {self._name}: {text}", fix)

    def _find_lost_gradients(self) -> list[Deviation]:
        """Find parameters without a gradient, or with zeros only, where fp32 has more than rounding noise.

        The sums of absolute terms say what noise is; a parameter whose terms are not known is never refused.
        """
        refused, reported, small = list[str](), list[str](), list[str]()
        for name, distance in self._distances.items():
            part, none = ComparedPart(PARAMETER, name), self._narrow.gradients[name] is None
            if distance.largest == 0.0 < distance.reference:
                plain = self._plain.get(part)
                arrived = part in self._sums and self._sums[part].zeros > _ZEROS
                large = distance.norm > _SMALL * self._top
                if plain is not None and plain.signal < _SIGNAL:
                    continue
                if distance.reference < self._smallest:
                    small.append(name)
                elif plain is not None and (none or arrived or large):
                    refused.append(name)
                elif none or (large and self._wide.is_matrix(name)):
                    reported.append(name)
        fix = "look for what drops it (a conversion, detach, no_grad, a kernel), or {}"
        # An expert to which no token was sent has none either.
        found = [self._lost(refused, "warning" if self._choices else "error", fix)] if refused else []
        found += [self._lost(reported, "warning", fix)] if reported else []
        if small:
            fix = "precision='bf16', a larger init_scale, or {}"
            found.append(self._lost(small, "warning", fix)._replace(id=UNDERFLOW))
        return found

    def _lost(self, names: Sequence[str], severity: Severity, fix: str) -> Deviation:
        # Backward reaches the last one first: a gradient lost there is lost for those before it.
        name, more = names[-1], f" and {len(names) - 1} more" if len(names) > 1 else ""
        figure, module = self._distances[name].reference, _parse_module_path(name)
        kind = "no gradient" if self._narrow.gradients[name] is None else "a gradient of zeros only"
        text = f"{name}{more} has {kind} in {self._name}, and one up to {format_number(figure)} in fp32"
        text += f"; {self._choices[0]}" if self._choices else ""
        return Deviation(NO_GRADIENT, severity, module, figure, text, fix.format(_advise_fp32(module)))

    def _find_far_output(self) -> list[Deviation]:
        """Find the first output that is further from fp32 than the roundings of a deep model explain."""
        wide, narrow = self._wide.values, self._narrow.values
        same = [path for path in narrow.modules if path in wide.modules and _have_equal_shape(wide, narrow, path)]
        pairs = [(wide.modules[path].sample, narrow.modules[path].sample) for path in same]
        read = torch.stack([torch.stack([(a - b).norm(), a.norm()]) for a, b in pairs]).tolist() if pairs else []
        outputs = {path: off / size for path, (off, size) in zip(same, read, strict=True) if size > 0.0}
        path = next((p for p, off in outputs.items() if off > min(_AT_MOST, _OUTPUT * self._epsilon)), None)
        if path is None:
            return []
        what, off = f"the output of {_format_path(path)}", outputs[path]
        if self._choices:
            text = f"{self._choices[0]} between {self._name} and fp32, and {what} differs by {format_percent(off)}"
            fix = "nothing if these choices may differ; otherwise compute their inputs in fp32 with island()"
            return [Deviation(CHOICES, "warning", path, off, text, fix)]
        text = f"{what} is {format_percent(off)} from fp32's, more than roundings to {self._name} explain"
        return [Deviation(OUTPUT, "warning", path, off, text, _advise_fp32(path))]

    def _weights(self) -> list[str]:
        """Return the parameters whose gradients are compared: matrices; sums over all samples may cancel."""
        return [n for n, d in self._distances.items() if self._wide.is_matrix(n) and d.norm > _SMALL * self._top]

    def compare_compiled(self, ran: _RunValues | None) -> list[Deviation]:
        """Compare the compiled step with the eager one, in the same precision; None if it was not run."""
        if ran is None:
            text = "the compiled step was not compared with the eager one: their dropout masks differ"
            return [Deviation(NOT_CHECKED, "note", "", math.nan, text, "nothing")]
        far, least = _measure_gradient_distances(self._narrow.gradients, ran.gradients), _COMPILED * self._epsilon
        # Compiled code rounds at other places: as far from the eager code as that is from fp32, and not much further.
        off = [(far[n].relative / max(least, 4 * self._distances[n].relative), n) for n in self._weights() if n in far]
        inside = [
            each for each in off if each[0] > 1.0 and _parse_module_path(each[1]).startswith(tuple(self._compiled))
        ]
        excess, worst = max(inside or off, default=(0.0, ""))
        loss, size = abs(ran.loss - self._narrow.loss), abs(self._wide.loss) or 1.0
        usual = max(least * size, 4 * abs(self._narrow.loss - self._wide.loss))
        if excess <= 1.0 and loss <= usual:
            return []
        figure, what = (far[worst].relative, f"the gradient of {worst}") if excess > 1.0 else (loss / size, "the loss")
        text = f"{what} of the compiled step differs by {format_percent(figure)} from that of the eager one"
        fix = "leave torch.compile out (train.compile: false), or try another version of torch"
        return [Deviation(COMPILED, "warning", _parse_module_path(worst), figure, text, fix)]


def _have_equal_shape(wide: ModuleValues, narrow: ModuleValues, path: str) -> bool:
    return wide.modules[path].shape == narrow.modules[path].shape


def _find_other_choices(wide: ModuleValues, narrow: ModuleValues) -> list[str]:
    """Return discrete choices that differ, in words."""
    found = []
    for name in {**wide.choices, **narrow.choices}:
        ours, theirs = narrow.choices.get(name, []), wide.choices.get(name, [])
        total = sum(each.numel() for each in theirs)
        same = [a.shape for a in ours] == [b.shape for b in theirs]
        other = sum(int((a != b).sum()) for a, b in zip(ours, theirs, strict=True)) if same else total
        if other or not same:
            found.append(f"{other:,} of {total:,} choices of {name} differ")
    paths = {**wide.modules, **narrow.modules}
    moved = [
        p for p in paths if p not in wide.modules or p not in narrow.modules or not _have_equal_shape(wide, narrow, p)
    ]
    return found + [f"the numbers of elements that {_format_path(path)} is given differ" for path in moved]


def _measure_gradient_distances(
    reference: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]
) -> dict[str, _GradientDistance]:
    """Compare gradients; parameters without one in the reference are left out."""
    known = {name: gradient for name, gradient in reference.items() if gradient is not None and gradient.numel()}
    numbers = [_compute_distance(gradient.float(), other.get(name)) for name, gradient in known.items()]
    read = torch.stack(numbers).tolist() if numbers else []
    return {name: _GradientDistance(*four) for name, four in zip(known, read, strict=True)}


def _compute_distance(reference: Tensor, other: Tensor | None) -> Tensor:
    other = torch.zeros_like(reference) if other is None else other.float()
    size = reference.norm().clamp(min=1e-38)
    return torch.stack([reference.abs().amax(), other.abs().amax(), size, (other - reference).norm() / size])


def _parse_module_path(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _format_path(path: str) -> str:
    return path or "the model itself"


def _advise_fp32(module: str) -> str:
    return f"island(model, {module!r}), or precision='fp32'" if module else "precision='fp32'"
