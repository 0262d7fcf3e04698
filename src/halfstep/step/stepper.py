"""The Stepper: turns batches into updates that are applied completely or not at all.

Everything between `_begin` and `_close` may fail, on this rank or on another one, and must leave the state before the
window or the state after it: applied on every rank, or rolled back on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any, overload

import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.observe.precision_check import FIRST_AGAIN, PrecisionObserver
from halfstep.precision.converted import count_model_changes
from halfstep.precision.island import mark_inner_islands
from halfstep.random_state import collect_torch_rng_states
from halfstep.step import checks
from halfstep.step.agreement import LocalFlags, RankVotes, read_alone
from halfstep.step.census import drop_gradients
from halfstep.step.divided_loss import find_division
from halfstep.step.experiment.start_check import NOT_FINITE, check_start
from halfstep.step.interrupts import DeferredInterrupts
from halfstep.step.loss import ONLY, split_loss_and_aux
from halfstep.step.objective import Objective, build_step_report, find_refusing_guard
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.report import BUFFER_NOT_FINITE, GRADIENT_NOT_FINITE, GUARD, LOSS_NOT_FINITE, StepReport
from halfstep.step.step_inputs import StepInputs, TensorNames, find_batch_storages, list_batch_versions
from halfstep.step.stepper_base import StepperBase
from halfstep.step.sync import LossFunction
from halfstep.step.window import Window
from halfstep.user_code import find_user_frame

_NEXT_MICROBATCH = "the next micro-batch"


class Stepper(StepperBase):
    """The training step: each update happens completely, in the requested precision, or not at all.

    ```python
    stepper = halfstep.Stepper(model, optimizer, precision="auto", clip_norm=1.0)
    for batch in loader:
        report = stepper.step(loss_fn, batch)
    ```

    `loss_fn(model, batch)` returns a loss, `Counted(sum, count)`, `Out(loss, aux=...)`, or a dict of losses.

    A skipped step leaves every tensor unchanged: parameters and buffers of the model and of the modules that the loss
    function holds, optimizer state, schedule and average. State outside of torch is not rolled back: Python numbers and
    lists, files, metrics; `include()` covers objects with a `state_dict`.
    """

    # -- the function form --------------------------------------------------------------------------------------

    @overload
    def step(self, loss_fn: LossFunction, batch: Any, *, only: str | None = None) -> StepReport: ...

    @overload
    def step(self, loss_fn: None, batch: None = None, *, only: str | None = None) -> StepReport | None: ...

    def step(self, loss_fn: LossFunction | None, batch: Any = None, *, only: str | None = None) -> StepReport | None:
        """Make one update from a batch, or from a `Window` of micro-batches.

        A skipped step does not raise: see `report.reason`.

        Args:
            loss_fn: `loss_fn(model, batch)`, which gets your own module, not a wrapper. On several ranks `step(None)`
                joins without a batch.
            batch: A batch, or a `Window`.
            only: The one optimizer to update, for alternating training.

        Returns:
            The report of the step; None from `step(None)` once no rank has a batch.

        Raises:
            WrongUse: The loss is not usable, or a window is open.
            RankFailed: Another rank failed.
            RanksDisagree: Another rank is at a different step.
            PrecisionNotObserved: Another precision ran.
            StartCheckFailed: The start check refuses the step.
            TornUpdate: The previous update was interrupted.
        """
        if self._open:
            checks.check_window_can_start(torn=False, in_one=True, empty=False)
        # The exact type: a batch may be a list itself.
        microbatches = batch if type(batch) is Window else (batch,)
        with self._interrupts, self.ranks.here():
            try:
                self._begin(loss_fn, microbatches, only)
                if loss_fn is None:
                    self._interrupts.allow()
                    return self._step_without_batch()
                # Scopes are entered and left as a whole: a switch that Ctrl-C leaves set would outlive the step.
                with self._scope:
                    for left, microbatch in zip(range(len(microbatches) - 1, -1, -1), microbatches, strict=True):
                        # Closed before backward: autocast belongs around the forward pass only, and backward uses the
                        # formats that forward chose.
                        with self._autocast:
                            self._interrupts.allow()
                            result = self._synchronizer.run(loss_fn, microbatch, left == 0)
                            self._interrupts.forbid()
                        self._backward(result, divide=len(microbatches))
                        del result  # otherwise this micro-batch's graph would live through the next one's forward
                return self._conclude(_select_aux(self._aux, as_list=microbatches is batch))
            except BaseException as error:
                # While the others still wait in this window's collectives; `_leave` then rolls back locally.
                self._fail(error)
                if isinstance(error, TypeError):
                    checks.check_no_list_of_batches(batch, error)
                raise
            finally:
                self._leave()

    # -- one window, from beginning to end ----------------------------------------------------------------------

    def _begin(self, loss_fn: LossFunction | None, microbatches: Sequence[Any], only: str | None) -> None:
        self._begun += 1
        self._agreed = False
        if self._cost is not None:
            self._cost.begin()
        # A window that some rank will never enter would hang in its first collective, so this comes first.
        self._together.check()
        checks.check_grad_and_autocast(self.device)
        if self._torn or (loss_fn is not None and not microbatches):
            checks.check_window_can_start(torn=self._torn, in_one=False, empty=True)
        slots = list(self._slots.values()) if only is None else self._select_slots(only)
        for slot in self._with_end:
            checks.check_schedule_has_steps(slot.schedule, microbatches)
        self._synchronizer.settle()
        # Before `remember`, which saves the tensors in the lists that this rebuilds.
        self._notice_changes(loss_fn)
        # Inside an outer autocast, even a disabled one, torch would keep casts of the weights beyond the update.
        torch.clear_autocast_cache()
        # Before the first random number is drawn: a replay starts from these states. torch's generators only: reading
        # NumPy's and Python's in every step would take many times as long.
        # Not at all where observed steps drew none: a skipped step finds them unchanged.
        is_observed = isinstance(self._scope, PrecisionObserver)
        states = [] if self._draws is False and not is_observed else collect_torch_rng_states(self.device)
        own = self._holdings.generator_states()
        versions = list_batch_versions(microbatches)
        self.attempt = StepInputs(loss_fn, microbatches, only, states, {}, versions, {}, own_generators=own)
        if self._check:
            self._check_start(self.attempt, slots)
        self._rollback.remember()
        if isinstance(self._scope, PrecisionObserver):
            self._scope.begin()
            self._rollback.observe(find_batch_storages(microbatches), TensorNames(self.model, loss_fn))
        self._clear_gradients()
        if self.weights is not None:
            # Without a loss function the number of micro-batches is not known.
            self.weights.begin(adds_up=self.ranks.size > 1 or loss_fn is None or len(microbatches) > 1)
        self._last_objectives, self._objectives, self._aux, self._pending = self._objectives, [], [], []
        self._divided.begin()
        self._concluding = False
        self.counts.attempted += 1
        # From here on an error rolls the window back; nothing before this point needs a rollback.
        self._open = slots
        self._synchronizer.begin(len(microbatches) if loss_fn else 0)

    def _check_start(self, attempt: StepInputs, slots: list[OptimizerSlot]) -> None:
        """Compare the first micro-batch with fp32, unless the run is a resumed one; raise StartCheckFailed."""
        if not self.counts.attempted:
            self._clear_gradients()
            self._interrupts.allow()
            self.start_check = check_start(
                self.model,
                attempt,
                self.precision,
                pair=lambda losses: self._pair(losses, slots),
                include=self._rollback.included,
                ranks=self.ranks.size,
            )
            self._interrupts.forbid()
            # What the check wrote into the batch was written back, which counts as a write.
            self.attempt = attempt._replace(factors={}, reaches={}, versions=list_batch_versions(attempt.microbatches))
        if self.start_check is not None:
            self._emit(self.start_check.findings)
            # Still due if it is refused: a caller that catches the error must not train on.
            self.start_check.refuse(but_for=NOT_FINITE if self.handles_non_finite else "")
        self._check = False

    def _notice_changes(self, loss_fn: LossFunction | None) -> None:
        """React to changes of the model, or of what the loss function holds, since the last step."""
        came_or_left = self._holdings.look(loss_fn)
        if came_or_left:
            self._census.look_beside(self._holdings.modules)
        self._census.update()
        members, kinds = self._census.members, self._census.kinds
        changed = members != self._followed[0]
        if changed or kinds != self._followed[1]:
            self._follow()
        elif self._prepared != count_model_changes():  # by an island, or by another Stepper over the same model
            self._prepare()
        # Freezing and unfreezing, which GANs do in every step, changes neither the formats nor which tensors are
        # written. Nor does a module without tensors, such as a metric that is passed to the loss function now and then.
        due = self.counts.applied >= self._look_schedule.next_update and self._is_due()
        if due or changed or (came_or_left and any(map(_has_tensors, came_or_left))):
            self._look_again()

    def _is_due(self) -> bool:
        """Return whether this step is to be observed again, by the number of updates."""
        applied, cost, self._cost = self.counts.applied, self._cost, None
        due = self._look_schedule.due(applied)
        # After a jump, as in a resumed run, the tenth update is not meant.
        return due and not (cost is not None and cost.is_high and applied < 10 * FIRST_AGAIN)

    def _select_slots(self, only: str | None) -> list[OptimizerSlot]:
        if only is None:
            return list(self._slots.values())
        checks.check_optimizer_name(only, self.optimizers)
        return [self._slots[only]]

    def _follow(self) -> None:
        """Rebuild what depends on modules and parameters, after some were added, removed or unfrozen.

        `followed` counts how often that happened.
        """
        self.model_version += 1
        self._emit(
            checks.check_model_and_optimizers(
                self.model, self.optimizers, self.ranks.size, narrow=self.weights is not None
            )
        )
        self._prepare()
        mark_inner_islands(self.model)
        if self.weights is not None:
            self.weights.compute_in(self.precision)
        for slot in self._slots.values():
            slot.follow()
        if self.ema is not None:
            self.ema.follow()
        self._synchronizer = self._synchronizer.follow()
        self._emit(self._synchronizer.findings)
        if self.weights is not None:
            self.weights.share(self.ranks)
        self._note_census()

    def _backward(self, result: Any, divide: int) -> None:
        losses, aux = split_loss_and_aux(result)
        self._aux.append(aux)
        # In the three-call form, a window of one micro-batch is known by its first.
        if divide > 1 or not self._call_order.is_single:
            self._divided.note(losses)
        objectives = self._pair(losses, self._open)
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
        last = objectives[-1]
        self._interrupts.allow()
        for objective in objectives:
            loss = losses[objective.loss.name] if isinstance(losses, dict) else losses
            # The losses share one forward graph, which the last backward frees.
            objective.backward(loss, divide, self.ranks, window=self._begun, retain_graph=objective is not last)
        self._interrupts.forbid()

    def _pair(self, losses: Any, slots: list[OptimizerSlot]) -> list[Objective]:
        """Match losses with optimizers: one loss trains all optimizers of the step, a dict trains each by its own."""
        several = isinstance(losses, dict) and len(slots) > 1
        if several and self._synchronizer.backward_goes_everywhere:
            raise WrongUse(
                "several losses in one step of a model under fully_shard",
                allowed="one loss, for one optimizer or several; or several losses in turns",
                do="return their sum, or step(loss_fn, batch, only=name) for each",
            )
        # The same objects each time, so that another kind of losses within one window is noticed by identity.
        key = several, tuple([slot.name for slot in slots])
        known = self._paired.get(key)
        if known is None:
            groups = [[slot] for slot in slots] if several else [slots]
            known = self._paired[key] = [self._objective(group) for group in groups]
        if isinstance(losses, dict) and not all(objective.loss.name in losses for objective in known):
            raise checks.build_missing_loss_error([o.loss.name for o in known], losses)
        return known

    def _objective(self, slots: list[OptimizerSlot]) -> Objective:
        loss = self._losses[slots[0].name if len(slots) == 1 else ONLY]
        everywhere = len(slots) == len(self._slots) or self._synchronizer.backward_goes_everywhere
        return Objective(loss, slots, clip_norm=self.clip_norm, everywhere=everywhere)

    def _conclude(self, aux: Any, *, no_batch: bool = False) -> StepReport | None:
        observed = isinstance(self._scope, PrecisionObserver)
        if isinstance(self._scope, PrecisionObserver):
            self._note_draws()
            self._scope.judge()
        # From here on no rank may leave on its own: Ctrl-C has to wait.
        self._interrupts.forbid()
        self._concluding = True
        if self.ranks.size > 1:
            self._synchronizer.finish([slot.gradients for slot in self._open])
        if self.on_gradients is not None:
            # Before the agreement, so that the edited gradients are the ones that are judged and clipped.
            self.on_gradients([p for objective in self._objectives for p in objective.unscale(self.ranks)])
        bad_buffer = self._read_numbers() if self.ranks.size == 1 else self._agree(no_batch)
        if bad_buffer is None:
            self._abandon()
            return None
        report = self._judge(bad_buffer, aux)
        self._report_writes(report)
        self._report_bad_update(report)
        if self._divided.is_suspicious:
            self._emit(self._divided.find(self._find_division()))
        self._decide(report)
        if self._cost is not None:
            self._cost.end(observed=observed)
        return report

    def _note_draws(self) -> None:
        """Note whether an observed step has drawn random numbers of torch."""
        assert self.attempt is not None, "a window is open"
        before = self.attempt.generators
        drew = not before or not all(map(torch.equal, before, collect_torch_rng_states(self.device)))
        self._draws = drew or bool(self._draws)

    def _find_division(self) -> str:
        """Return the line of the loop, or of the loss function, that divides the loss."""
        assert self.attempt is not None, "a window is open"
        code = getattr(inspect.unwrap(self.attempt.loss_fn), "__code__", None) if self.attempt.loss_fn else None
        return find_division(self._divided.many, code, find_user_frame())

    def _report_writes(self, report: StepReport) -> None:
        """Report what a step wrote and a skip does not restore: the batch, and names that are bound anew."""
        assert self.attempt is not None, "a window is open"
        if not report.applied:
            names = self._holdings.rebound(but_for=self._rollback.with_state) if self.attempt.loss_fn else []
            if names:
                self._emit([checks.build_rebound_tensors_finding(names)])
            if changed := self._rollback.changed_containers():
                self._emit([checks.build_changed_containers_finding(changed)])
        if not self._batch_written and (written := self._rollback.batch_written or self.attempt.written_tensors()):
            self._batch_written = True
            self._emit([checks.build_batch_written_finding(written)])

    def _report_bad_update(self, report: StepReport) -> None:
        """Report weights that are not finite, at the second skip in a row: one skip alone costs no read for it."""
        second = self.counts.skipped_in_a_row == 1
        if second and report.reason in (LOSS_NOT_FINITE, GRADIENT_NOT_FINITE) and not self.handles_non_finite:
            from halfstep.step.bad_update import find_bad_update  # loaded where steps fail

            self._emit(find_bad_update(self.model, list(self._slots.values()), self.counts.applied))

    def _read_numbers(self) -> bool:
        """Read the numbers of the window, on a single rank; return whether a buffer is non-finite."""
        bad_buffer, flags = read_alone(self._objectives, self._rollback.not_finite(), self._rollback.unseen_writes())
        self._rollback.look(flags)
        self._agreed = True
        self.stop_votes, self.save_agreed = int(self.stop_requested), self.save_requested
        return bad_buffer

    def _agree(self, no_batch: bool) -> bool | None:
        """Reach one decision with all ranks; raise RankFailed if one of them gave up the window.

        Returns whether a rank has a non-finite buffer; None if every rank has run out of batches, so that this window
        never happened.
        """
        save = int(self.save_requested and self.ranks.rank == 0)
        mine = RankVotes(stop=int(self.stop_requested), no_batch=int(no_batch), save=save)
        flags = LocalFlags(self._rollback.not_finite(), self._rollback.unseen_writes())
        agreed = self._agreement.on(self._objectives, self._token(), mine, flags, fix=self._synchronizer.fix)
        self._rollback.look(flags.read)
        self._agreed = True
        if agreed.abort:
            self._rebuild_if_requested()
            raise self.ranks.failed(self._begun)
        self.stop_votes, self.save_agreed = agreed.stop, bool(agreed.save)
        return None if agreed.no_batch == self.ranks.size else agreed.bad_buffer > 0

    def _token(self) -> int:
        """Return a number that all ranks share if they are at the same step, for the same optimizers and past."""
        which = 0 if len(self._open) == len(self._slots) else 1 + list(self._slots).index(self._open[0].name)
        # 19 bits, so that squares summed over 2**13 ranks stay below 2**53, where float64 is exact.
        return (self._begun % 256 * 8 + which) * 256 + self.counts.applied % 256

    def _judge(self, bad_buffer: bool, aux: Any) -> StepReport:
        """Check that everything is finite, unscale and clip, then ask the guards."""
        objectives = self._objectives
        reason = None
        for objective in objectives:
            reason = objective.reason() if reason is None else reason
        # Last, because a non-finite loss explains a non-finite buffer, but not the other way round.
        if reason is None and bad_buffer and self._has_bad_buffer():
            reason = BUFFER_NOT_FINITE
        report = build_step_report(objectives, self.counts, reason, aux)
        if self.weights is not None:
            report = report._replace(gradient_format=self.weights.gradient_format)
        if not report.applied:
            if self.keep_gradients:
                for objective in objectives:
                    objective.unscale_skipped()
            return report
        for objective in objectives:
            # Only now: a NaN norm must never become a clip factor.
            objective.ready()
        refused = find_refusing_guard(self.guards, report, self.ranks, self._begun)
        if refused is None:
            return report
        return build_step_report(objectives, self.counts, GUARD + refused, aux)._replace(
            gradient_format=report.gradient_format
        )

    def _has_bad_buffer(self) -> bool:
        """Return whether this window made a buffer non-finite, here or on another rank."""
        self.bad_buffer = self._rollback.first_not_finite()
        # The flag on the device does not show whether the buffer was non-finite before the window. A single rank can
        # look; several ranks must make the same decision, and another one may have a bad buffer of a different name.
        return self.bad_buffer is not None or self.ranks.size > 1

    def _step_without_batch(self) -> StepReport | None:
        """Run a window without a batch: join the other ranks' collectives, and add nothing to their gradients."""
        last = self._last_objectives
        # The losses of this window are known to the others only. Those of the last step, for the same optimizers, are
        # the best guess.
        same = [slot for objective in last for slot in objective.slots] == self._open
        self._objectives = last if same else self._pair(None, self._open)
        for objective in self._objectives:
            objective.begin()
            objective.loss.begin_without_batch(self.device, self.ranks, self._begun)
        self._synchronizer.without_batch([slot.gradients for slot in self._open], self._autocast)
        self._rollback.restore()  # FSDP2 reran an older batch, which wrote buffers
        return self._conclude(None, no_batch=True)

    # -- the end of a window ------------------------------------------------------------------------------------

    def _decide(self, report: StepReport) -> None:
        """Apply or roll back, count, adjust the scale, close. Once started, the work is always finished."""
        # Calls in a list rather than statements: if one of them is interrupted, `_leave` continues with the rest.
        close = self._close_with_gradients if self.keep_gradients else self._close
        end = [lambda: self.counts.count(report.reason), *(o.adjust for o in self._objectives), close]
        if report.applied:
            # The optimizer is not called at all on a skip. Fused kernels that skip by themselves still create state,
            # and fused SGD with momentum leaves uninitialized memory in it. Nor is "applied" decided by a hook on the
            # optimizer, which would fire on such skips too.
            self._apply()
            self._pending = [self._rollback.keep, *end]
        else:
            if self.attempt is not None and not self.attempt.generators:
                self.attempt = self.attempt._replace(generators=collect_torch_rng_states(self.device))
            self._pending = [self._rollback.restore, *end]
        self._run_pending()

    def _apply(self) -> None:
        try:
            for objective in self._objectives:
                for slot in objective.slots:
                    slot.apply()
            if self.ema is not None:
                everything = len(self._open) == len(self._slots)
                self.ema.update(None if everything else [p for slot in self._open for p in slot.gradients.parameters])
        except BaseException:
            # Some weights are new and some old, and there are no copies of parameters and optimizer state to go back
            # to: a copy would double the memory. So the Stepper refuses to continue.
            self._torn, self._pending = True, [self._close]
            raise

    def _fail(self, error: BaseException) -> None:
        """Inform the other ranks of an error here: every rank drops the window and restores the state before it."""
        self._interrupts.forbid()
        if self.ranks.size > 1 and not self._agreed:
            self._agreed = True
            self._together.fail(self._begun, error, self._complete, self._vote_abort, lambda: self._synchronizer.begun)

    def _complete(self) -> bool:
        """Join the collectives of this window in which the other ranks wait."""
        slots = self._open or list(self._slots.values())
        return self._synchronizer.complete([slot.gradients for slot in slots], self._autocast)

    def _vote_abort(self) -> None:
        if self._synchronizer.needs_rebuild:
            # Before the vote: once a rank has the vote, it looks for this key.
            self.ranks.request_rebuild(self._begun)
        self._agreement.abort(self.device)
        self._rebuild_if_requested()

    def _rebuild_if_requested(self) -> None:
        if self.ranks.rebuild_requested(self._begun):
            self._synchronizer.rebuild()

    def _abandon(self) -> None:
        """Drop the window after an error and restore the state before it."""
        if self._open and not self._pending:
            forget = [objective.loss.forget for objective in self._objectives]
            taken_back = [self._rollback.look_after_error, self._rollback.restore, *forget, self._synchronizer.abandon]
            self._pending = [*taken_back, self._uncount, self._close]
        self._run_pending()

    def _uncount(self) -> None:
        self.counts.attempted -= 1

    def _run_pending(self) -> None:
        """Run the remaining calls; one that is interrupted stays in the list and is run again."""
        pending = self._pending
        while pending:
            pending[0]()
            del pending[0]

    def _leave(self) -> None:
        """Finish a step on the way out, also after an error: no window stays open."""
        if self._open or self._pending:
            self._interrupts.forbid()
            # The modes that the window found: Ctrl-C may arrive while torch leaves `no_grad` or `autocast`.
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled(self.device.type, False)
            self._abandon()

    def _close(self) -> None:
        self._clear_gradients()
        self._end_window()

    def _close_with_gradients(self) -> None:
        """Close the window and leave its gradients to the loop, until the next window starts."""
        own = set(map(id, self._open))
        self._clear_gradients(but_for=own)
        for slot in self._open:
            slot.gradients.release()
        self._end_window()

    def _end_window(self) -> None:
        self._holdings.release()
        self._call_order.end()
        self._open = []

    def _clear_gradients(self, but_for: Collection[int] = ()) -> None:
        if self._census.unowned:
            drop_gradients(self._census.unowned)
        for slot in self._slots.values():
            # Of all optimizers, not only of those of this step: backward may have reached the parameters of the others.
            if not but_for or id(slot) not in but_for:
                slot.gradients.clear()

    # -- the form for loops that cannot be turned inside out ----------------------------------------------------

    def forward(
        self, *, last: bool = True, only: str | None = None, rerun: tuple[LossFunction, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Enclose your own forward pass and loss.

        Args:
            last: Whether this is the last micro-batch of the window; gradients are synchronized in it, and only
                `apply()` or `discard()` may follow its backward. Pass False for all others.
            only: The one optimizer to update, for alternating training.
            rerun: A loss function and a batch that repeat this forward pass: with them for every micro-batch, a
                Guardian can diagnose a skipped step.

        Returns:
            A context for one forward pass.

        Raises:
            WrongUse: The call is out of order, or weights or gradients were changed since the last `backward()`; raised
                on entering the context.
        """
        return _ForwardPass(self, self._interrupts, last=last, only=only, rerun=rerun)

    def _check_forward(self, only: str | None) -> None:
        """Raise WrongUse if a forward pass for this optimizer is out of order; nothing is changed."""
        if self._open:
            self._call_order.check_forward([slot.name for slot in self._select_slots(only)])

    def _enter_forward(
        self, *, last: bool, only: str | None, rerun: tuple[LossFunction, Any] | None, scopes: ExitStack
    ) -> None:
        """Start a forward pass, and a window if none is open."""
        if not self._open:
            self._begin(None, (), only)
        elif self._call_order.adds_up:
            weights_moved, gradients_moved = self._call_order.moved(self._open)
            stepped = weights_moved and self._call_order.stepped(self._open)
            self._refuse_foreign_calls(stepped, gradients_moved, before=_NEXT_MICROBATCH)
        self._call_order.forward(last=last, names=[slot.name for slot in self._open])
        if rerun is not None:
            assert self.attempt is not None, "a window is open"
            self.attempt = self.attempt.with_microbatch(*rerun)
        for scope in (self._synchronizer.forward(last), self._scope, self._autocast):
            scopes.enter_context(scope)

    def backward(self, loss: Any) -> None:
        """Run backward; call this instead of `loss.backward()`.

        The number of micro-batches is unknown here, so gradients are divided at the end; fp16 overflows slightly
        earlier.

        Args:
            loss: The mean loss of the micro-batch, undivided.

        Raises:
            WrongUse: The call is out of order, the loss is not usable, or gradients of earlier micro-batches were
                cleared.
        """
        self._call_order.check_backward()
        with _WindowCall(self, self._interrupts):
            if self._call_order.adds_up:
                # Loss code may edit gradients and restore them; `zero_grad()` in front of backward drops them.
                self._refuse_foreign_calls(False, self._call_order.lost(self._open), before=_NEXT_MICROBATCH)
            with self._scope:
                self._backward(loss, divide=1)
            self._call_order.backward(self._open)

    def apply(self) -> StepReport:
        """Conclude the window: unscale, check, clip, update, report.

        Returns:
            The report of the step.

        Raises:
            WrongUse: Weights or gradients were changed since `backward()`; other errors as in `step`.
        """
        self._call_order.check_apply()
        with _WindowCall(self, self._interrupts):
            self._refuse_foreign_calls(*self._call_order.moved(self._open), before="apply()")
            report = self._conclude(None)
            assert report is not None, "this rank had a batch"
            return report

    def _refuse_foreign_calls(self, weights_moved: bool, gradients_moved: bool, *, before: str) -> None:
        if weights_moved:
            self._rollback.accept_updates()
        checks.check_no_foreign_calls(weights_moved, gradients_moved, before=before)

    def discard(self) -> None:
        """Drop a window opened with `forward()` and restore the state before it."""
        with self._interrupts:
            self._abandon()

    def _abandon_after(self, error: BaseException) -> None:
        """Drop an open window after an error: the other ranks learn of it, and the state before it is restored."""
        try:
            self._fail(error)
        finally:
            self._leave()


class _WindowCall:
    """The context of a call of the three-call form: any error, and Ctrl-C on its way in or out, drops the window."""

    def __init__(self, stepper: Stepper, interrupts: DeferredInterrupts) -> None:
        self._stepper, self._interrupts = stepper, interrupts
        self._here = stepper.ranks.here()

    def __enter__(self) -> None:
        try:
            self._interrupts.__enter__()
        except BaseException as error:
            self._abandon(error)
            raise
        self._here.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._interrupts.forbid()
        try:
            if error is not None:
                self._stepper._abandon_after(error)
        finally:
            self._here.__exit__(None, None, None)
            self._leave()

    def _leave(self) -> None:
        try:
            self._interrupts.__exit__()
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        with self._interrupts, self._stepper.ranks.here():
            if self._stepper.in_window:
                self._stepper._abandon_after(error)


class _ForwardPass(_WindowCall):
    """The context of one forward pass and its loss."""

    def __init__(
        self,
        stepper: Stepper,
        interrupts: DeferredInterrupts,
        *,
        last: bool,
        only: str | None,
        rerun: tuple[LossFunction, Any] | None,
    ) -> None:
        super().__init__(stepper, interrupts)
        self._last, self._only, self._rerun = last, only, rerun
        self._scopes = ExitStack()

    def __enter__(self) -> None:
        self._stepper._check_forward(self._only)
        super().__enter__()
        try:
            self._stepper._enter_forward(last=self._last, only=self._only, rerun=self._rerun, scopes=self._scopes)
            self._interrupts.allow()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._interrupts.forbid()
        try:
            self._scopes.__exit__(kind, error, trace)
        except BaseException as raised:
            super().__exit__(type(raised), raised, raised.__traceback__)
            raise
        super().__exit__(kind, error, trace)


def _has_tensors(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _select_aux(found: list[Any], *, as_list: bool) -> Any:
    if not as_list:
        return found[0]
    return found if any(aux is not None for aux in found) else None
