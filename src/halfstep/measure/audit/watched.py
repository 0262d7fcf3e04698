"""One step of a copy of a case in a precision, with everybody listening who has something to say about it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.errors import WrongUse
from halfstep.formats import is_narrow
from halfstep.measure.audit.work import Work, Works
from halfstep.measure.batches import placed as placed_batch
from halfstep.measure.case import Case
from halfstep.measure.memory.persons_error import as_wrong_use, in_one_line
from halfstep.measure.survival_step import Gradients, one_loss, recurrent_steps_shown, undisturbed
from halfstep.observe.lint.calls import Calls
from halfstep.observe.lint.functions import OwnFunctions
from halfstep.observe.lint.listener import Lint, Spotted
from halfstep.observe.ranges import Ranges
from halfstep.observe.recorder import Operation, Recorder, as_it_is
from halfstep.observe.rounding import RoundedOutputs
from halfstep.observe.watch import Observation, Tally
from halfstep.precision.island import lift_island, settle
from halfstep.precision.precision import Precision
from halfstep.step.loss_scale import DynamicScale


@dataclass(frozen=True)
class Watched:
    """What the step showed."""

    works: Mapping[str, Work]
    observation: Observation
    spotted: tuple[Spotted, ...]
    ranges: Ranges | None = None
    """How numbers lie in the format; None where nothing was rounded, or where there were no numbers."""
    loss: float = math.nan
    gradients: Gradients | None = None
    """Of the parameters, divided by the loss scale again; None where backward was not reached, or has no numbers."""
    scale: float = 1.0
    stopped: str | None = None
    """What ended the step before its end."""

    @property
    def gradients_finite(self) -> bool:
        return self.gradients is not None and all(bool(g.isfinite().all()) for g in self.gradients.values())

    @property
    def fits(self) -> bool:
        overflowed = self.ranges is not None and self.ranges.first_on_the_way_forward is not None
        return not overflowed and math.isfinite(self.loss) and self.gradients_finite


class Listeners:
    """All who listen to one step of one model."""

    def __init__(self, model: nn.Module, precision: Precision, rounding: RoundedOutputs | None = None) -> None:
        self.works, self.lint = Works(model), Lint(model)
        self._tally = Tally(model, precision.computes.name)
        self._rounding = rounding

    def __call__(self, operation: Operation) -> None:
        if operation.function.namespace == "prim":  # asks a fake tensor for its device, and computes nothing
            return
        if self._rounding is not None:
            self._rounding(operation)
        self._tally(operation)
        self.works(operation)
        self.lint(operation)

    def watched(self, **more: Any) -> Watched:
        ranges = None if self._rounding is None else self._rounding.ranges
        return Watched(self.works.by_module, self._tally.observation(), self.lint.spotted(), ranges, **more)


def watched_step(case: Case, device: torch.device, precision: Precision, without: tuple[str, ...] = ()) -> Watched:
    """The step, at the first loss scale at which all gradients are finite where the precision has one.

    Islands in `without` are lifted. Operations of a narrow format compute in fp32 and round, so that what does not fit
    is known; which format each of them is in, autocast decides as in earnest.
    """
    if not precision.scaled:
        return _step(case, device, precision, 1.0, without)
    scale = DynamicScale()
    while True:
        found = _step(case, device, precision, scale.value, without)
        hopeless = found.stopped is not None or not math.isfinite(found.loss)
        if found.gradients_finite or hopeless or not scale.can_fall:
            return found
        scale.update(overflow=True)


def _step(case: Case, device: torch.device, precision: Precision, scale: float, without: tuple[str, ...]) -> Watched:
    model = copy.deepcopy(case.model).to(device)
    model.zero_grad(set_to_none=True)
    settle(model)
    for path in without:
        lift_island(model, path)
    batch = pytree.tree_map_only(Tensor, Tensor.clone, placed_batch(case.batch, device))
    narrow = precision.computes.dtype is not None and is_narrow(precision.computes.dtype)
    rounding = RoundedOutputs(precision.computes) if narrow else None
    listeners = Listeners(model, precision, rounding)
    try:
        with undisturbed(device), precision.scope(device), recurrent_steps_shown(model), ExitStack() as active:
            recorder = active.enter_context(Recorder(model, listeners, rounding.run if rounding else as_it_is))
            active.enter_context(listeners.works.keeping(lambda: recorder.module))
            if narrow:
                active.enter_context(OwnFunctions(recorder.maker, listeners.lint.tell))
            with precision.autocast(device), Calls(device.type, listeners.lint.tell):
                given = case.loss_fn(model, batch)
            loss = one_loss(given)
            (loss * scale).backward()
    except Exception as error:
        return listeners.watched(stopped=_told(error, listeners.lint), scale=scale)
    return listeners.watched(loss=loss.item(), gradients=_gradients(model, scale), scale=scale)


def _told(error: Exception, lint: Lint) -> str:
    """One line, where a finding explains the error; else it is the person's, and told as such."""
    if any(one.finding.severity == "error" for one in lint.spotted()):
        return str(error) if isinstance(error, WrongUse) else in_one_line(error)
    if isinstance(error, WrongUse):
        raise error
    raise as_wrong_use(error, (), "") or error from error


def _gradients(model: nn.Module, scale: float) -> Gradients:
    # In fp64, so that the division takes nothing away.
    return {
        name: _dense(parameter.grad.detach()).double() / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _dense(gradient: Tensor) -> Tensor:
    """An Embedding may have a gradient of a few rows."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
