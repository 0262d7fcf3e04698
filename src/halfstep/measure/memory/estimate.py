"""Predict the memory of a step without running it."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from halfstep import numbers
from halfstep.errors import HalfstepError, PrecisionRefused, WrongUse
from halfstep.formats import FP32, is_narrow
from halfstep.measure.batches import count_samples, describe_sample_tensors, list_tensors, sum_storage_bytes
from halfstep.measure.case import SEED, Case, LossFunction, MakeOptimizer, resolve_precision
from halfstep.measure.memory.devices import Target, choose_target_precision, device_named
from halfstep.measure.memory.fake_tensors import (
    FakeCandidate,
    MakeCase,
    build_case_factory,
    build_fake_case,
    build_wrong_use,
    create_fake_mode,
    find_calling_line,
    format_fake,
    has_compiled_update,
    refuse_number_reads,
    replace_torch_backward,
    silence_torch_log,
)
from halfstep.measure.memory.ledger import PARTS, WORKING, Ledger, LedgerNote
from halfstep.measure.memory.recurrent import emulate_onednn_lstm
from halfstep.measure.memory.timeline import UPDATE, MemoryBlock, Moment, Timeline, describe_unverified_operations
from halfstep.measure.memory.values import ValueTracker
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Measurable, Settings, resolve_subject
from halfstep.observe.reachable import find_generators
from halfstep.observe.recorder import run_eagerly
from halfstep.precision.hardware import describe_device, find_format_support
from halfstep.precision.names import AUTO
from halfstep.precision.precision import Precision
from halfstep.random_state import preserve_random_state, use_seeded_generators

# -- notes ------------------------------------------------------------------------------------------------------------
# Write the remarks that readers of a ledger need.


_WORTH_NAMING = 0.01
COMPILED = "estimated as it runs without compilation; compiled code keeps other tensors, mostly fewer"


def build_ledger_notes(
    setting: StepSetting,
    precision: Precision,
    device: torch.device,
    at_peak: Mapping[str, int],
    wide: Mapping[str, int],
    gradients: str = "",
    compiled_update: bool = False,
) -> tuple[LedgerNote, ...]:
    """Return the remarks; `wide` is the fp32 memory at the peak, by part, `gradients` the format of those of bf16."""
    peak = sum(at_peak.values())
    notes: list[LedgerNote] = []
    if precision.casts and peak:
        largest = sorted(wide.items(), key=lambda item: -item[1])
        named = ", ".join(
            f"{part} {numbers.format_bytes(size)}" for part, size in largest if size > _WORTH_NAMING * peak
        )
        share = sum(wide.values()) / peak
        notes.append(LedgerNote(f"{share:.0%} of its peak is still in fp32: {named or 'little'}"))
    if device.type == "cpu":
        found = find_format_support(describe_device(device), precision.needs)
        if not found.native:
            notes.append(LedgerNote(f"{precision.name} is not native here: {found.reason}", only_here=True))
        if precision.scaled:
            inside = "the workspace of convolutions in this precision on a CPU is not counted"
            notes.append(LedgerNote(inside, only_here=True))
    if setting.weight_format != FP32.name and gradients:
        why = "they are accumulated over micro-batches" if setting.microbatches > 1 else "nothing is accumulated"
        notes.append(LedgerNote(f"weights as {setting.weight_format}, their gradients in {gradients}: {why}"))
    if compiled_update:
        notes.append(LedgerNote("the workspace of torchao's compiled update is not counted", only_here=True))
    if setting.compile:
        notes.append(LedgerNote(COMPILED))
    if at_peak["buffers"] > _WORTH_NAMING * peak:
        notes.append(LedgerNote("buffers count twice: a step keeps a copy of them, to roll back an update"))
    return tuple(notes)


# -- reading ----------------------------------------------------------------------------------------------------------
# Read a timeline: its peak, the blocks alive then, and the maximum of each part.


@dataclass(frozen=True)
class TimelineSummary:
    """Bytes of a section of a timeline, by part."""

    at_peak: dict[str, int]
    wide: dict[str, int]
    """The fp32 bytes at the peak."""
    whole: dict[str, int]
    moment: Moment
    working: int
    """The peak in forward and backward without the model, its gradients and its optimizer: unaffected by sharding."""
    updating: int
    """The peak of the update without them."""


def summarize_timeline(timeline: Timeline, since: int) -> TimelineSummary:
    """Read from the operation after `since` to the last; blocks that exist throughout count throughout."""
    last = timeline.now
    blocks = [block for block in timeline.blocks if block.died > since and block.born <= min(block.died, last)]
    by_part = {part: _compute_byte_levels([b for b in blocks if b.part == part], since, last) for part in PARTS}
    together = [sum(levels) for levels in zip(*by_part.values(), strict=True)]
    peak = max(range(len(together)), key=together.__getitem__)
    number = since + 1 + peak
    wide = [b for b in blocks if b.born <= number <= b.died and b.format == FP32.name]
    beside = [sum(levels) for levels in zip(*(by_part[part] for part in WORKING), strict=True)]
    in_update = [moment.phase == UPDATE for moment in timeline.moments[since + 1 : last + 1]]
    return TimelineSummary(
        at_peak={part: levels[peak] for part, levels in by_part.items()},
        wide=_sum_block_bytes(wide, lambda block: block.part),
        whole={part: max(levels) for part, levels in by_part.items()},
        moment=timeline.moments[number],
        working=max((size for size, late in zip(beside, in_update, strict=True) if not late), default=0),
        updating=max((size for size, late in zip(beside, in_update, strict=True) if late), default=0),
    )


def sum_bytes_by_format(blocks: Iterable[MemoryBlock]) -> dict[str, int]:
    """Return the bytes of the blocks by format, largest first."""
    return _sum_block_bytes(blocks, lambda block: block.format)


def sum_bytes_by_module(blocks: Iterable[MemoryBlock]) -> dict[str, int]:
    """Return the bytes of the blocks by module, largest first."""
    return _sum_block_bytes(blocks, lambda block: block.module)


def _sum_block_bytes(blocks: Iterable[MemoryBlock], key: Callable[[MemoryBlock], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for block in blocks:
        sums[key(block)] += block.bytes
    return dict(sums.most_common())


def _compute_byte_levels(blocks: Sequence[MemoryBlock], since: int, last: int) -> list[int]:
    """Return the bytes during each operation after `since`."""
    changes = [0] * (last - since + 1)
    for block in blocks:
        changes[max(block.born - since - 1, 0)] += block.bytes
        changes[min(block.died, last) - since] -= block.bytes
    return list(accumulate(changes[:-1]))


# -- estimate ---------------------------------------------------------------------------------------------------------


_VERIFIED = ("fp32", "bf16")
"""Precisions checked against real CPU runs by benchmarks/estimate_accuracy.py, with all other settings at defaults."""


def estimate(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    settings: Settings = (),
    precision: str | None = None,
    batch_size: int | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    recompute: bool | None = None,
    channels_last: bool | None = None,
    microbatches: int | None = None,
    weight_format: str | None = None,
    device: str | None = None,
) -> Ledger:
    """Predict the memory of one update without running it.

    Nothing is run, changed or copied. Arguments left out are taken from the recipe; otherwise they are bf16, the given
    batch, and fused AdamW.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, for a model.
        settings: Settings that change the recipe.
        precision: The precision of the update.
        batch_size: The number of samples in a micro-batch.
        optimizer: An optimizer, or a function that makes one from a model.
        recompute: Whether activations are recomputed in backward.
        channels_last: Whether the model uses channels_last.
        microbatches: The number of micro-batches in an update.
        weight_format: How trained weights are stored, as for `Stepper`.
        device: The device, present or not ("a100-80gb", "rtx4090", "24GB"); by default this machine's CPU.

    Returns:
        The ledger of the update: its memory by part and over time.

    Raises:
        WrongUse: A size is below 1, the code depends on values, or the model, the loss or torch raises an error.
        PrecisionRefused: CUDA's autocast refuses an operation.
    """
    if any(size is not None and size < 1 for size in (batch_size, microbatches)):
        given = f"batch_size={batch_size}, microbatches={microbatches}"
        raise WrongUse(given, allowed="1 or more of each", do="omit them to use the batch unchanged")
    try:
        measured = resolve_subject(subject, loss_fn, batch, settings)
        make_case, case = (
            (measured.open, measured) if isinstance(measured, Case) else build_case_factory(measured.describe)
        )
    except HalfstepError:
        raise
    except Exception as error:
        raise build_wrong_use(error, (), "run it by itself, without halfstep, until it returns a case") from error
    if optimizer is not None:
        make_case = _replace_case_optimizer(make_case, optimizer)
    own = case.setting if case.is_recipe else StepSetting(precision=_DEFAULT)
    setting = replace(
        own,
        precision=own.precision if precision is None else precision,
        channels_last=own.channels_last if channels_last is None else channels_last,
        batch=batch_size or own.batch,
        microbatches=microbatches or own.microbatches,
        recompute=own.recompute if recompute is None else recompute,
        weight_format=own.weight_format if weight_format is None else weight_format,
    )
    target = device_named(device or "cpu")
    if setting.precision == AUTO:
        setting = replace(setting, precision=choose_target_precision(target))

    def ledger(setting: StepSetting) -> Ledger:
        return (
            estimate_ledger(make_case, setting)
            if device is None
            else estimate_device_ledger(make_case, setting, target)
        )

    try:
        return ledger(setting)
    except HalfstepError:
        raise
    except Exception as error:
        samples = describe_sample_tensors(case.batch) if setting.batch not in (None, count_samples(case.batch)) else ()
        raise build_wrong_use(
            error, samples, _suggest_working_setting(setting, optimizer is not None, ledger)
        ) from error


def _suggest_working_setting(setting: StepSetting, has_optimizer: bool, ledger: Callable[[StepSetting], Ledger]) -> str:
    """Return what to type in Python where a setting does not run: a change with which it does, or how to find out."""
    plain = replace(setting, batch=None, recompute=False, channels_last=False)
    tried = {
        "batch_size=2 runs: one sample alone has no spread to normalize by": replace(setting, batch=2),
        "it runs with batch_size, recompute and channels_last left out": plain,
    }
    for do, other in tried.items():
        if other == setting or (other.batch == 2 and setting.batch != 1):
            continue
        try:
            ledger(other)
        except Exception:
            continue
        return do
    also = ", and the optimizer: optimizer.step()" if has_optimizer else ""
    return f"run the loss once by itself: loss_fn(model, batch).backward(){also}"


_DEFAULT = "bf16"
"""The precision of a model that no recipe names one for."""


def _replace_case_optimizer(make_case: MakeCase, optimizer: MakeOptimizer | torch.optim.Optimizer) -> MakeCase:
    def make() -> Case:
        case = make_case()
        return replace(case, optimizer=_build_optimizer_factory(optimizer, case.model))

    return make


def estimate_ledger(make_case: Callable[[], Case], setting: StepSetting, device: torch.device | str = "cpu") -> Ledger:
    """Return the ledger of the second of two updates on fake tensors, when the optimizer has its state."""
    not_true: frozenset[str] = frozenset()
    while True:
        tracker = ValueTracker(not_true)
        try:
            return _estimate_ledger_once(make_case, setting, torch.device(device), tracker)
        except HalfstepError:
            raise
        except Exception:
            # A condition that was assumed to be true may be one that raises an error, such as a check of the input.
            if tracker.last_condition is None:
                raise
            not_true |= {tracker.last_condition}


def _estimate_ledger_once(
    make_case: Callable[[], Case], setting: StepSetting, device: torch.device, tracker: ValueTracker
) -> Ledger:
    mode = create_fake_mode()
    precision = resolve_precision(setting.precision, device)
    with _treat_fakes_as_real(), use_seeded_generators(SEED), run_eagerly(), silence_torch_log():
        case = build_fake_case(make_case, mode, tracker)
        held = find_generators(case.loss_fn, case.batch)
        with preserve_random_state(objects=held), mode, tracker, refuse_number_reads():
            candidate = FakeCandidate(case, setting, precision, device, tracker)
            with candidate.recorder():
                candidate.step()
                since = candidate.timeline.now
                candidate.step()
            beside = _sum_memory_outside_update(candidate, case)
    for path, module in case.model.named_modules():
        if isinstance(module, nn.LSTM):  # described by formulas that are up to 3 % off in bf16
            candidate.timeline.not_covered.setdefault("lstm", path)
    reading = summarize_timeline(candidate.timeline, since)
    at_peak = _add_sizes(reading.at_peak, beside)
    gradients = candidate.weights.gradient_format if candidate.weights else ""
    compiled = has_compiled_update(candidate.optimizer, device)
    remarks = build_ledger_notes(
        setting, precision, device, at_peak, _add_sizes(reading.wide, beside), gradients, compiled
    )
    assumptions = (*case.assumptions, *tracker.assumptions)
    remarks += tuple(LedgerNote(str(assumption)) for assumption in assumptions)
    if case.compiled and not setting.compile:
        remarks += (LedgerNote(COMPILED),)
    # Other layouts, recomputing and compiled code were not compared with real runs.
    plain = setting == StepSetting(precision.name, batch=setting.batch) and not (case.compiled or compiled)
    could_be = device.type == "cpu" and plain and precision.name in _VERIFIED and not assumptions
    if candidate.timeline.not_covered and could_be:
        remarks = (*remarks, LedgerNote(describe_unverified_operations(candidate.timeline.not_covered), only_here=True))
    return Ledger(
        setting=setting,
        device=str(device),
        samples=count_samples(candidate.batch),
        at_peak=at_peak,
        whole=_add_sizes(reading.whole, beside),
        by_format=sum_bytes_by_format(candidate.timeline.saved_for_backward),
        by_module=sum_bytes_by_module(candidate.timeline.saved_for_backward),
        moment=str(reading.moment),
        working=reading.working,
        updating=reading.updating,
        verified=could_be and not candidate.timeline.not_covered,
        remarks=remarks,
        assumptions=assumptions,
    )


@contextmanager
def _treat_fakes_as_real() -> Iterator[None]:
    """Make torch and transformers treat fake tensors as real ones."""
    with (
        disable_transformers_tracing(),
        emulate_onednn_lstm(),
        replace_attribute(FakeTensor, "__format__", format_fake),
    ):
        yield


@contextmanager
def disable_transformers_tracing() -> Iterator[None]:
    """Make transformers treat fake tensors as it treats real ones; it takes them for tracing and builds masks."""
    library = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(library, "is_fake_tensor"):
        yield
        return
    with replace_attribute(library, "is_fake_tensor", lambda _: False):
        yield


def _sum_memory_outside_update(candidate: FakeCandidate, case: Case) -> dict[str, int]:
    """Return the run's memory outside of the update: an average, copies of buffers for rollback, other batches."""
    model = candidate.model
    average = [*model.parameters(), *model.buffers()] if case.average else []
    # An average is in fp32 where the weights are in bf16.
    wider = sum(2 * p.numel() for p in candidate.weights.parameters) if case.average and candidate.weights else 0
    return {
        "average": sum_storage_bytes(average) + wider,
        "buffers": sum_storage_bytes(model.buffers()),
        # The timeline has one batch; the window holds all of them until the update.
        "batch": sum_storage_bytes(list_tensors(candidate.batch)) * (candidate.microbatches - 1),
    }


def _add_sizes(sizes: Mapping[str, int], beside: Mapping[str, int]) -> dict[str, int]:
    return {part: sizes.get(part, 0) + beside.get(part, 0) for part in (*sizes, *(set(beside) - set(sizes)))}


def _build_optimizer_factory(optimizer: MakeOptimizer | torch.optim.Optimizer, model: nn.Module) -> MakeOptimizer:
    """Return a factory for an optimizer like this one, with its groups and options and without its state."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def make(fake: nn.Module) -> torch.optim.Optimizer:
        fakes = dict(fake.named_parameters())
        # deepcopy does not copy objects in its memo. Parameters that are not the model's get no gradient here.
        memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter))
            memo[id(parameter)] = torch.empty_like(parameter) if name is None else fakes[name]
        twin = copy.deepcopy(optimizer, memo)
        # Optimizer.__getstate__ drops attributes other than groups and state. `step` is skipped: a scheduler replaces
        # it with a wrapper that is bound to the real optimizer.
        for name, value in vars(optimizer).items():
            if name not in vars(twin) and name != "step":
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    return make


# -- accelerator rules ------------------------------------------------------------------------------------------------
# Compute the ledger of a step on an absent GPU, by the GPU's own autocast rules. Fake tensors can have the device type
# of an absent device: torch then applies CUDA's rules for formats and allocates nothing. Queries to the driver are
# answered here.


_REFUSED = "unsafe to autocast"
FOLLOWED = (
    "forward and backward on meta tensors under CUDA's autocast rules, without kernel workspaces; "
    "not verified on this device"
)
NOT_FOLLOWED = (
    "by the CPU's rules, because CUDA's could not be followed without a GPU ({}); not verified on this device"
)
OTHER_RULES = "by the CPU's rules, not by this device's; not verified on this device"


def estimate_device_ledger(make_case: Callable[[], Case], setting: StepSetting, target: Target) -> Ledger:
    """Return the ledger of a setting on a device that need not be present.

    Devices without CUDA's rules, and models that cannot be followed without a GPU, are estimated by the CPU's rules,
    and a note says so. Raises `PrecisionRefused` where CUDA's autocast refuses an operation.
    """
    if target.device.kind == "cpu":
        return estimate_ledger(make_case, setting)
    if target.rules != "cuda":
        return _estimate_by_cpu_rules(make_case, setting, target, OTHER_RULES)
    try:
        return _add_device_note(estimate_cuda_ledger(make_case, setting), target, FOLLOWED)
    except HalfstepError:
        raise
    except Exception as error:
        # Kernels that query the driver, such as cuDNN's recurrent layers or a custom extension.
        reason = (str(error).splitlines() or [""])[0][:80] or type(error).__name__
    # Outside the handler, so that an error of the user's code, which is raised again here, is not chained.
    return _estimate_by_cpu_rules(make_case, setting, target, NOT_FOLLOWED.format(reason))


def _estimate_by_cpu_rules(make_case: Callable[[], Case], setting: StepSetting, target: Target, note: str) -> Ledger:
    return replace(_add_device_note(estimate_ledger(make_case, setting), target, note), by_cpu_rules=True)


def _add_device_note(ledger: Ledger, target: Target, note: str) -> Ledger:
    remarks = [remark for remark in ledger.remarks if not remark.only_here]
    return replace(ledger, device=target.id, verified=False, remarks=(*remarks, LedgerNote(note)))


def estimate_cuda_ledger(make_case: Callable[[], Case], setting: StepSetting) -> Ledger:
    """Return the ledger of the second of two updates on fake tensors of a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without storage and about the missing driver
        with mock_gpu(), replace_torch_backward():
            try:
                return estimate_ledger(lambda: clear_fake_constants(make_case()), setting, "cuda")
            except RuntimeError as error:
                if _REFUSED in str(error):
                    raise _build_autocast_refusal(error, setting.precision) from None
                raise
            finally:
                # Cached casts are fake tensors, which must not be reused outside this mode.
                torch.clear_autocast_cache()


def clear_fake_constants(case: Case) -> Case:
    """Clear the constants of fake tensors: torch would move such a tensor to the GPU for real."""
    for tensor in (*case.model.buffers(), *list_tensors(case.batch)):
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
    return case


@contextmanager
def mock_gpu() -> Iterator[None]:
    """Make torch behave as with a GPU: autocast stays enabled, and attention uses its fused kernel."""
    with (
        # torch.autocast turns itself off if the first is true, and rejects bf16 if the second is false.
        replace_attribute(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        replace_attribute(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        # Libraries choose kernels by it, such as grouped products.
        replace_attribute(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
        replace_attribute(functional, "scaled_dot_product_attention", _run_fused_attention),
    ):
        yield


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of an attribute inside the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_attention_of_torch = functional.scaled_dot_product_attention


def _run_fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run attention as a GPU does, without the matrix of scores.

    Without a GPU, torch would use the decomposed formula and save that matrix several times.
    """
    # Fused kernels take 4-d tensors.
    if query.device.type != "cuda" or query.dim() != 4:
        return _attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cuda"):
        narrow = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    if groups > 1 and is_narrow(query.dtype) and attn_mask is None:
        flash: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if groups > 1:  # The other fused kernel takes as many keys as queries.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    # A mask of any dtype becomes a bias in the query's format, the form in which the kernel takes it.
    bias = (
        None
        if attn_mask is None
        else torch.zeros_like(attn_mask, dtype=query.dtype).expand(
            query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        )
    )
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return out


def _build_autocast_refusal(error: RuntimeError, precision: str) -> PrecisionRefused:
    what = str(error).split(" and ")[0].removeprefix("torch.nn.functional.")
    return PrecisionRefused(
        f"CUDA's autocast refuses {what} in {precision}, called at {find_calling_line(error)}",
        allowed="binary_cross_entropy_with_logits, or the same loss in fp32",
        do="leave the sigmoid out and use nn.BCEWithLogitsLoss(), or wrap the loss: halfstep.island(nn.BCELoss())",
    )
