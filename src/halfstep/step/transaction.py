"""One update, all or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from halfstep.errors import same_keys, same_presence
from halfstep.finding import Finding
from halfstep.observe.watch import Observation, Watch
from halfstep.precision.island import islands, settle
from halfstep.precision.ladder import Choice, choose_precision
from halfstep.precision.precision import Precision
from halfstep.step import preflight
from halfstep.step.agreement import agree, token_of
from halfstep.step.attempt import Attempt
from halfstep.step.buffers import Buffers
from halfstep.step.held import OwnGenerators
from halfstep.step.lane import Lane
from halfstep.step.lanes import ByName, differentiate, lane_named, make_lanes, report_of
from halfstep.step.loss_scale import LossScale
from halfstep.step.or_nothing import OrNothing
from halfstep.step.original import Original
from halfstep.step.report import GUARD, Guard, StepReport
from halfstep.step.riders import Counts, Ema, checked_average
from halfstep.step.roster import Roster
from halfstep.step.synchronise import LossFunction, synchroniser
from halfstep.step.turns import Turns
from halfstep.step.window import Window

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
ONLY = "loss"
"""The name of the loss and of its optimizer where there is one of each."""


class Stepper:
    """Turns batches into updates. Each update happens completely, in the precision asked for, or not at all.

    ```python
    stepper = halfstep.Stepper(model, optimizer, precision="auto", clip_norm=1.0)
    for batch in loader:
        report = stepper.step(loss_fn, batch)      # loss_fn(model, batch) -> loss, or (sum, count)
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        precision: str | Precision | Choice = "auto",
        strict: bool = False,
        clip_norm: ByName[float] = None,
        clip_value: ByName[float] = None,
        schedule: ByName[Any] = None,
        ema: Ema | None = None,
        loss_scale: ByName[LossScale] = None,
        guards: Sequence[Guard] = (),
        observe: bool = True,
        ddp: Mapping[str, Any] | None = None,
    ) -> None:
        """`schedule`, `clip_norm`, `clip_value` and `loss_scale` may be dicts by optimizer name.

        Each optimizer's gradients are clipped by their own norm, also where one `clip_norm` is given for all. `ddp`
        holds options for DistributedDataParallel, which wraps a plain model on several processes.
        """
        optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {ONLY: optimizer}
        stale = preflight.check(model, optimizers)
        self.model, self.guards, self.counts = model, list(guards), Counts()
        self.ema = checked_average(ema, model)
        self.device = next(model.parameters()).device
        self._observe = observe
        self.observed: Observation | None = None
        self.findings: list[Finding] = []
        self._compute_in(choose_precision(precision, device=self.device, strict=strict), optimizers)
        self._tell(stale)
        settle(model)
        self.attempt: Attempt | None = None
        self._lanes = make_lanes(optimizers, self.precision, loss_scale, schedule, clip_norm, clip_value)
        self._original = Original(self.choice, self._lanes)
        self._synchroniser = synchroniser(model, losses=len(self._lanes), ddp=ddp or {})
        self._buffers = Buffers(model)
        self._roster = Roster(model, optimizers.values())
        self._open: list[Lane] = []
        self._or_nothing, self._turns, self._own = OrNothing(self._abandon), Turns(), OwnGenerators()
        self._torn, self._begun, self.followed = False, 0, 0
        self.hand = False
        """Raised by a process that wants all of them to stop: they learn of it with the next step."""
        self.hands = 0
        """Processes whose hand was up at the last step; the same number on all of them."""

    def _compute_in(self, choice: Choice, optimizers: Iterable[str]) -> None:
        """What really runs is watched anew until each of the optimizers was seen."""
        self.choice, self.precision = choice, choice.precision
        self.findings += [finding for finding in choice.findings if finding not in self.findings]
        self.precision.prepare(self.model, self.device)
        self._autocast, self._scope = self.precision.autocast(self.device), self.precision.scope(self.device)
        self._unseen, self._idle = set(optimizers), set(islands(self.model))
        if self._observe:
            self._scope = Watch(self._scope, self.model, self.precision, done=self._watched, tell=self._tell)

    def change_precision(self, name: str) -> None:
        """Go on in another precision, or in the first one again, between two steps; a loss scale begins anew."""
        preflight.check_window(torn=self._torn, in_one=bool(self._open), empty=False)
        self._compute_in(self._original.choice(name, self.device), self.optimizers)
        self._original.scale_anew(self._lanes, self.choice)

    # -- the function form --------------------------------------------------------------------------------------

    def step(self, loss_fn: LossFunction, batch: Any, *, only: str | None = None) -> StepReport:
        """One update from a batch, or from a `Window` of micro-batches.

        `loss_fn(model, batch)` gets your own module. `only` names the one optimizer to update, for training in turns.
        """
        microbatches = batch if type(batch) is Window else (batch,)
        lanes = self._begin(loss_fn, microbatches, only)
        with self._or_nothing, self._scope:
            for left, microbatch in zip(range(len(microbatches) - 1, -1, -1), microbatches, strict=True):
                with self._autocast:
                    losses = self._synchroniser.run(loss_fn, microbatch, left == 0)
                differentiate(lanes, losses, divide=len(microbatches))
                del losses  # or this micro-batch's graph would live through the next one's forward
        return self._conclude(lanes)

    # -- the form for loops that cannot be turned inside out ----------------------------------------------------

    @contextmanager
    def forward(self, *, last: bool = True, only: str | None = None) -> Iterator[None]:
        """Round your own forward pass and loss. `last`: is this the last micro-batch before `apply()`?"""
        if not self._open:
            self._begin(None, (), only)
        self._turns.forward(last=last, names=[lane.name for lane in self._chosen(only)])
        with self._or_nothing, self._synchroniser.forward(last), self._scope, self._autocast:
            yield

    def backward(self, loss: Any) -> None:
        """In place of `loss.backward()`. Give the plain mean of the micro-batch, not divided by their number.

        How many will come is not known here, so gradients are divided at the end; fp16 overflows a little sooner.
        """
        self._turns.backward()
        with self._or_nothing, self._scope:
            differentiate(self._open, loss, divide=1)

    def apply(self) -> StepReport:
        """Conclude the window: unscale, check, clip, update, report."""
        self._turns.apply()
        return self._conclude(self._open)

    def discard(self) -> None:
        """Drop a window that was begun with `forward()`: as if it had never begun."""
        if self._open:
            self._abandon()

    # -- one window, from beginning to end ----------------------------------------------------------------------

    def _begin(self, loss_fn: LossFunction | None, microbatches: Sequence[Any], only: str | None) -> list[Lane]:
        self._check_ready(microbatches if loss_fn else None)
        if self._roster.changed():
            self._follow()
        lanes = self._chosen(only)
        # Inside an outer autocast, even one that is off, casts of the weights would outlive the update.
        torch.clear_autocast_cache()
        self.attempt = Attempt.of(lanes, loss_fn, microbatches, only, self.device, self._own.states(loss_fn))
        self._buffers.remember()
        for parameter in self._roster.strays:
            parameter.grad = None
        for lane in self._lanes:
            lane.begin()
        self.counts.attempted += 1
        self._begun += 1
        self._open = lanes
        return lanes

    def _chosen(self, only: str | None) -> list[Lane]:
        return self._lanes if only is None else [lane_named(only, self._lanes)]

    def _follow(self) -> None:
        """Modules or parameters came, left or were unfrozen since the last step: `followed` counts how often."""
        self.followed += 1
        self._tell(preflight.check(self.model, self.optimizers))
        settle(self.model)
        self._buffers.follow(self.model.named_modules())
        for lane in self._lanes:
            lane.follow()
        if self.ema is not None:
            self.ema.follow()
        self._synchroniser.follow()
        self._roster.look()

    def _conclude(self, lanes: list[Lane]) -> StepReport:
        which = 0 if len(lanes) == len(self._lanes) else 1 + self._lanes.index(lanes[0])
        with self._or_nothing:
            self._synchroniser.finish([lane.gradients for lane in lanes])
            token = token_of(self._begun, which, self.counts.applied)
            self.hands = agree(lanes, token, self.hand, cure=self._synchroniser.cure)
            report = self._judge(lanes)
        if report.applied:
            self._apply(lanes)
        else:
            self._buffers.restore()
        self.counts.count(report.reason)
        for lane in lanes:
            lane.adjust()
        self._close()
        return report

    def _judge(self, lanes: list[Lane]) -> StepReport:
        """Finite? Then unscale and clip, and ask the guards. From here on all processes know the same."""
        reason = next((r for r in (lane.reason() for lane in lanes) if r is not None), None)
        report = report_of(lanes, self.counts, reason)
        if not report.applied:
            return report
        for lane in lanes:
            lane.ready()
        refused = next((guard.name for guard in self.guards if not guard.passes(report)), None)
        return report if refused is None else report_of(lanes, self.counts, GUARD + refused)

    def _apply(self, lanes: list[Lane]) -> None:
        try:
            for lane in lanes:
                lane.apply()
            if self.ema is not None:
                everything = len(lanes) == len(self._lanes)
                self.ema.update(None if everything else [p for lane in lanes for p in lane.gradients.parameters])
        except BaseException:
            self._torn = True
            self._close()
            raise

    def _abandon(self) -> None:
        """An error in the middle of a window: as if the window had never begun."""
        self.counts.attempted -= 1
        try:
            self._buffers.restore()
        finally:
            self._close()

    def _close(self) -> None:
        for parameter in self._roster.strays:
            parameter.grad = None
        for lane in self._open:
            lane.gradients.clear()
        self._open = []
        self._turns.end()

    def _check_ready(self, microbatches: Sequence[Any] | None) -> None:
        preflight.check_surroundings(self.device)
        empty = microbatches is not None and not microbatches
        preflight.check_window(torn=self._torn, in_one=bool(self._open), empty=empty)

    def _tell(self, findings: Sequence[Finding]) -> None:
        self.findings += findings
        for finding in findings:
            warnings.warn(str(finding), stacklevel=3)

    def _watched(self, inner: AbstractContextManager[object], observation: Observation) -> None:
        """The precision that really ran is known. Once every optimizer was seen, nothing of the watching stays."""
        self.observed = observation
        self._idle &= set(observation.idle_islands)
        self._unseen -= {lane.name for lane in self._open}
        if not self._unseen:
            self._scope = inner
            self._tell([preflight.idle_island(path) for path in sorted(self._idle)])

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {lane.name: lane.optimizer for lane in self._lanes}

    def state_dict(self) -> dict[str, Any]:
        """Everything of a run but the model's own weights."""
        return {
            "precision": self.precision.name,
            "counts": self.counts.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "lanes": {lane.name: lane.state_dict() for lane in self._lanes},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; what does not fit is refused before anything is changed."""
        ours = self.state_dict()
        same_keys("a Stepper's state", ours, state)
        same_keys("optimizers", ours["lanes"], state["lanes"])
        same_keys("precision", [self.precision.name], [state["precision"]])
        same_presence("riders", "ema", ours, state)
        same_keys("counters", ours["counts"], state["counts"])
        for lane in self._lanes:
            lane.check_state(state["lanes"][lane.name])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        for lane in self._lanes:
            lane.load_state_dict(state["lanes"][lane.name])
        self.counts.load_state_dict(state["counts"])
