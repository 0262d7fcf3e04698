"""The start check: one micro-batch in the run's precision and in fp32, on this device, before the first update.

Both runs have the same weights and random numbers, and nothing of them remains. Refused is what no rounding explains:
a parameter without a gradient, values that became zero, non-finite numbers that fp32 does not have. What is further
from fp32 than the format explains is a warning: discrete choices, such as routing, differ on healthy models too.
"""

from __future__ import annotations

import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from halfstep import distributed
from halfstep.errors import StartCheckFailed, in_one_line
from halfstep.finding import Finding, Severity
from halfstep.formats import FP32, Format
from halfstep.json_data import JsonResult
from halfstep.numbers import number, share
from halfstep.observe.module_values import ModuleValues, Product, as_plain, format_in, is_converted
from halfstep.observe.reachable import leaves
from halfstep.observe.recorder import as_written, compiled_modules, eagerly, uses_compiled
from halfstep.out_of_memory import is_too_large
from halfstep.precision.precision import Precision, precision_named
from halfstep.step.objective import Objective
from halfstep.step.rerun import (
    ATTRIBUTE,
    HELD,
    MOST_COPIED,
    ReplayConfig,
    batch_kept,
    holdings,
    run_microbatches,
    undisturbed,
)
from halfstep.step.step_inputs import StepInputs, set_generator_states

NO_GRADIENT, ZEROS, NOT_FINITE = "start.no_gradient", "start.zeros", "start.not_finite"
OUTPUT, GRADIENT, CHOICES, COMPILED = "start.output", "start.gradient", "start.choices", "start.compiled"
UNDERFLOW, NOT_CHECKED = "start.underflow", "start.not_checked"

_PRODUCT, _SLOPE = 0.75, 0.25
"""The largest error of a linear layer or convolution, and the largest share of its product that it may be off, in
units of the format's epsilon: rounding to nearest gives 0.2 and 0."""
_PLAIN_LAYER = 1e-3
"""The error in fp32 up to which a layer computes the product of its inputs and its weight, and nothing else."""
_OUTPUT, _GRADIENT, _COMPILED, _AT_MOST = 64, 256, 16, 0.5
"""Distances that the roundings of a deep model explain, in epsilons, and at most."""
_CALM = 8
"""The largest distance of an output, in epsilons, up to which gradients are compared."""
_ROUNDING, _COMPARED = 64 * FP32.epsilon, 1e-4
"""Shares of the largest gradient: below the first, fp32's may be rounding noise; below the second, none is compared."""
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
            return [Finding(NOT_CHECKED, "note", text, "nothing: the run goes on; train.check: false leaves it out")]
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

    `pair` matches losses with optimizers; `include` are objects beside the model that are restored too. An error in a
    run is no result: if it is the step's own, the step will raise it again.
    """
    if precision.computes.epsilon <= FP32.epsilon and not any(map(is_converted, model.modules())):
        return None
    begun, samples = time.perf_counter(), None
    try:
        _check_possible(model, attempt, ranks)
        attempt = attempt._replace(microbatches=attempt.microbatches[:1])
        try:
            deviations, factor = _Runs(model, attempt, precision, pair, include).compare()
        except Exception as error:
            if not is_too_large(error):
                raise
            traceback.clear_frames(error.__traceback__)
            attempt, samples = _cut(attempt)
            deviations, factor = _Runs(model, attempt, precision, pair, include).compare()
    except Exception as error:
        # The frames of the failed run hold its tensors, and the step needs the room.
        traceback.clear_frames(error.__traceback__)
        reason = str(error) if isinstance(error, _NotComparable) else in_one_line(error)
        return StartCheck(precision.name, reason, seconds=time.perf_counter() - begun)
    return StartCheck(precision.name, "", tuple(deviations), samples, factor, time.perf_counter() - begun)


class _NotComparable(Exception):
    """A reason why there is no result."""


def _check_possible(model: nn.Module, attempt: StepInputs, ranks: int) -> None:
    if attempt.loss_fn is None or not attempt.microbatches:
        raise _NotComparable("there is no loss function and batch to run again; step(loss_fn, batch) has them")
    if distributed.is_sharded(model.parameters()):
        raise _NotComparable("the model is under fully_shard, which gathers weights in the format of the run")
    if isinstance(model, DistributedDataParallel):
        raise _NotComparable("the model is in DistributedDataParallel, whose runs exchange gradients")
    if ranks > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise _NotComparable("SyncBatchNorm waits for all ranks, and one may have no room for fp32")


def _cut(attempt: StepInputs) -> tuple[StepInputs, int]:
    """Return the same step with the first samples of its batch."""
    batch = attempt.microbatches[0]
    sizes = {leaf.shape[0] for _, leaf in leaves(batch) if leaf.ndim}
    kept = max(1, min(sizes, default=0) // _CUT)
    small = pytree.tree_map_only(Tensor, lambda leaf: leaf[:kept] if leaf.ndim else leaf, batch)
    # A batch of a class that torch does not know stays as it was.
    if len(sizes) != 1 or sizes == {kept} or {leaf.shape[0] for _, leaf in leaves(small) if leaf.ndim} != {kept}:
        raise _NotComparable("it does not fit into memory in fp32, and the batch cannot be cut into samples")
    return attempt._replace(microbatches=[small]), kept


# -- the runs ---------------------------------------------------------------------------------------------------------


class _Ran(NamedTuple):
    """What one run computed."""

    values: ModuleValues
    gradients: dict[str, Tensor | None]
    """Of the trained parameters by name, unscaled."""
    loss: float


class _Runs:
    """The runs of one check; whatever they write is restored."""

    def __init__(
        self, model: nn.Module, attempt: StepInputs, precision: Precision, pair: Pair, include: Sequence[Any]
    ) -> None:
        self._model, self._attempt, self._precision, self._pair = model, attempt, precision, pair
        self._device = next(model.parameters()).device
        self._held = holdings(model, attempt.loss_fn, attempt.microbatches)
        self._include = [model, *(module for _, module in self._held.modules), *include]

    def compare(self) -> tuple[list[Deviation], float]:
        """Return the deviations, and the loss scale at which gradients were finite."""
        wide = self._run(precision_named("fp32"), 1.0, reference=True)
        if not math.isfinite(wide.loss):
            raise _NotComparable(f"the loss is {wide.loss} in fp32, too")
        # Halved until what fp32 has seen would fit, so that the first run is finite in nearly all cases.
        factor = max((each.scale for each in self._attempt.factors.values()), default=1.0)
        largest = max((float(each) for each in wide.values.gradients), default=0.0)
        while factor > 1.0 and factor * largest > self._precision.computes.largest / 2:
            factor /= 2.0
        narrow = self._run(self._precision, factor)
        while factor > 1.0 and math.isfinite(narrow.loss) and not _all_finite(narrow.gradients):
            factor /= 2.0
            narrow = self._run(self._precision, factor)
        judge = _Judge(self._model, self._precision, wide, narrow, factor)
        found = judge.deviations()
        if uses_compiled(self._model, self._attempt.loss_fn):
            left_out = narrow.values.left_out
            found += judge.compiled(None if left_out else self._run(self._precision, factor, compiled=True))
        return found, factor

    def _run(self, precision: Precision, factor: float, *, reference: bool = False, compiled: bool = False) -> _Ran:
        model, attempt = self._model, self._attempt
        names = {id(parameter): as_written(name) for name, parameter in model.named_parameters()}
        fits = sum(parameter.numel() for parameter in model.parameters()) <= MOST_COPIED
        kept = undisturbed(model, attempt, self._held, self._device, compiled=fits, include=self._include)
        own = {name: tensor for name, tensor in self._held.tensors.items() if name.startswith((HELD, ATTRIBUTE))}
        batch = [*attempt.microbatches, *(tensor for tensor in own.values() if tensor.numel() <= _LARGE)]
        values = ModuleValues(model, precision.computes, gradients=reference and self._precision.scaled)
        with batch_kept(batch), kept, _host_random_kept(), ExitStack() as active:
            if reference:
                active.enter_context(as_plain(model))
            active.enter_context(precision.scope(self._device))
            if not compiled:
                active.enter_context(eagerly())
                active.enter_context(values)
            # Last before the run, so that nothing else draws from them in between.
            set_generator_states(attempt.generators, self._device)
            for generator, state in attempt.own_generators:
                generator.set_state(state)
            config = ReplayConfig(precision, scale=factor, compiled=compiled)
            losses = run_microbatches(model, attempt, config, self._device, self._pair)
            gradients = {as_written(name): parameter.grad for name, parameter in model.named_parameters()}
        reached = [id(p) for reach in (attempt.reaches or {}).values() for p in reach.parameters]
        trained = {names[key]: gradients[names[key]] for key in reached if key in names}
        found = {name: None if g is None else g.to_dense() / factor for name, g in trained.items()}
        return _Ran(values, found, sum(each.mean for each in losses.values()))


def _all_finite(gradients: Mapping[str, Tensor | None]) -> bool:
    flags = [gradient.isfinite().all() for gradient in gradients.values() if gradient is not None]
    return not flags or bool(torch.stack(flags).all())


@contextmanager
def _host_random_kept() -> Iterator[None]:
    """Restore Python's and NumPy's generators, so that each run begins with the same states."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    its = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(its)


# -- the judgement ----------------------------------------------------------------------------------------------------


class _Distance(NamedTuple):
    """How two gradients of one parameter differ."""

    reference: float
    """The largest element of the first."""
    largest: float
    """The largest element of the second; NaN if there is one."""
    relative: float
    """The norm of the difference, as a share of the first one's norm."""
    slope: float
    """The part of the difference that is along the first: 1 if the second is twice as large."""

    @property
    def is_scaled(self) -> bool:
        """Whether the second is a multiple of the first, rather than the first with noise."""
        return abs(self.slope) > 0.8 * self.relative


class _Judge:
    """The comparison of two runs."""

    def __init__(self, model: nn.Module, precision: Precision, wide: _Ran, narrow: _Ran, factor: float) -> None:
        self._modules = {as_written(path): module for path, module in model.named_modules()}
        self._format, self._wide, self._narrow = precision.computes, wide, narrow
        converted = any(map(is_converted, model.modules()))
        self._name = f"{precision.name} with fp8 layers" if converted else precision.name
        self._epsilon = max(format_in(module, precision.computes).epsilon for module in model.modules())
        self._compiled = compiled_modules(model)
        self._smallest = _UNDERFLOWS / factor if precision.scaled else 0.0
        self._distances = _distances(wide.gradients, narrow.gradients)
        self._top = max((each.reference for each in self._distances.values()), default=0.0)
        self._choices = _other_choices(wide.values, narrow.values)

    def deviations(self) -> list[Deviation]:
        """Return refusals, or warnings if there is none."""
        products = self._products()
        first = [*self._not_finite(), *(each for each in products if each.id == ZEROS), *self._without_gradient()]
        refused = [each for each in first if each.severity == "error"]
        # A layer that is off explains what is far from fp32 after it.
        return refused or [*first, *products] or self._far()

    def _not_finite(self) -> list[Deviation]:
        wide, narrow = self._wide.values.largest(), self._narrow.values.largest()
        # Masks make -inf on purpose, and a mask in the format's range may become one.
        bad = [path for path, largest in narrow.items() if not largest < math.inf and wide.get(path, 0.0) < math.inf]
        lost = [n for n, d in self._distances.items() if not math.isfinite(d.largest) and math.isfinite(d.reference)]
        if bad:
            module, what = bad[0], f"the output of {_shown(bad[0])}"
            figure, reference = narrow[module], f"up to {number(wide.get(module, math.nan))}"
        elif lost or not math.isfinite(self._narrow.loss):
            module, what = (_module_of(lost[-1]), f"the gradient of {lost[-1]}") if lost else ("", "the loss")
            figure, reference = math.nan, "finite"
        else:
            return []
        text = f"{what} is not finite in {self._name}, and {reference} in fp32"
        return [Deviation(NOT_FINITE, "error", module, figure, text, _keep_wide(module))]

    def _without_gradient(self) -> list[Deviation]:
        """Find parameters without a gradient, or with zeros only, where fp32 has more than rounding noise."""
        least = _ROUNDING * self._top
        missing = [name for name, d in self._distances.items() if d.largest == 0.0 and d.reference > least]
        lost = [name for name in missing if self._distances[name].reference >= self._smallest]
        found = []
        if lost:
            # Backward reaches the last one first: what is lost there is lost for those before it.
            name, more = lost[-1], f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            figure, module = self._distances[name].reference, _module_of(name)
            kind = "no gradient" if self._narrow.gradients[name] is None else "a gradient of zeros only"
            text = f"{name}{more} has {kind} in {self._name}, and one up to {number(figure)} in fp32"
            text += f"; {self._choices[0]}" if self._choices else ""
            fix = f"look for what drops it (a conversion, detach, no_grad, a kernel), or {_keep_wide(module)}"
            # An expert to which no token was sent has none either.
            found.append(Deviation(NO_GRADIENT, "warning" if self._choices else "error", module, figure, text, fix))
        if len(missing) > len(lost):
            name = next(name for name in reversed(missing) if name not in lost)
            figure, module = self._distances[name].reference, _module_of(name)
            text = f"the gradient of {name} is zero in {self._name} by underflow, and up to {number(figure)} in fp32"
            fix = f"precision='bf16', a larger init_scale, or {_keep_wide(module)}"
            found.append(Deviation(UNDERFLOW, "warning", module, figure, text, fix))
        return found

    def _products(self) -> list[Deviation]:
        """Find linear layers and convolutions whose results are not the products of what they were given."""
        plain, found = self._wide.values.products(), dict[str, Deviation]()
        for path, product in self._narrow.values.products().items():
            # A subclass may compute something else, such as a masked product; in fp32 it does so, too.
            if path in plain and plain[path].error < _PLAIN_LAYER:
                judged = self._judge_product(path, product, format_in(self._modules[path], self._format))
                if judged is not None:
                    found.setdefault(judged.id, judged)
        return list(found.values())

    def _judge_product(self, path: str, product: Product, format: Format) -> Deviation | None:
        # tf32 and fp8 round inside of the kernel: their roundings are part of the error, and may be truncations.
        units = format.epsilon * (1.0 if format.dtype is not None else 3.0)
        limit = _SLOPE * units + 3 * product.doubt if format.dtype is not None else _AT_MOST / 2
        fix = f"look for what computes it (a conversion, a hook, a stale copy, a kernel), or {_keep_wide(path)}"
        severity: Severity = "warning"
        if product.zeros > _ZEROS:
            id, figure, severity = ZEROS, product.zeros, "error"
            text = f"{share(figure)} of its products are zero, and not small in fp32"
            fix = f"clip or scale what it is given: one outlier sets the scale of a whole tensor; {fix}"
        elif abs(product.slope) > limit:
            id, figure = OUTPUT, product.slope
            text = f"its products are {1.0 + figure:.4g} times those of fp32"
        elif product.error > _PRODUCT * units:
            id, figure = OUTPUT, product.error
            text = f"its results are {share(figure)} from fp32's, where roundings explain {share(units)}"
        else:
            return None
        return Deviation(id, severity, path, figure, f"{_shown(path)} in {self._name}: {text}", fix)

    def _far(self) -> list[Deviation]:
        """Find the first output, and the weight gradient, that are further from fp32 than the format explains."""
        epsilon, far = self._epsilon, list[tuple[str, str, str, float]]()
        outputs = _output_distances(self._wide.values, self._narrow.values)
        for path, relative in outputs.items():
            if relative > min(_AT_MOST, _OUTPUT * epsilon):
                far.append((OUTPUT, path, f"the output of {_shown(path)}", relative))
                break
        # Noise alone is no sign, nor is a gradient where forward amplifies roundings: batch normalization over few
        # samples makes both larger than the gradient itself in bf16.
        calm = max(outputs.values(), default=0.0) <= _CALM * epsilon
        scaled = [name for name in self._weights() if calm and self._distances[name].is_scaled]
        worst = max(scaled, key=lambda name: self._distances[name].relative, default="")
        if worst and self._distances[worst].relative > min(_AT_MOST, _GRADIENT * epsilon):
            far.append((GRADIENT, _module_of(worst), f"the gradient of {worst}", self._distances[worst].relative))
        if far and self._choices:
            _, path, what, relative = far[0]
            text = f"{self._choices[0]} between {self._name} and fp32, and {what} differs by {share(relative)}"
            fix = "nothing if these choices may be free; else compute what decides them in fp32 with island()"
            return [Deviation(CHOICES, "warning", path, relative, text, fix)]
        end = f"from fp32's, more than roundings to {self._name} explain"
        return [
            Deviation(id, "warning", path, relative, f"{what} is {share(relative)} {end}", _keep_wide(path))
            for id, path, what, relative in far
        ]

    def _weights(self) -> list[str]:
        """Return the parameters whose gradients are compared: matrices; sums over all samples may cancel."""
        known = {name for name, gradient in self._wide.gradients.items() if gradient is not None and gradient.ndim > 1}
        return [name for name, d in self._distances.items() if name in known and d.reference > _COMPARED * self._top]

    def compiled(self, ran: _Ran | None) -> list[Deviation]:
        """Compare the compiled step with the eager one, in the same precision; None if it was not run."""
        if ran is None:
            text = "the compiled step was not compared with the eager one: their dropout masks differ"
            return [Deviation(NOT_CHECKED, "note", "", math.nan, text, "nothing")]
        far, least = _distances(self._narrow.gradients, ran.gradients), _COMPILED * self._epsilon
        # Compiled code rounds at other places: as far from the eager code as that is from fp32, and not much further.
        off = [(far[n].relative / max(least, 4 * self._distances[n].relative), n) for n in self._weights() if n in far]
        inside = [each for each in off if each[0] > 1.0 and _module_of(each[1]).startswith(tuple(self._compiled))]
        excess, worst = max(inside or off, default=(0.0, ""))
        loss, size = abs(ran.loss - self._narrow.loss), abs(self._wide.loss) or 1.0
        usual = max(least * size, 4 * abs(self._narrow.loss - self._wide.loss))
        if excess <= 1.0 and loss <= usual:
            return []
        figure, what = (far[worst].relative, f"the gradient of {worst}") if excess > 1.0 else (loss / size, "the loss")
        text = f"{what} of the compiled step differs by {share(figure)} from that of the eager one"
        fix = "leave torch.compile out (train.compile: false), or try another version of torch"
        return [Deviation(COMPILED, "warning", _module_of(worst), figure, text, fix)]


def _output_distances(wide: ModuleValues, narrow: ModuleValues) -> dict[str, float]:
    same = [path for path in narrow.modules if path in wide.modules and _alike(wide, narrow, path)]
    pairs = [(wide.modules[path].sample, narrow.modules[path].sample) for path in same]
    read = torch.stack([torch.stack([(a - b).norm(), a.norm()]) for a, b in pairs]).tolist() if pairs else []
    return {path: off / size for path, (off, size) in zip(same, read, strict=True) if size > 0.0}


def _alike(wide: ModuleValues, narrow: ModuleValues, path: str) -> bool:
    return wide.modules[path].shape == narrow.modules[path].shape


def _other_choices(wide: ModuleValues, narrow: ModuleValues) -> list[str]:
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
    moved = [p for p in paths if p not in wide.modules or p not in narrow.modules or not _alike(wide, narrow, p)]
    return found + [f"the numbers of elements that {_shown(path)} is given differ" for path in moved]


def _distances(reference: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> dict[str, _Distance]:
    """Compare gradients; parameters without one in the reference are left out."""
    known = {name: gradient for name, gradient in reference.items() if gradient is not None and gradient.numel()}
    numbers = [_numbers(gradient.float(), other.get(name)) for name, gradient in known.items()]
    read = torch.stack(numbers).tolist() if numbers else []
    return {name: _Distance(*four) for name, four in zip(known, read, strict=True)}


def _numbers(reference: Tensor, other: Tensor | None) -> Tensor:
    other = torch.zeros_like(reference) if other is None else other.float()
    size = reference.norm().clamp(min=1e-38)
    slope = (reference / size * ((other - reference) / size)).sum()
    return torch.stack([reference.abs().amax(), other.abs().amax(), (other - reference).norm() / size, slope])


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _shown(path: str) -> str:
    return path or "the model itself"


def _keep_wide(module: str) -> str:
    return f"island(model, {module!r}), or precision='fp32'" if module else "precision='fp32'"
