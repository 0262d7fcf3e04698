"""Run one step of a copy of a case in a precision, with all listeners of the audit attached."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep.errors import WrongUse
from halfstep.formats import FP32, is_narrow, name_dtype
from halfstep.measure.case import Case
from halfstep.measure.memory.fake_tensors import convert_user_error, describe_error_with_line
from halfstep.measure.survival import (
    Gradients,
    StepOutcome,
    collect_gradients,
    copy_case,
    disable_onednn_for_recurrent,
    make_step_reproducible,
    resolve_scalar_loss,
    run_at_finite_scale,
)
from halfstep.observe.emulate import ModuleRanges, OutputRounder
from halfstep.observe.flops import Observation, WorkByFormat, count_flops, name_operation_format
from halfstep.observe.lint.calls import LossFunctionCalls
from halfstep.observe.lint.functions import OwnFunctionLint
from halfstep.observe.lint.listener import LintListener, PlacedFinding
from halfstep.observe.recorder import Operation, Recorder, run_unchanged
from halfstep.precision.island import mark_inner_islands, remove_island
from halfstep.precision.precision import Precision


@dataclass
class ModuleWork:
    """The work of one module, without its submodules."""

    flops: Counter[str] = field(default_factory=Counter)
    """FLOPs of matrix products, convolutions and attention, forward and backward, by the format of their operands."""
    results: Counter[str] = field(default_factory=Counter)
    """Number of values that its forward produced, by format."""
    saved: Counter[str] = field(default_factory=Counter)
    """Bytes that its forward saved for backward, by format; weights exist anyway and are not counted."""

    @property
    def computed(self) -> dict[str, float]:
        """Return shares by format, largest first: of the FLOPs, or of the results if there are no FLOPs."""
        counted = self.flops or self.results
        total = sum(counted.values())
        return {name: count / total for name, count in counted.most_common()} if total else {}


class ModuleWorkListener:
    """A listener that records the work of each module, with a hook for the tensors that autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self.by_module: dict[str, ModuleWork] = defaultdict(ModuleWork)
        self._weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self._kept: dict[int, StorageWeakRef] = {}

    def __call__(self, operation: Operation) -> None:
        done = count_flops(operation)
        work = self.by_module[operation.module]
        found = name_operation_format(operation) if done else ""
        # Operations that torch widens itself, for lack of a kernel, are not counted as fp32 of a module.
        if done and not (operation.widened and found == FP32.name):
            work.flops[found] += done
        # A cast or a view is not a format that a module computes in.
        casts = operation.function._overloadpacket is torch.ops.aten._to_copy
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in operation.function._schema.returns)
        if not (operation.backward or casts or views):
            for leaf in pytree.tree_leaves(operation.result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    work.results[name_dtype(leaf.dtype)] += leaf.numel()

    @contextmanager
    def keeping(self, running: Callable[[], str]) -> Iterator[None]:
        """Count the tensors saved in this scope for the module that `running` names."""

        def pack(tensor: Tensor) -> Any:
            if tensor.layout is torch.strided:
                self._count_once(tensor, running)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def _count_once(self, tensor: Tensor, running: Callable[[], str]) -> None:
        """Count the storage of a saved tensor, unless it is a weight (saved perhaps as a view) or counted already."""
        reference = StorageWeakRef(tensor.untyped_storage())
        # A weak reference, because the address of a freed storage may be reused by a new one.
        known = self._kept.get(reference.cdata)
        if reference.cdata in self._weights or (known is not None and not known.expired()):
            return
        self._kept[reference.cdata] = reference
        self.by_module[running()].saved[name_dtype(tensor.dtype)] += tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class ObservedStep(StepOutcome):
    """The result of a watched step."""

    works: Mapping[str, ModuleWork]
    observation: Observation
    spotted: tuple[PlacedFinding, ...]
    ranges: ModuleRanges | None = None
    """Ranges of the values in the format; None if nothing was rounded or no values were computed."""
    loss: float = math.nan
    gradients: Gradients | None = None
    """Gradients of the parameters, divided by the loss scale; None if backward was not reached or has no values."""
    scale: float = 1.0
    stopped: str | None = None
    """The error that ended the step early."""


class Listeners:
    """All listeners to one step of one model, called in turn."""

    def __init__(self, model: nn.Module, precision: Precision, rounding: OutputRounder | None = None) -> None:
        self.works, self.lint = ModuleWorkListener(model), LintListener(model)
        self._tally = WorkByFormat(model, precision.computes.name)
        self._rounding = rounding

    def __call__(self, operation: Operation) -> None:
        if operation.function.namespace == "prim":  # prim.device on a fake tensor: computes nothing
            return
        if self._rounding is not None:
            self._rounding(operation)
        self._tally(operation)
        self.works(operation)
        self.lint(operation)

    def watched(self, **more: Any) -> ObservedStep:
        """Return what the listeners recorded, with the remaining fields of `ObservedStep` in `more`."""
        ranges = None if self._rounding is None else self._rounding.ranges
        return ObservedStep(self.works.by_module, self._tally.observation(), self.lint.spotted(), ranges, **more)


def run_watched_step(
    case: Case, device: torch.device, precision: Precision, without: tuple[str, ...] = ()
) -> ObservedStep:
    """Run the step, at the first loss scale at which all gradients are finite if the precision has one.

    Islands in `without` are lifted. Narrow operations are computed in fp32 and rounded, so that overflows are visible;
    autocast decides the format of each operation as it does in training. Raises `WrongUse` for an error of the user's
    code that no finding explains.
    """
    if not precision.scaled:
        return _run_step_at_scale(case, device, precision, 1.0, without)
    # A step that an error stopped has no finite loss: no smaller scale is tried.
    return run_at_finite_scale(lambda scale: _run_step_at_scale(case, device, precision, scale, without))


def _run_step_at_scale(
    case: Case, device: torch.device, precision: Precision, scale: float, without: tuple[str, ...]
) -> ObservedStep:
    model, batch = copy_case(case, device)
    if precision.changes_model:
        precision.prepare(model, device)
    # As the Stepper does: islands then cast their outputs to the format that follows.
    mark_inner_islands(model)
    for path in without:
        remove_island(model, path)
    narrow = precision.computes.dtype is not None and is_narrow(precision.computes.dtype)
    rounding = OutputRounder(precision.computes) if narrow else None
    listeners = Listeners(model, precision, rounding)
    try:
        with (
            make_step_reproducible(case, device),
            precision.scope(device),
            disable_onednn_for_recurrent(model),
            ExitStack() as active,
        ):
            recorder = active.enter_context(Recorder(model, listeners, rounding.run if rounding else run_unchanged))
            active.enter_context(listeners.works.keeping(lambda: recorder.module))
            if narrow:
                active.enter_context(OwnFunctionLint(recorder.maker, listeners.lint.emit))
            with precision.autocast(device), LossFunctionCalls(device.type, listeners.lint.emit):
                given = case.loss_fn(model, batch)
            loss = resolve_scalar_loss(given)
            (loss * scale).backward()
    except Exception as error:
        return listeners.watched(stopped=_explain_or_raise(error, listeners.lint), scale=scale)
    return listeners.watched(loss=loss.item(), gradients=collect_gradients(model, device, scale), scale=scale)


def _explain_or_raise(error: Exception, lint: LintListener) -> str:
    """Return the error as one line if a finding explains it; otherwise raise it as the user's error."""
    if any(one.finding.severity == "error" for one in lint.spotted()):
        return str(error) if isinstance(error, WrongUse) else describe_error_with_line(error)
    if isinstance(error, WrongUse):
        raise error
    raise convert_user_error(error, (), "") or error from error
