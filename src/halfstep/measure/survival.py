"""Predict from one emulated step whether a model survives fp16, bf16, fp8 or nvfp4, without the hardware."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse, build_unknown_name_error
from halfstep.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, widest_dtype
from halfstep.guard.diagnosis.trials import list_island_candidates
from halfstep.measure.batches import map_tensors
from halfstep.measure.batches import move_batch as placed_batch
from halfstep.measure.case import SEED, Case, LossFunction
from halfstep.measure.subject import Measurable, Settings, resolve_subject
from halfstep.measure.survival_report import (
    LostGradient,
    Survival,
    build_module_ranges,
    describe_overflow,
    name_event_module,
    name_module,
    suggest_survival_remedies,
)
from halfstep.observe.emulate import (
    BACKWARD,
    NVFP4,
    BlockRounder,
    FormatEmulator,
    ModuleRanges,
    OperandRounder,
    OutputRounder,
    OverflowEvent,
    compute_full_range_factor,
)
from halfstep.observe.reachable import find_generators
from halfstep.observe.recorder import Recorder, run_eagerly
from halfstep.precision import flags
from halfstep.precision.hardware import describe_device
from halfstep.precision.island import island
from halfstep.precision.precision import widen
from halfstep.random_state import use_seeded_generators
from halfstep.step.loss import Counted, DynamicScale, split_loss_and_aux

Gradients = dict[str, Tensor]


class StepOutcome:
    """The loss, the gradients and the ranges of one step, however it ran."""

    loss: float
    gradients: Gradients | None

    @property
    def ranges(self) -> ModuleRanges | None:
        """Return the ranges of the values in the format; None if nothing was rounded."""
        raise NotImplementedError

    @property
    def gradients_finite(self) -> bool:
        """Return whether backward was reached and every gradient is finite."""
        return self.gradients is not None and all(bool(g.isfinite().all()) for g in self.gradients.values())

    @property
    def fits(self) -> bool:
        """Return whether nothing overflowed in forward and the loss and all gradients are finite."""
        overflowed = self.ranges is not None and self.ranges.first_on_the_way_forward is not None
        return not overflowed and math.isfinite(self.loss) and self.gradients_finite


StepResult = TypeVar("StepResult", bound=StepOutcome)


@dataclass(frozen=True)
class EmulatedStep(StepOutcome):
    """The result of one step."""

    rounding: FormatEmulator | None
    loss: float
    gradients: Gradients
    """Gradients of the parameters, already divided by the loss scale."""
    scale: float

    @property
    def ranges(self) -> ModuleRanges | None:
        """Return the ranges that the rounding recorded."""
        return None if self.rounding is None else self.rounding.ranges


def run_emulated_step(
    case: Case,
    device: torch.device,
    rounding: FormatEmulator | None,
    *,
    scale: float = 1.0,
    islands: tuple[str, ...] = (),
) -> EmulatedStep:
    """Run the step in the format that `rounding` emulates, or in strict fp32 if None.

    It runs on copies: the case's model and batch, and the random state, are left unchanged.
    """
    with make_step_reproducible(case, device), ExitStack() as active:
        # Inside: a model may be built again when it is copied.
        model, batch = copy_case(case, device)
        if islands:
            island(model, *islands)
        if rounding is not None:
            active.enter_context(disable_onednn_for_recurrent(model))
            active.enter_context(Recorder(model, rounding, rounding.run))
        with torch.autocast(device.type, dtype=rounding.carrier) if rounding else ExitStack():
            loss = resolve_scalar_loss(case.loss_fn(model, batch))
        # Outside autocast, as torch documents it: backward uses the dtypes that autocast chose in forward.
        (loss * scale).backward()
    return EmulatedStep(rounding, loss.item(), collect_gradients(model, device, scale), scale)


def copy_case(case: Case, device: torch.device) -> tuple[nn.Module, Any]:
    """Return copies of the case's model, without gradients, and of its batch on the device."""
    model = copy.deepcopy(case.model).to(device)
    model.zero_grad(set_to_none=True)
    # Cloned, because a loss function may write to its batch.
    return model, map_tensors(placed_batch(case.batch, device), Tensor.clone)


def collect_gradients(model: nn.Module, device: torch.device, scale: float) -> Gradients:
    """Return the gradients by parameter, divided by the loss scale, as dense tensors."""
    # In fp64 where the device has it, so that dividing by the scale loses nothing.
    return {
        name: _convert_to_dense(parameter.grad.detach()).to(widest_dtype(device)) / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _convert_to_dense(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense tensor; nn.Embedding(sparse=True) has sparse ones."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def run_at_finite_scale(run: Callable[[float], StepResult]) -> StepResult:
    """Run a step at the first loss scale at which all gradients are finite, as a training run would find it.

    If there is none, return the outcome at the smallest scale.
    """
    scale = DynamicScale()
    while True:
        outcome = run(scale.value)
        # A non-finite loss is non-finite at every scale.
        if outcome.gradients_finite or not math.isfinite(outcome.loss) or not scale.can_fall:
            return outcome
        scale.update(overflow=True)


@contextmanager
def disable_onednn_for_recurrent(model: nn.Module) -> Iterator[None]:
    """Disable oneDNN for recurrent models: its kernel for a whole layer hides the values of each time step."""
    # The private pair: `torch.backends.mkldnn.flags` would also set oneDNN's other flags.
    before = torch._C._get_mkldnn_enabled()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def make_step_reproducible(case: Case, device: torch.device) -> Iterator[None]:
    """Run with fixed random numbers, strict fp32 and no compilation; restore all of it afterwards.

    Generators that the loss function or the batch holds start from their current state each time. Those of the model
    are copied with it.
    """
    held = find_generators(case.loss_fn, case.batch)
    with use_seeded_generators(SEED, device, held), flags.create_fp32_scope("ieee", device), run_eagerly():
        yield


def resolve_scalar_loss(given: Any) -> Tensor:
    """Return the scalar loss from any supported return value of a loss function.

    Raises `WrongUse` if it is not a scalar tensor with a graph, a `Counted`, an `Out` or a dict of those.
    """
    given, _ = split_loss_and_aux(given)
    if isinstance(given, dict) and given:
        return torch.stack([resolve_scalar_loss(part) for part in given.values()]).sum()
    if isinstance(given, Counted):
        return resolve_scalar_loss(given.sum).div(given.count)
    if isinstance(given, Tensor) and given.ndim == 0 and given.requires_grad:
        return widen(given)
    what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise WrongUse(
        f"{what} as the loss",
        allowed="a scalar tensor with a graph behind it, Counted(sum, count), Out(loss), or a dict of those",
        do="return loss.mean(), and call the model outside torch.no_grad()",
    )


MakeEmulator = Callable[[], FormatEmulator]

# fp8 training uses e4m3 in forward, where precision matters, and e5m2 for gradients, where range matters.
_FP8 = {
    "fp8_e4m3": partial(OperandRounder, FP8_E4M3, FP8_E5M2),
    "fp8_e5m2": partial(OperandRounder, FP8_E5M2, FP8_E5M2),
}
_ROUNDINGS: dict[str, MakeEmulator] = {
    "fp16": partial(OutputRounder, FP16),
    "bf16": partial(OutputRounder, BF16),
    **_FP8,
    NVFP4.name: BlockRounder,
}
FORMAT_NAMES = tuple(_ROUNDINGS)
TOLERATED_LOSS = 0.1
"""Share of the norm of the gradients that may vanish; above it the model does not learn what it would in fp32."""
TOLERATED_ERROR, TIMES_BF16 = 0.5, 3.0
"""Limits of the relative gradient error: absolute, and as a multiple of bf16's. A step fails above both.
"""
_SCALE_EACH = "train in fp8 with a scale for each tensor, as torchao and Transformer Engine do"
_MOST_NAMED = 5
# Documented by torch as autocast to fp32 on CUDA; CPU autocast leaves most of them in 16 bits.
_FP32_ON_CUDA = {"sum", "pow", "exp", "cumsum", "prod", "norm", "rsqrt", "reciprocal", "log", "_softmax"}


def survival(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    settings: Settings = (),
    format_name: str = "fp16",
    device: torch.device | str | None = None,
) -> Survival:
    """Check whether one step survives a number format, and find a remedy.

    Several steps run on copies of the model with the same random numbers: in strict fp32, in the format, and with each
    remedy before it is recommended. The model, the batch and the random state stay unchanged.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, for a model.
        settings: Settings that change the recipe.
        format_name: The number format, such as "fp16".
        device: The device; by default the best of this machine.

    Returns:
        Whether the step survives, and the remedy.

    Raises:
        WrongUse: The format is unknown, or a model has no loss function.
    """
    if format_name not in _ROUNDINGS:
        raise build_unknown_name_error("format", format_name, FORMAT_NAMES)
    judged = _SurvivalCheck(
        resolve_subject(subject, loss_fn, batch, settings).open(), torch.device(describe_device(device).place)
    )
    as_is = judged.survival(format_name, _ROUNDINGS[format_name])
    if format_name not in _FP8 or not judged.reference_is_finite:
        return as_is
    scaled = judged.survival(format_name, partial(_FP8[format_name], factor=compute_full_range_factor))
    apart = "" if scaled.gradient_error is None else f" (gradients differ by {scaled.gradient_error:.0%})"
    sentence = f"with a scale for each tensor it {'survives' if scaled.survives else 'does not'}{apart}"
    return replace(
        as_is,
        verdict=f"{as_is.verdict}; {sentence}",
        do=(_SCALE_EACH, *as_is.do) if scaled.survives and not as_is.survives else as_is.do,
        scaled=scaled,
    )


class _SurvivalCheck:
    """A case on a device, with its fp32 gradients as the reference."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.reference = run_emulated_step(case, device, None)
        self.reference_is_finite = self.reference.fits

    def survival(self, name: str, make: MakeEmulator) -> Survival:
        outcome = self._outcome(name, make)
        assert outcome.rounding is not None
        ranges = outcome.rounding.ranges
        error, lost_share, lost = _compare_gradients(self.reference.gradients, outcome.gradients)
        survives = self._survives(outcome)
        event = ranges.first_on_the_way_forward
        # Overflows in backward count only if they reach the gradient of a parameter.
        if event is None and not outcome.gradients_finite:
            event = ranges.first_overflow.get(BACKWARD)
        bf16 = not survives and name != "bf16" and self._survives(self._bf16)
        unscaled = self._unscaled_underflow(outcome, make) if name == "fp16" else None
        return Survival(
            format=name,
            survives=survives,
            verdict=f"{name}: {self._sentence(outcome, event, error, lost_share)}"
            + ("; bf16 survives" if bf16 else ""),
            first_overflow=name_event_module(event) if event else None,
            loss=_replace_non_finite(outcome.loss),
            loss_fp32=_replace_non_finite(self.reference.loss),
            loss_scale=outcome.scale if name == "fp16" and outcome.gradients_finite else None,
            gradient_underflow=ranges.total(BACKWARD).underflow_share,
            gradient_underflow_unscaled=unscaled,
            gradient_lost=lost_share,
            gradient_error=error,
            lost=lost,
            modules=build_module_ranges(ranges),
            do=() if survives else suggest_survival_remedies(event, self._islands(name, make, event), bf16),
            notes=self._notes(outcome.rounding, event),
        )

    def _outcome(self, name: str, make: MakeEmulator, islands: tuple[str, ...] = ()) -> EmulatedStep:
        if name == "fp16":
            return run_at_finite_scale(
                lambda scale: run_emulated_step(self.case, self.device, make(), scale=scale, islands=islands)
            )
        return run_emulated_step(self.case, self.device, make(), islands=islands)

    def _survives(self, outcome: EmulatedStep) -> bool:
        if not (outcome.fits and self.reference_is_finite):
            return False
        error, lost, _ = _compare_gradients(self.reference.gradients, outcome.gradients)
        return error is not None and lost is not None and lost <= TOLERATED_LOSS and not self._is_too_far(error)

    def _is_too_far(self, error: float) -> bool:
        """Return whether finite gradients are too far from fp32's to be useful."""
        return error > TOLERATED_ERROR and error > TIMES_BF16 * self._bf16_error

    @cached_property
    def _bf16(self) -> EmulatedStep:
        return run_emulated_step(self.case, self.device, OutputRounder(BF16))

    @property
    def _bf16_error(self) -> float:
        """Return bf16's relative error: with small batches and normalization, any rounding error may be large."""
        return _compare_gradients(self.reference.gradients, self._bf16.gradients)[0] or 0.0

    def _unscaled_underflow(self, outcome: EmulatedStep, make: MakeEmulator) -> float:
        unscaled = outcome if outcome.scale == 1.0 else run_emulated_step(self.case, self.device, make())
        assert unscaled.rounding is not None
        return unscaled.rounding.ranges.total(BACKWARD).underflow_share

    def _sentence(
        self, outcome: EmulatedStep, event: OverflowEvent | None, error: float | None, lost: float | None
    ) -> str:
        if not self.reference_is_finite:
            return "no format helps: the loss or a gradient is not finite in fp32 either"
        assert outcome.rounding is not None
        ranges = outcome.rounding.ranges
        if event is not None and event is ranges.first_overflow.get(BACKWARD):
            return f"gradients overflow {describe_overflow(event)}, at every loss scale down to {outcome.scale:.0f}"
        if event is not None:
            return f"overflows {describe_overflow(event)}" + (
                ", though the loss is finite" if math.isfinite(outcome.loss) else ""
            )
        if not math.isfinite(outcome.loss):
            spoiled = ranges.first_spoiled
            place = f", first seen in {name_module(spoiled.module)} ({spoiled.operation})" if spoiled else ""
            return f"the loss is not finite though nothing overflows{place}: a division by a number that vanished"
        if lost is not None and lost > TOLERATED_LOSS:
            return f"gradients vanish: {lost:.0%} of their norm in fp32"
        if error is not None and self._is_too_far(error):
            return (
                f"does not survive: its gradients differ from fp32's by {error:.0%}, bf16's by {self._bf16_error:.0%}"
            )
        if isinstance(outcome.rounding, OperandRounder):
            return f"survives; its gradients differ from fp32's by {error or 0.0:.1%}, bf16's by {self._bf16_error:.1%}"
        share = ranges.total(BACKWARD).underflow_share
        at = f" at a loss scale of {outcome.scale:.0f}" if outcome.scale != 1.0 else ""
        return f"survives; {_describe_headroom(outcome)}, {share:.1%} of gradients vanish{at}"

    def _islands(self, name: str, make: MakeEmulator, event: OverflowEvent | None) -> list[str]:
        """Return the smallest part of the model that is a remedy when kept in fp32; empty if none is."""
        if event is None or name in _FP8 or not self.reference_is_finite:
            return []
        for path in list_island_candidates(self.case.model, event.module):
            try:
                if self._survives(self._outcome(name, make, islands=(path,))):
                    return [path]
            except WrongUse:  # some modules cannot be islands
                continue
        return []

    def _notes(self, rounding: FormatEmulator, event: OverflowEvent | None) -> tuple[str, ...]:
        kind = self.device.type.upper()
        notes = [f"rules: {kind} autocast"]
        operation = event.operation.removeprefix("aten.") if event else ""
        if self.device.type != "cuda" and operation in _FP32_ON_CUDA:
            notes.append(f"CUDA's autocast computes {operation} in fp32: there it would not overflow")
        if rounding.not_emulated:
            notes.append(f"ran unchanged: {', '.join(sorted(rounding.not_emulated))}")
        return (*notes, "one step on one batch: weights and gradients of later steps may have a different range")


def _compare_gradients(
    wanted: Gradients, found: Gradients
) -> tuple[float | None, float | None, tuple[LostGradient, ...]]:
    """Return the relative error, the share of the norm that vanished, and the largest vanished gradients.

    The numbers are None if the gradients are non-finite.
    """
    total = difference = gone = 0.0
    lost = []
    for name, true in wanted.items():
        # A parameter without a gradient has lost all of it.
        ours = found.get(name, torch.zeros_like(true))
        vanished = torch.where(ours == 0, true, torch.zeros_like(true))
        total += sum_squares(true)
        difference += sum_squares(true - ours)
        gone += sum_squares(vanished)
        if count := int(vanished.count_nonzero()):
            lost.append(LostGradient(name, count / int(true.count_nonzero()), vanished.abs().max().item()))
    lost.sort(key=lambda gradient: -gradient.largest)
    if not (math.isfinite(total) and math.isfinite(difference)):
        return None, None, ()
    if not total:
        return 0.0, 0.0, ()
    return math.sqrt(difference / total), math.sqrt(gone / total), tuple(lost[:_MOST_NAMED])


def sum_squares(tensor: Tensor) -> float:
    return float(tensor.square().sum().item())


def _replace_non_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_headroom(outcome: EmulatedStep) -> str:
    assert outcome.rounding is not None
    modules = [module for module in build_module_ranges(outcome.rounding.ranges) if module.headroom_bits is not None]
    if not modules:
        return "nothing was rounded"
    return f"{modules[0].headroom_bits:.1f} bits of headroom in {modules[0].module}"
