"""Rerun a step on all ranks together and share the outcome, so that all ranks make the same decision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from halfstep import distributed
from halfstep.formats import BF16, FORMATS, FP16, FP32
from halfstep.guard.verdict import Culprit, ProposedRemedy
from halfstep.numbers import format_number
from halfstep.observe.nonfinite_origin import CONSTANT, MINUS_INF, NAN, OTHERS, NonfiniteSource, OperationInput
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.hardware import describe_device, find_format_support
from halfstep.precision.island import make_temporary_function_islands, widen_outputs
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.step.experiment.rerun import (
    ON_GRADIENTS,
    OtherWeights,
    ReplayConfig,
    RerunResult,
    preserve_batch,
    rerun_step,
)
from halfstep.step.step_inputs import StepInputs
from halfstep.user_code import find_functions

COUNTS_NOTHING = "counts no element: its Counted(sum, count) has a count of 0"


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of one rerun, on one rank or over all ranks."""

    finite: bool
    loss: float
    grad_norm: float
    culprit: Culprit | None = None
    effect: str = ""
    """The effect of the origin, in words."""
    undefined: bool = False
    """Whether the operation is undefined in any format, as a division by zero is."""
    bad_parameters: tuple[str, ...] = ()
    error: str = ""
    """Why the rerun failed, for example for lack of memory."""
    rank: int = 0
    """The rank that the origin is from."""
    weight: float = 1.0
    """The weight of this rank's loss relative to other ranks."""
    bad_buffers: tuple[str, ...] = ()
    norm_too_large: bool = False
    loss_too_large: bool = False


class Trials:
    """The reruns of one step. `written`: the step writes to its batch, which is restored after each rerun.

    `most` is the maximum number of reruns, or None.
    """

    def __init__(
        self, model: nn.Module, attempt: StepInputs, *, written: bool = False, most: int | None = None
    ) -> None:
        self.model, self.attempt, self.written, self.most = model, attempt, written, most
        self.made = 0

    @property
    def few_left(self) -> bool:
        """Return whether reruns are limited, so that those which only confirm are left out."""
        return self.most is not None

    def run(
        self,
        config: ReplayConfig,
        attempt: StepInputs | None = None,
        weights: OtherWeights = (),
        change: AbstractContextManager[None] | None = None,
    ) -> TrialOutcome:
        """Rerun the step with this configuration on all ranks, and return the common outcome.

        `weights` are those from before the last update, to rerun the step with. `change` changes the user's functions
        or the model's output during the rerun.
        """
        # All ranks count the same, so none of them waits in the exchange below for one that has stopped.
        if self.most is not None and self.made >= self.most:
            return _build_failed_outcome(f"a model of this size is rerun at most {self.most} times")
        self.made += 1
        mine = self._run_trial(config, attempt or self.attempt, weights, change or nullcontext())
        return _combine_outcomes(
            [_parse_outcome(json.loads(text)) for text in distributed.gather_texts(json.dumps(asdict(mine)))]
        )

    def _run_trial(
        self, config: ReplayConfig, attempt: StepInputs, weights: OtherWeights, change: AbstractContextManager[None]
    ) -> TrialOutcome:
        try:
            with preserve_batch(attempt.microbatches if self.written else ()), change:
                ran = self._rerun_watched(config, attempt, weights)
        except Exception as error:
            # fp32 may need more memory than there is, and a loss function may not support a second call. The outcome is
            # shared either way: the other ranks wait for it.
            said = str(error).partition("\n")[0]
            return _build_failed_outcome(f"{type(error).__name__}: {said}" if said else type(error).__name__)
        return _build_outcome(ran)

    def _rerun_watched(self, config: ReplayConfig, attempt: StepInputs, weights: OtherWeights) -> RerunResult:
        try:
            return rerun_step(self.model, attempt, config, weights)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError):
            # An operator such as torch.cond may not support being observed, or running without Dynamo. Whether the step
            # is finite can still be determined.
            return rerun_step(self.model, attempt, replace(config, compiled=True), weights)


def build_culprit(made: NonfiniteSource) -> Culprit:
    """Return the origin of non-finite values as plain data."""
    return Culprit(
        made.name,
        made.module,
        made.backward,
        made.line,
        made.format,
        tuple(sorted(made.kinds)),
        max((given.largest for given in made.given), default=0.0),
        made.in_fp32,
        find_format_limit(made.format),
        made.outside,
        made.forward,
        _classify_divisor(made),
    )


def _classify_divisor(made: NonfiniteSource) -> Literal["", "number", "signed", "count"]:
    if len(made.operands) < 2:
        return ""
    second = made.operands[1]
    if second.is_number or second.has_negative:
        return "number" if second.is_number else "signed"
    return "count" if second.format.startswith("int") else ""


def _build_outcome(ran: RerunResult) -> TrialOutcome:
    found = TrialOutcome(
        ran.finite,
        ran.loss,
        ran.grad_norm,
        effect=_describe_sum_overflow(ran),
        bad_parameters=ran.bad_parameters,
        rank=distributed.rank(),
        weight=ran.weight,
        bad_buffers=ran.bad_buffers,
        norm_too_large=ran.norm_too_large,
        loss_too_large=ran.loss_too_large,
    )
    if ran.origin is None:
        return found
    return replace(
        found,
        culprit=build_culprit(ran.origin),
        effect=describe_effect(ran.origin),
        undefined=has_undefined_result(ran.origin),
    )


def _describe_sum_overflow(ran: RerunResult) -> str:
    """Return what happened if no operation made a non-finite value: their sum overflows."""
    limit = f"more than fp32's largest number, {format_number(FP32.largest)}"
    if ran.loss_too_large:
        return f"is {limit}"
    return f"is {format_number(ran.grad_norm)}, whose square is {limit}" if ran.norm_too_large else ""


def _build_failed_outcome(why: str) -> TrialOutcome:
    return TrialOutcome(False, math.nan, math.nan, error=why, rank=distributed.rank())


def _parse_outcome(plain: Mapping[str, Any]) -> TrialOutcome:
    culprit = plain["culprit"]
    return TrialOutcome(
        **{
            **plain,
            "culprit": None if culprit is None else Culprit.from_dict(culprit),
            "bad_parameters": tuple(plain["bad_parameters"]),
            "bad_buffers": tuple(plain["bad_buffers"]),
        }
    )


def _combine_outcomes(outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
    """Combine the outcomes of all ranks; the first rank with an origin decides, forward before backward."""
    bad = [outcome for outcome in outcomes if not outcome.finite] or outcomes
    weight = sum(outcome.weight for outcome in outcomes)
    found = replace(
        min(bad, key=_build_outcome_order),
        loss=sum(outcome.loss * outcome.weight for outcome in outcomes if outcome.weight) / (weight or math.nan),
        grad_norm=max(outcome.grad_norm for outcome in outcomes),
        error=next((outcome.error for outcome in outcomes if outcome.error), ""),
        weight=weight,
    )
    if weight or found.culprit is not None:
        return found
    return replace(found, finite=False, effect=COUNTS_NOTHING, undefined=True)


def _build_outcome_order(outcome: TrialOutcome) -> tuple[bool, bool, bool]:
    """Return the sort key of an outcome; ranks that received bad values from another know less than that one."""
    culprit = outcome.culprit
    received = culprit is not None and culprit.outside in (CONSTANT, OTHERS)
    return culprit is None, received, culprit is not None and culprit.backward


_MODULES = 3
"""The number of enclosing modules that are tried, with the origin's own."""


def try_precision_remedies(
    trials: Trials, precision: Precision, culprit: Culprit | None, fp32: TrialOutcome, scale: float | None = 1.0
) -> tuple[ProposedRemedy, ...]:
    """Return the remedies for a step that fails in `precision` and not in fp32; `scale` None means the step's own."""
    tried = _try_islands(trials, precision, culprit, scale)
    if precision.computes is FP16:
        tried += _try_bf16(trials)
    tried.append(ProposedRemedy("precision", "fp32", None if fp32.error else True))
    tried += _try_loss_changes(trials, precision, culprit, scale)
    # Stable: the smallest change stays first among those that work.
    return tuple(sorted(tried, key=lambda remedy: not remedy.works))


def list_island_candidates(model: nn.Module, module: str) -> list[str]:
    """Return the module and those that enclose it, without the model itself: that would be another precision."""
    found: list[str] = []
    while module and module not in (OUTSIDE, ON_GRADIENTS) and len(found) < _MODULES:
        found.append(module)
        module = module.rpartition(".")[0]
    # A list of modules has no forward, so an island around it would have no effect.
    return [path for path in found if not isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict))]


def _try_islands(
    trials: Trials, precision: Precision, culprit: Culprit | None, scale: float | None
) -> list[ProposedRemedy]:
    """Try islands up to the first that works; enclosing ones would work too, but are larger."""
    tried: list[ProposedRemedy] = []
    for path in list_island_candidates(trials.model, culprit.module) if culprit is not None else ():
        outcome = trials.run(ReplayConfig(precision, islands=(path,), scale=scale))
        tried.append(ProposedRemedy("island", path, None if outcome.error else outcome.finite))
        if outcome.finite:
            break
    return tried


MODEL_OUTPUT = "model(x).float()"
"""The change of a loss function that has no finite result from what a model returns in 16 bits."""


def _try_loss_changes(
    trials: Trials, precision: Precision, culprit: Culprit | None, scale: float | None
) -> list[ProposedRemedy]:
    """Try an island around the function of an origin that is in no module, then a model whose output is fp32."""
    if culprit is None or culprit.outside is not None or culprit.module not in ("", OUTSIDE) or culprit.backward:
        return []
    tried: list[ProposedRemedy] = []
    config = ReplayConfig(precision, scale=scale)
    functions = find_functions(culprit.line or "")
    # All ranks make the same reruns.
    name = min(distributed.gather_texts(functions[0].__name__ if functions else ""))
    if name:
        outcome = trials.run(config, change=make_temporary_function_islands(trials.model, *functions))
        if outcome.finite:
            return [ProposedRemedy("island_function", name, True)]
        # It may call the model, so that an island around it would be another precision.
        tried += [] if outcome.error else [ProposedRemedy("island_function", name, False)]
    if culprit.module == OUTSIDE and (tried or culprit.in_fp32 is None):
        outcome = trials.run(config, change=widen_outputs(trials.model))
        tried += [] if outcome.error else [ProposedRemedy("float_output", MODEL_OUTPUT, outcome.finite)]
    return tried


def _try_bf16(trials: Trials) -> list[ProposedRemedy]:
    device = next(trials.model.parameters()).device
    # If bf16 is only emulated on this device, a run that asks for it gets another precision.
    if not find_format_support(describe_device(device), BF16.name).native:
        return []
    outcome = trials.run(ReplayConfig(resolve_precision_name("bf16"), scale=1.0))
    return [ProposedRemedy("precision", "bf16", None if outcome.error else outcome.finite)]


_BY_THE_SECOND = ("div", "remainder", "fmod", "true_divide", "floor_divide")
_BY_THE_FIRST = ("reciprocal", "rsqrt")
_LOGS = ("log", "log2", "log10", "log1p", "xlogy")
_EDGES = ("logit", "atanh", "acosh", "acos", "asin", "erfinv", "lgamma", "digamma", "polygamma")
"""Functions that are defined only between two numbers, or not at some."""
_ROOTS = ("sqrt", "rsqrt", "pow")
_SPREADS = ("std", "var", "std_mean", "var_mean")
_SQUARE_FITS = 1e15
"""The limit up to which squares add up to something finite in fp32."""
_SOFT = ("softmax", "attention")
_AVERAGES = ("mean", "var", "std", "nll_loss", "mse_loss", "batch_norm", "layer_norm", "div")


def describe_effect(made: NonfiniteSource) -> str:
    """Return the effect of an operation, as the predicate of a sentence whose subject is its name."""
    if made.outside is not None:
        return f"holds {_format_kinds(made)} before the first operation"
    return (
        _describe_overflow(made) or _describe_zero_argument(made) or _describe_undefined(made) or _describe_other(made)
    )


def find_format_limit(format: str) -> float:
    """Return the largest number of a format; fp32's for an unknown one."""
    return FORMATS.get(format, FP32).largest


def has_undefined_result(made: NonfiniteSource) -> bool:
    """Return whether neither smaller weights nor wider formats help, since the code asks for an undefined result."""
    return (
        made.outside is None
        and not _describe_overflow(made)
        and bool(_describe_zero_argument(made) or _describe_undefined(made))
    )


def _describe_overflow(made: NonfiniteSource) -> str:
    """Return how far the result exceeds its format, if fp32 can hold it."""
    limit = find_format_limit(made.format)
    if made.in_fp32 is None or limit >= FP32.largest:
        return ""
    if made.in_fp32 > limit:
        return f"produces {format_number(made.in_fp32)}, beyond {made.format}'s maximum of {format_number(limit)}"
    return f"makes {_format_kinds(made)} in {made.format}, and fp32 makes {format_number(made.in_fp32)}"


def _describe_zero_argument(made: NonfiniteSource) -> str:
    name, given = made.name.rpartition(".")[2].strip("_").removesuffix("_backward"), made.given
    if made.on_purpose or (any(word in name for word in _SOFT) and any(MINUS_INF in each.kinds for each in given)):
        return "is over a row that is all -inf"
    if any(each.kinds for each in made.operands) and not any(each.kinds for each in given):
        return f"is given {' and '.join(sorted(made.operands[-1].kinds))} by the code"
    if made.selects_nothing:
        return "averages over nothing: every label is ignored, or has weight 0"
    if name in _LOGS and given:
        return "takes the logarithm of a negative number" if NAN in made.kinds else "takes the logarithm of 0"
    if name in _ROOTS and NAN in made.kinds and made.operands and made.operands[0].has_negative:
        return "takes the root of a negative number"
    if name in _EDGES and given:
        return f"is undefined for its inputs, numbers up to {format_number(_find_largest_input(made))}"
    if _divides_by_zero(name, made.operands):
        return "divides by zero"
    if _has_too_few_elements(name, made):
        return "averages over nothing"
    # Infinities that were put there on purpose, as by a mask, and that no operation removed.
    hidden = sorted({kind for each in given for kind in each.kinds})
    return f"makes {_format_kinds(made)} of the {' and '.join(hidden)} that a mask put there" if hidden else ""


def _describe_undefined(made: NonfiniteSource) -> str:
    """Return the case that fp64 fails as well although the inputs are not large: it is not a matter of range."""
    # An in-place operation has overwritten its input, so it cannot be repeated in fp64.
    judged = made.format in FORMATS and not made.name.endswith("_") and made.in_fp64 is None
    if not judged or _find_largest_input(made) > _SQUARE_FITS or NAN not in made.kinds:
        return ""
    return (
        f"makes {_format_kinds(made)} out of numbers up to {format_number(_find_largest_input(made))}, in every format"
    )


def _divides_by_zero(name: str, operands: tuple[OperationInput, ...]) -> bool:
    first, second = (*operands, None, None)[:2]
    if name in _BY_THE_FIRST:
        return first is not None and first.has_zero
    if first is None or second is None:
        return False
    return second.has_zero if name in _BY_THE_SECOND else name == "pow" and first.has_zero and second.has_negative


def _has_too_few_elements(name: str, made: NonfiniteSource) -> bool:
    """Return whether there was no element to average, or only one for a spread."""
    if name in _SPREADS and NAN in made.kinds:
        return _find_largest_input(made) < _SQUARE_FITS
    return any(word in name for word in _AVERAGES) and any(0 in each.shape for each in made.given[:1])


def _describe_other(made: NonfiniteSource) -> str:
    if NAN in made.kinds:
        return (
            f"makes {_format_kinds(made)} in {made.format} out of numbers up to "
            f"{format_number(_find_largest_input(made))}"
        )
    format = made.format if made.format in FORMATS else FP32.name
    return f"overflows {format} (its largest number is {format_number(find_format_limit(format))})"


def _find_largest_input(made: NonfiniteSource) -> float:
    return max((each.largest for each in made.given), default=0.0)


def _format_kinds(made: NonfiniteSource) -> str:
    return " and ".join(sorted(made.kinds)) or "nothing finite"
