"""Run one window from beginning to end: applied on every rank, or rolled back on every rank.

`Stepper` is the public class; this is what happens inside. Everything between `_begin` and `_close` may fail, on this
rank or on another one, and must leave the state before the window or the state after it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.observe.precision_check import LookSchedule
from halfstep.precision.island import settle
from halfstep.step import checks
from halfstep.step.agreement import Agreement, Together, Votes, refused_by, token_of
from halfstep.step.ema import Ema, StepCounts
from halfstep.step.loss import LossSlot, loss_and_aux
from halfstep.step.objective import Objective, differentiate, report_of
from halfstep.step.optimizer_slot import MEMBERS, OptimizerSlot, ParamTracker
from halfstep.step.ranks import Ranks
from halfstep.step.report import BUFFER_NOT_FINITE, GUARD, Guard, StepReport
from halfstep.step.rollback import Rollback
from halfstep.step.step_inputs import Holdings, StepInputs
from halfstep.step.sync import LossFunction, Synchroniser
from halfstep.step.window import CallOrder

# -- interrupts -------------------------------------------------------------------------------------------------------
# Handle Ctrl-C in the middle of a step: it leaves the state before the step or after it, never one in between.


# The C functions below the module `signal`, which converts numbers to enums: that takes ten times as long as the calls
# themselves, twice in every step.
_get, _set = _signal.getsignal, _signal.signal
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class Interrupts:
    """A context around a step: Ctrl-C stops forward and backward at once, but is deferred during apply and rollback.

    A handler that was installed before is called in the same way, and restored afterwards. Python runs handlers in the
    main thread only, so steps in other threads are not interrupted.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._installed = False
        self._outer: Any = None
        self._waiting: tuple[int, FrameType | None] | None = None
        self.interruptible = False
        """Whether a window is being computed: it may be interrupted anywhere, and is then rolled back."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or threading.get_ident() != _MAIN:
            return
        outer = _get(_SIGINT)
        # Not callable means ignored, left to the system, or set by code that is not Python: then nothing is deferred.
        if callable(outer):
            self._outer = outer
            self._installed = True
            _set(_SIGINT, self._arrives)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or not self._installed:
            return
        self._installed = False
        _set(_SIGINT, self._outer)
        # Delivered only now, to the restored handler: the step is complete, whatever that handler raises.
        waiting, self._waiting, self.interruptible = self._waiting, None, False
        if waiting is not None:
            self._outer(*waiting)

    def allow(self) -> None:
        """Allow interruption from here on, and deliver a Ctrl-C that is already pending."""
        self.interruptible = True
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._arrives(*waiting)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if not self.interruptible:
            self._waiting = number, frame
            return
        # Before the handler raises: a second Ctrl-C must not interrupt the rollback of the first.
        self.interruptible = False
        self._outer(number, frame)
        self.interruptible = True  # reached only if the handler raised nothing


# -- transaction ------------------------------------------------------------------------------------------------------


ONLY = "loss"
"""The name of the loss if there is one, and of the optimizer if there is one."""


class Transaction:
    """The work of a Stepper between the first micro-batch of a window and its report."""

    model: nn.Module
    ranks: Ranks
    device: torch.device
    guards: list[Guard]
    counts: StepCounts
    ema: Ema | None
    _slots: dict[str, OptimizerSlot]
    _losses: dict[str, LossSlot]
    _clip_norm: float | None
    _on_gradients: Callable[[list[Tensor]], object] | None
    _rollback: Rollback
    _holdings: Holdings
    _tracker: ParamTracker
    _looks: LookSchedule
    _synchroniser: Synchroniser
    _agreement: Agreement
    _together: Together
    _interrupts: Interrupts
    _turns: CallOrder
    _autocast: AbstractContextManager[object]
    _scope: AbstractContextManager[object]

    def __init__(self) -> None:
        self.attempt: StepInputs | None = None
        self._open: list[OptimizerSlot] = []
        self._objectives: list[Objective] = []
        self._last_objectives: list[Objective] = []
        self._paired: dict[tuple[bool, tuple[str, ...]], list[Objective]] = {}
        self._aux: list[Any] = []
        self._todo: list[Callable[[], object]] = []
        self._or_abandon = _OrAbandon(self)
        self._agreed = True
        """Whether the window's agreement is done: from then on all ranks know the same."""
        self._torn, self._concluding, self._begun, self.followed = False, False, 0, 0
        self.bad_buffer: str | None = None
        """The buffer that was non-finite in the last step that was skipped for one."""
        self.hand = False
        """Set on any rank to stop all ranks: they learn it in the next step."""
        self.hands = 0
        """The number of ranks whose `hand` was set in the last step; the same on all ranks."""

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        return {name: slot.optimizer for name, slot in self._slots.items()}

    def _tell(self, findings: Sequence[Finding]) -> None:
        raise NotImplementedError

    def _look_again(self) -> None:
        raise NotImplementedError

    def _take_part(self) -> StepReport | None:
        """Run a window without a batch: join the other ranks' collectives, and add nothing to their gradients."""
        last = self._last_objectives
        # The losses of this window are known to the others only. Those of the last step, for the same optimizers, are
        # the best guess.
        same = [slot for objective in last for slot in objective.slots] == self._open
        self._objectives = last if same else self._pair(None)
        for objective in self._objectives:
            objective.begin()
            objective.loss.take_no_part(self.device, self.ranks, self._begun)
        self._synchroniser.without_batch([slot.gradients for slot in self._open], self._autocast)
        self._rollback.restore()  # FSDP2 reran an older batch, which wrote buffers
        return self._conclude(None, no_batch=True)

    # -- one window, from beginning to end ----------------------------------------------------------------------

    def _begin(self, loss_fn: LossFunction | None, microbatches: Sequence[Any], only: str | None) -> None:
        self._begun += 1
        self._agreed = False
        # A window that some rank will never enter would hang in its first collective, so this comes first.
        self._together.check()
        checks.check_surroundings(self.device)
        checks.check_window(torn=self._torn, in_one=False, empty=loss_fn is not None and not microbatches)
        slots = self._chosen(only)
        self._synchroniser.settle()
        # Before `remember`, which saves the tensors in the lists that this rebuilds.
        self._notice_changes(loss_fn)
        # Inside an outer autocast, even a disabled one, torch would keep casts of the weights beyond the update.
        torch.clear_autocast_cache()
        # Before the first random number is drawn: a replay starts from these states.
        own = self._holdings.generator_states()
        self.attempt = StepInputs.of(loss_fn, microbatches, only, self.device, own)
        self._rollback.remember()
        self._clear_gradients()
        self._last_objectives, self._objectives, self._aux, self._todo = self._objectives, [], [], []
        self._concluding = False
        self.counts.attempted += 1
        # From here on an error rolls the window back; whatever was done before needs no undoing.
        self._open = slots
        self._synchroniser.begin(len(microbatches) if loss_fn else 0)

    def _notice_changes(self, loss_fn: LossFunction | None) -> None:
        """React to changes of the model, or of what the loss function holds, since the last step."""
        came_or_left = self._holdings.look(loss_fn)
        if came_or_left:
            self._rollback.look_beside(self._holdings)
        change = self._tracker.change()
        if change:
            self._follow()
        # Freezing and unfreezing, which GANs do in every step, changes neither the formats nor which tensors are
        # written. Nor does a module without tensors, such as a metric that is passed to the loss function now and then.
        if any(map(_has_tensors, came_or_left)) or change == MEMBERS or self._looks.due(self.counts.applied):
            self._look_again()

    def _chosen(self, only: str | None) -> list[OptimizerSlot]:
        if only is None:
            return list(self._slots.values())
        checks.check_only(only, self.optimizers)
        return [self._slots[only]]

    def _follow(self) -> None:
        """Rebuild what depends on modules and parameters, after some were added, removed or unfrozen.

        `followed` counts how often that happened.
        """
        self.followed += 1
        self._tell(checks.check(self.model, self.optimizers, self.ranks.size))
        settle(self.model)
        self._rollback.follow()
        for slot in self._slots.values():
            slot.follow()
        if self.ema is not None:
            self.ema.follow()
        self._synchroniser = self._synchroniser.follow()
        self._tracker.look()

    def _backward(self, result: Any, divide: int) -> None:
        losses, aux = loss_and_aux(result)
        self._aux.append(aux)
        objectives = self._pair(losses)
        if not self._objectives:
            self._objectives = objectives
            for objective in objectives:
                objective.begin()
            assert self.attempt is not None, "a window is open"
            self.attempt.has(objectives)
        elif objectives is not self._objectives:
            raise WrongUse(
                "one loss and a dict of losses in one window",
                allowed="the same losses for every micro-batch",
                do="return the same names from every call of the loss function",
            )
        differentiate(objectives, losses, divide=divide, ranks=self.ranks, window=self._begun)

    def _pair(self, losses: Any) -> list[Objective]:
        """Match losses with optimizers: one loss trains all optimizers of the step, a dict trains each by its own."""
        several = isinstance(losses, dict) and len(self._open) > 1
        if several and self._synchroniser.backward_goes_everywhere:
            raise WrongUse(
                "several losses in one step of a model under fully_shard",
                allowed="one loss, for one optimizer or several; or several losses in turns",
                do="return their sum, or step(loss_fn, batch, only=name) for each",
            )
        # The same objects each time, so that another kind of losses within one window is noticed by identity.
        key = several, tuple(slot.name for slot in self._open)
        known = self._paired.get(key)
        if known is None:
            groups = [[slot] for slot in self._open] if several else [self._open]
            known = self._paired[key] = [self._objective(group) for group in groups]
        if isinstance(losses, dict) and not all(objective.loss.name in losses for objective in known):
            raise checks.no_loss([o.loss.name for o in known], losses)
        return known

    def _objective(self, slots: list[OptimizerSlot]) -> Objective:
        loss = self._losses[slots[0].name if len(slots) == 1 else ONLY]
        everywhere = len(slots) == len(self._slots) or self._synchroniser.backward_goes_everywhere
        return Objective(loss, slots, clip_norm=self._clip_norm, everywhere=everywhere)

    def _conclude(self, aux: Any, *, no_batch: bool = False) -> StepReport | None:
        # From here on no rank may leave for a reason of its own: Ctrl-C has to wait.
        self._interrupts.interruptible, self._concluding = False, True
        self._synchroniser.finish([slot.gradients for slot in self._open])
        if self._on_gradients is not None:
            # Before the agreement, so that the edited gradients are the ones that are judged and clipped.
            self._on_gradients([p for objective in self._objectives for p in objective.unscale(self.ranks)])
        self._rollback.look()
        agreed = self._agree(Votes(stop=int(self.hand), no_batch=int(no_batch)))
        # Every rank has run out of batches: this window never happened.
        if agreed.no_batch == self.ranks.size:
            self._abandon()
            return None
        report = self._judge(agreed, aux)
        self._decide(report)
        return report

    def _agree(self, mine: Votes) -> Votes:
        """Reach one decision with all ranks; raise RankFailed if one of them gave up the window."""
        bad_buffer, cure = self._rollback.buffers.not_finite(), self._synchroniser.cure
        agreed = self._agreement.on(self._objectives, self._token(), mine, bad_buffer, cure=cure)
        self._agreed = True
        if agreed.abort:
            self._make_anew()
            raise self.ranks.failed(self._begun)
        self.hands = agreed.stop
        return agreed

    def _token(self) -> int:
        which = 0 if len(self._open) == len(self._slots) else 1 + list(self._slots).index(self._open[0].name)
        return token_of(self._begun, which, self.counts.applied)

    def _judge(self, agreed: Votes, aux: Any) -> StepReport:
        """Check that everything is finite, unscale and clip, then ask the guards."""
        objectives = self._objectives
        reason = next((r for r in (objective.reason() for objective in objectives) if r is not None), None)
        # Last, because a non-finite loss explains a non-finite buffer, but not the other way round.
        if reason is None and agreed.bad_buffer and self._bad_buffer():
            reason = BUFFER_NOT_FINITE
        report = report_of(objectives, self.counts, reason, aux)
        if not report.applied:
            return report
        for objective in objectives:
            # Only now: a NaN norm must never become a clip factor.
            objective.ready()
        refused = refused_by(self.guards, report, self.ranks, self._begun)
        return report if refused is None else report_of(objectives, self.counts, GUARD + refused, aux)

    def _bad_buffer(self) -> bool:
        """Return whether this window made a buffer non-finite, here or on another rank."""
        self.bad_buffer = self._rollback.buffers.first_not_finite()
        # The flag on the device does not know whether the buffer was non-finite before the window. One rank can look;
        # several must decide alike, and another one may have found its own.
        return self.bad_buffer is not None or self.ranks.size > 1

    # -- the end of a window ------------------------------------------------------------------------------------

    def _decide(self, report: StepReport) -> None:
        """Apply or roll back, count, adjust the scale, close. Once begun, the work is always finished."""
        # Calls in a list rather than statements: if one of them is interrupted, `_leave` continues with the rest.
        end = [lambda: self.counts.count(report.reason), *(o.adjust for o in self._objectives), self._close]
        if report.applied:
            # The optimizer is not called at all on a skip. Fused kernels that skip by themselves still create state,
            # and fused SGD with momentum leaves uninitialized memory in it. Nor is "applied" decided by a hook on the
            # optimizer, which would fire on such skips too.
            self._apply()
            self._todo = [self._rollback.keep, *end]
        else:
            self._todo = [self._rollback.restore, *end]
        self._work_off()

    def _apply(self) -> None:
        try:
            for objective in self._objectives:
                objective.apply()
            if self.ema is not None:
                everything = len(self._open) == len(self._slots)
                self.ema.update(None if everything else [p for slot in self._open for p in slot.gradients.parameters])
        except BaseException:
            # Some weights are new and some old, and there are no copies of parameters and optimizer state to go back
            # to: a copy would double the memory. So the Stepper refuses to continue.
            self._torn, self._todo = True, [self._close]
            raise

    def _fail(self, error: BaseException) -> None:
        """Inform the other ranks of an error here: every rank drops the window, as if it had never begun."""
        self._interrupts.interruptible = False
        if self.ranks.size > 1 and not self._agreed:
            self._agreed = True
            self._together.fail(self._begun, error, self._complete, self._vote_abort, lambda: self._synchroniser.begun)

    def _complete(self) -> bool:
        """Join the collectives of this window in which the other ranks wait."""
        slots = self._open or list(self._slots.values())
        return self._synchroniser.complete([slot.gradients for slot in slots], self._autocast)

    def _vote_abort(self) -> None:
        if self._synchroniser.asks_anew:
            # Before the vote: once a rank has the vote, it looks for this key.
            self.ranks.ask_anew(self._begun)
        self._agreement.abort(self.device)
        self._make_anew()

    def _make_anew(self) -> None:
        if self.ranks.asked_anew(self._begun):
            self._synchroniser.anew()

    def _abandon(self) -> None:
        """Drop the window after an error: as if it had never begun."""
        if self._open and not self._todo:
            forget = [objective.loss.forget for objective in self._objectives]
            taken_back = [self._rollback.restore, *forget, self._synchroniser.abandon]
            self._todo = [*taken_back, self._uncount, self._close]
        self._work_off()

    def _restore_modes(self) -> None:
        """Restore the modes that the window found: Ctrl-C may arrive while torch leaves `no_grad` or `autocast`."""
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled(self.device.type, False)

    def _uncount(self) -> None:
        self.counts.attempted -= 1

    def _work_off(self) -> None:
        """Run the remaining calls; one that is interrupted stays in the list and is run again."""
        while self._todo:
            self._todo[0]()
            del self._todo[0]

    def _leave(self) -> None:
        """Finish a step on the way out, also after an error: no window stays open."""
        if self._open or self._todo:
            self._interrupts.interruptible = False
            self._restore_modes()
            self._abandon()

    def _close(self) -> None:
        self._clear_gradients()
        self._turns.end()
        self._open = []

    def _clear_gradients(self) -> None:
        for parameter in self._tracker.strays:
            parameter.grad = None
        for slot in self._slots.values():
            # Of all optimizers, not only of those of this step: backward may have reached the parameters of the others.
            slot.gradients.clear()


class _OrAbandon:
    """A context in which any error drops the window, as if it had never begun, and is raised again."""

    def __init__(self, window: Transaction) -> None:
        self._window = window

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self._window._fail(error)
            self._window._leave()


def _has_tensors(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None
