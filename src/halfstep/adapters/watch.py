"""`halfstep.watch`: name the operation and the line of the first non-finite number in a loop that stays as it is.

It observes three moments: the forward pass (the loop's variables), the backward pass (the statements of the loss) and
the step (whether loss and gradients are finite, from one read of the device). A failed step is run again from these
statements, with the batch, the random numbers and the buffers of the step.
"""

from __future__ import annotations

import math
import operator
import re
import shutil
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from halfstep import distributed
from halfstep.adapters.grad_scaler import GradScaler
from halfstep.adapters.loop_code import (
    ForwardPlace,
    FramePlace,
    LoopSlice,
    LoopSource,
    capture_variables,
    copy_frame_variables,
    holds_attributes,
    iterate_user_frames,
    read_frame_column,
    read_frame_place,
)
from halfstep.adapters.loop_loss import LoopLoss, RecordedPass
from halfstep.errors import WrongUse, format_error_line
from halfstep.guard.diagnosis.bad_inputs import PriorSteps
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.diagnosis.trials import Trials
from halfstep.guard.event_text import wrap_text
from halfstep.guard.repair.paste import suggest_code
from halfstep.guard.verdict import WARM_UP, FailedStep, GuardEvent, StepHistory, Verdict, build_origin_key
from halfstep.numbers import format_counted_noun, format_ordinal
from halfstep.observe.backward_calls import (
    are_backward_calls_hidden,
    hide_backward_calls,
    listen_to_backward,
    stop_listening,
)
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.observe.recorder import has_compiled_code
from halfstep.precision.island import find_islands
from halfstep.precision.precision import Precision, resolve_precision_name, widen
from halfstep.printable import escape_unprintable
from halfstep.random_state import collect_torch_rng_states
from halfstep.step.census import Buffers, list_optimizer_parameters, read_version_counter
from halfstep.step.checks import check_no_optimizer_in_backward, check_steps_once
from halfstep.step.earlier_steps import is_stepped
from halfstep.step.experiment.rerun import ReplayConfig
from halfstep.step.optimizer_slot import Gradients, stack_numbers
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, LOSS_NOT_FINITE, OptimizerReport, StepReport
from halfstep.step.step_inputs import LossFactors, LossReach, StepInputs, list_batch_versions

MOST_BATCH_BYTES = 2**28
"""Bytes of the micro-batches of one step that are kept by reference; older ones are dropped first."""
MOST_BUFFER_BYTES = 2**28
"""Bytes of buffers that are copied before a step; of a model with more, none."""
MOST_FORWARDS = 16
"""Forward passes of one backward pass that are kept."""
MOST_DIAGNOSES = 10
"""Diagnoses of a run; further failures are counted."""
SKIPS_IN_A_ROW = 20
"""Skips of a scaler in a row after which a finite loss is no calibration any more."""
TRIED_SKIPS = (1, 2, 3, 5, 8, 13)
"""The places in a row of skips at which a step is repeated in fp32."""
LOOK_EVERY = 200
"""The steps between two searches for numbers that modules count."""
REMEMBERED = 50
"""The losses and learning rates of the last steps, for a diagnosis."""

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    *,
    record: str | Path | None = None,
    tell: Callable[[GuardEvent], None] | None = None,
) -> Watch:
    """Watch a training loop that stays as it is, and name the operation and the line of the first non-finite number.

    ```python
    halfstep.watch(model, optimizer, scaler)  # once, before the loop
    ```

    Each step is checked before the weights change, from one read of the device. The watch changes no number: with a
    scaler the scaler skips the step, and without one `optimizer.step()` runs as written. Between the forward pass and
    the step it keeps references to the loop's variables that the loss depends on (at most 256 MiB of micro-batches),
    a copy of the model's buffers (none above 256 MiB), and the states of torch's generators (5 KiB a micro-batch).

    Args:
        model: The model that the loop calls, in one process.
        optimizer: The optimizer that the loop steps.
        scaler: The loop's `torch.amp.GradScaler` or `halfstep.GradScaler`, if it has one.
        record: A folder that failed steps are recorded in, to run them again; needs the train extra.
        tell: A callback for events; by default they are printed to stderr.

    Returns:
        The watch: `verdict` of the last diagnosed step, `counts`, `skip_nonfinite()`, and `close()`.

    Raises:
        WrongUse: There are several processes, the model is sharded, or the optimizer evaluates the loss several times.
    """
    return Watch(model, optimizer, scaler, record=record, tell=tell)


class _Forward(NamedTuple):
    """The loop at a forward pass."""

    places: list[FramePlace]
    values: dict[int, dict[str, Any]]
    """By place: the variables of that frame."""
    random: list[Tensor]
    autocast: torch.dtype | None


@dataclass(frozen=True)
class _Checked:
    """The numbers of one step."""

    losses: tuple[float, ...]
    finite: bool
    """Whether the gradients are finite."""
    grad_norm: float
    scale: float

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else math.nan

    @property
    def loss_is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


class Watch:
    """The watch of one model and one optimizer; see `halfstep.watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        record: str | Path | None = None,
        tell: Callable[[GuardEvent], None] | None = None,
    ) -> None:
        optimizer, scaler = _unwrap(optimizer, torch.optim.Optimizer), _unwrap(scaler, torch.amp.GradScaler)
        _check_watchable(model, optimizer, scaler)
        _close_earlier(model, optimizer)
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.counts: Counter[str] = Counter()
        """Steps by result: `finite`, and the reasons of others."""
        self.verdict: Verdict | None = None
        """The verdict on the last diagnosed step; None before the first."""
        self._tell = tell or _print_event
        self._record = None if record is None else _build_recorder(Path(record), model, self._say)
        self._gradients = Gradients(list_optimizer_parameters(optimizer))
        self._state = _StateCopies(model)
        self._history: deque[tuple[float, float, float]] = deque(maxlen=REMEMBERED)
        self._sources: dict[CodeType, LoopSource] = {}
        self._slices: dict[tuple[Any, ...], LoopSlice | None] = {}
        self._keys: dict[CodeType, set[str]] = {}
        self._forwards: list[_Forward] = []
        """The forward passes since the last backward pass."""
        self._is_used = False
        """Whether a backward pass came after them."""
        self._located: dict[tuple[Any, ...], ForwardPlace | None] = {}
        self._passes: list[RecordedPass] = []
        self._pending: RecordedPass | None = None
        self._seen: GradientMarks | None = None
        self._unscaled: dict[int, tuple[Tensor, Tensor]] = {}
        self._checked = self._is_lost = self._is_in_scaler = False
        self._has_looked = scaler is not None
        self._followed: dict[str, tuple[Any, Any]] = {}
        """Calls of the scaler that are followed, each with the instance's own attribute before."""
        self._known: Counter[tuple[object, ...]] = Counter()
        """Diagnoses by the cause and its place."""
        self._is_below_one = False
        self._diagnosed: StepReport | None = None
        """The report of a `halfstep.GradScaler` that the verdict is about."""
        self._steps = self._in_a_row = self._diagnoses = self._undiagnosed = 0
        self._last: tuple[StepInputs, Precision] | None = None
        self._start()

    def __repr__(self) -> str:
        if not self._handles:
            return f"<halfstep.watch: closed after {format_counted_noun(self._steps, 'step')}>"
        last = "" if self.verdict is None else f"; {self.verdict.sentence}"
        return f"<halfstep.watch: {format_counted_noun(self._steps, 'step')}, {self.counts['finite']:,} finite{last}>"

    # -- observed calls ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        # This hook keeps the watch alive as long as the optimizer is: the loop need not hold what `watch` returned.
        def on_step(_optimizer: Any, arguments: Any, keywords: Any) -> None:
            if self._is_in_scaler:
                return
            if any(map(callable, (*arguments[1:], *keywords.values()))):
                self._end_at_closure()
            else:
                self._guarded(self._step_starts)

        self._handles: list[Any] = [self.optimizer.register_step_pre_hook(on_step)]
        if not isinstance(self.model, torch.jit.ScriptModule):
            self._handles.append(self.model.register_forward_pre_hook(_ForwardHook(self), prepend=True))
        if self.scaler is not None and self.scaler.is_enabled():
            self._follow_scaler(self.scaler)
        listen_to_backward(self)
        _watches.add(self)

    def close(self) -> None:
        """Stop watching, and remove everything from the model, the optimizer and the scaler."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        stop_listening(self)
        for name, (own, before) in self._followed.items():
            # Another watch may have followed the scaler since: then its calls go through to the scaler.
            held = vars(self.scaler)
            if held.get(name) is own:
                held.pop(name)
                held.update({} if before is None else {name: before})
        self._release()
        _watches.discard(self)

    def _follow_scaler(self, scaler: torch.amp.GradScaler) -> None:
        own, plain_scale, plain_step = weakref.ref(self), scaler.scale, scaler.step

        def scale(outputs: Any) -> Any:
            one = own()
            if are_backward_calls_hidden():
                return outputs
            scaled = plain_scale(outputs)
            if one is not None and one._handles and isinstance(outputs, Tensor):
                one._unscaled[id(scaled)] = scaled, outputs.detach()
            return scaled

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
            one = own()
            if one is None or optimizer is not one.optimizer or not one._handles:
                return plain_step(optimizer, *args, **kwargs)
            return one._scaled_step(plain_step, *args, **kwargs)

        for name, call in (("scale", scale), ("step", step)):
            self._followed[name] = call, vars(scaler).get(name)
            vars(scaler)[name] = call
        if isinstance(scaler, GradScaler):
            scaler.accept_diagnoser(self._diagnose_report)

    def _guarded(self, function: Callable[[], None]) -> None:
        """Call a function of the watch; an error in it ends the watch, and not the run."""
        if are_backward_calls_hidden() or not self._handles:
            return
        try:
            function()
        except Exception as error:
            self.close()
            self._say(f"watch ended, the run continues: {format_error_line(error)}", "warning")

    def _end_at_closure(self) -> None:
        """End the watch of a loop whose optimizer runs forward and backward itself: the check would come too early."""
        self.close()
        if _is_called_by_lightning():
            self._say(
                "watch ended: Lightning runs the backward pass inside of optimizer.step(). Its plugin checks steps: "
                "from halfstep.adapters.lightning import HalfstepPrecision; "
                'step = HalfstepPrecision("bf16"); Trainer(plugins=step, callbacks=[step.callback])'
            )
            return
        self._say(
            "watch ended: optimizer.step(closure) runs backward itself, so there is nothing to check before it. "
            "Call the closure before the step: loss = closure(); optimizer.step()"
        )

    def _end_at_ranks(self) -> None:
        """End the watch at a failure in a group of processes that was formed after it started."""
        self.close()
        self._say(
            f"the {self._step} is not finite, and watch ended: there are {distributed.count_ranks()} processes, "
            "whose reruns would wait for each other. halfstep.Guardian(halfstep.Stepper(model, optimizer)) diagnoses "
            "on all ranks together"
        )

    @property
    def _step(self) -> str:
        """The step in words: a loop's own variable may start at 0."""
        return f"{format_ordinal(self._steps)} step"

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _forward_starts(self) -> None:
        if not self._passes and not self._forwards:
            self._state.renew()
        places: list[FramePlace] = []
        values: dict[int, dict[str, Any]] = {}
        wanted = self._keys
        frames = list(iterate_user_frames(sys._getframe(2)))
        known = any(frame.f_code in wanted for frame in frames)
        for frame in frames:
            if frame.f_code in wanted:
                variables = copy_frame_variables(frame)
                values[len(places)] = capture_variables(variables, frame.f_globals, wanted[frame.f_code])
            elif not known:
                values[len(places)] = capture_variables(copy_frame_variables(frame), frame.f_globals, None)
            places.append(read_frame_place(frame))
        if self._is_used or len(self._forwards) == MOST_FORWARDS:
            self._forwards, self._is_used = self._forwards[1:] * (not self._is_used), False
        random = collect_torch_rng_states(self._device)
        self._forwards.append(_Forward(places, values, random, _read_autocast(self._device)))

    def backward_starts(self, roots: Sequence[Tensor]) -> None:
        """See a backward pass of the program, which may be one of this loop."""
        self._guarded(lambda: self._note_backward(roots))

    def _note_backward(self, roots: Sequence[Tensor]) -> None:
        seen = _mark_gradients(self._gradients.trainable)
        # Gradients that were dropped or written since the last pass: the loop has started a new step.
        if self._passes and seen != self._seen:
            self._drop_passes()
        self._seen = seen
        root = roots[0]
        scaled, loss = self._unscaled.pop(id(root), (root, root.detach()))
        self._unscaled.clear()
        self._pending = self._describe_pass(loss if scaled is root else root.detach())

    def _describe_pass(self, loss: Tensor) -> RecordedPass:
        """Return the inputs for a rerun of the statements that made this loss."""
        frames = list(iterate_user_frames(sys._getframe(3)))
        if frames and not self._has_looked:
            self._look_for_scaler(frames[0])
        plain = RecordedPass(loss if loss.numel() == 1 else None)
        forward = self._find_first_forward(frames)
        if forward is None:
            # A method other than forward was called, or compiled code: the variables as they are now.
            return self._describe_later_pass(plain, frames)
        for frame in frames:
            now = read_frame_place(frame)
            found = next((n for n, place in enumerate(forward.places) if place.is_same_call(now)), None)
            if found is None:
                continue
            key = (now.code, forward.places[found].line, now.line)
            code = self._find_slice(key, frame)
            values = forward.values.get(found)
            if code is None or values is None:
                return plain
            dtype = _read_autocast(self._device)
            return replace(
                plain,
                code=code,
                values={name: values[name] for name in code.keys if name in values}
                | _select_attributes(code.keys, values)
                | capture_variables(copy_frame_variables(frame) if code.late else {}, {}, code.late),
                known=frame.f_globals,
                random=forward.random,
                autocast_around=dtype,
                autocast=dtype or forward.autocast,
                nth=sum(each.code is code and each.random is forward.random for each in self._passes),
            )
        return plain

    def _look_for_scaler(self, frame: FrameType) -> None:
        """Follow the scaler of the loop, if there is one that `watch` was not given; once, at the first backward."""
        self._has_looked = True
        variables = [*copy_frame_variables(frame).values(), *frame.f_globals.values()]
        inner = [each for thing in variables if holds_attributes(thing) for each in vars(thing).values()]
        for thing in (*variables, *inner):
            if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                self.scaler = thing
                self._follow_scaler(thing)
                return

    def _find_first_forward(self, frames: Sequence[FrameType]) -> _Forward | None:
        """Return the first of the forward passes that this round of the loop has made."""
        if len(self._forwards) < 2:
            return self._forwards[-1] if self._forwards else None
        first, later = self._forwards[-1], None
        for forward in reversed(self._forwards):
            shared = next(((p, now) for now in map(read_frame_place, frames) for p in forward.places
                           if p.is_same_call(now)), None)  # fmt: skip
            if shared is None:
                break
            key = (shared[1].code, shared[0].line, shared[1].line)
            if key not in self._located:
                self._located[key] = self._find_source(key[0]).locate(key[1], key[2])
            place = self._located[key]
            if place is None or (later is not None and not place.may_precede(later)):
                break
            first, later = forward, place
        return first

    def _describe_later_pass(self, plain: RecordedPass, frames: Sequence[Any]) -> RecordedPass:
        if not frames:
            return plain
        frame = frames[0]
        code = self._find_slice((frame.f_code, None, frame.f_lineno), frame)
        if code is None:
            return plain
        values = capture_variables(copy_frame_variables(frame), frame.f_globals, code.keys)
        dtype = _read_autocast(self._device)
        return replace(
            plain,
            code=code,
            values=values,
            known=frame.f_globals,
            random=collect_torch_rng_states(self._device),
            autocast_around=dtype,
            autocast=dtype,
        )

    def _find_source(self, code: CodeType) -> LoopSource:
        if code not in self._sources:
            self._sources[code] = LoopSource(code)
        return self._sources[code]

    def _find_slice(self, key: tuple[Any, ...], frame: Any) -> LoopSlice | None:
        if key not in self._slices:
            code, forward, backward = key
            variables = {**frame.f_globals, **copy_frame_variables(frame)}
            column = read_frame_column(frame)
            found = self._slices[key] = self._find_source(code).between(forward, backward, variables, column)
            self._keys.setdefault(code, set()).update(() if found is None else found.keys)
        return self._slices[key]

    def backward_ended(self) -> None:
        """See the end of the pass; it counts if it wrote gradients of this optimizer."""
        self._guarded(self._keep_pass)

    def _keep_pass(self) -> None:
        pending, self._pending = self._pending, None
        now = _mark_gradients(self._gradients.trainable)
        if pending is None or now == self._seen:
            return
        self._seen = now
        self._passes.append(pending)
        self._is_used = True
        self._checked = False
        if len(self._passes) > 1:
            sizes = [each.bytes for each in self._passes]
            for place in range(len(self._passes) - 1):
                if sum(sizes[place:]) > MOST_BATCH_BYTES:
                    # Its loss is still checked; it takes no part in a rerun.
                    self._passes[place] = RecordedPass(self._passes[place].loss)

    def _drop_passes(self) -> None:
        self._passes = []

    def _release(self) -> None:
        """Let go of the batch."""
        self._passes, self._forwards, self._pending, self._is_used = [], [], None, False
        self._unscaled.clear()
        self._gradients.release()

    # -- the check --------------------------------------------------------------------------------------------------

    def skip_nonfinite(self) -> bool:
        """Check the step now; drop the gradients and return True if the loss or a gradient is not finite.

        For a loop without a scaler, in the line before `optimizer.step()`: `if watched.skip_nonfinite(): continue`.
        """
        if self.scaler is not None and self.scaler.is_enabled():
            raise WrongUse(
                "skip_nonfinite() in a loop with a scaler, which skips such steps by itself",
                allowed="a loop without a scaler",
                do="remove the call: scaler.step(optimizer) leaves the weights unchanged",
            )
        checked = self._check(self._read_plain())
        if checked is None:
            self._checked = True
            return False
        self._judge(checked, skipped=True)
        self._gradients.clear()
        self._release()
        return True

    def _step_starts(self) -> None:
        """Check the gradients before the optimizer applies them."""
        if not self._checked:
            checked = self._check(self._read_plain())
            if checked is not None:
                self._judge(checked, skipped=False)
                # From here on every step fails, because the weights do.
                self._is_lost = not checked.finite
        self._checked = False
        self._release()

    def _read_plain(self) -> _Checked:
        losses = [widen(each.loss) for each in self._passes if each.loss is not None]
        self._follow_parameters()
        if not self._gradients.collect():
            return _Checked((), True, 0.0, 1.0)
        *read, norm = _read_numbers([*losses, self._gradients.norm()])
        # The squares of finite gradients may overflow; only then they are read one by one.
        finite = math.isfinite(norm) or self._gradients.first_not_finite() is None
        return _Checked(tuple(read), finite, norm, 1.0)

    def _follow_parameters(self) -> None:
        now = list_optimizer_parameters(self.optimizer)
        known = self._gradients.parameters
        if len(now) != len(known) or any(map(operator.is_not, now, known)):
            self._gradients = Gradients(now)

    def _scaled_step(self, plain_step: Callable[..., float | None], *args: Any, **kwargs: Any) -> float | None:
        scaler = self.scaler
        assert scaler is not None, "it is followed"
        if isinstance(scaler, GradScaler):
            # It has read the numbers of the step by itself, and a skip has restored what it covers.
            result = self._call(plain_step, args, kwargs)
            report = scaler.report
            if report is not None:
                checked = _Checked(
                    (report.loss,), report.reason in (None, LOSS_NOT_FINITE), math.nan, report.loss_scale
                )
                self._guarded(lambda: self._conclude_scaled(checked if not report.applied else None, report))
            return result
        state = scaler._per_optimizer_states[id(self.optimizer)]
        own_kernel = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if state["stage"] is OptState.READY and not own_kernel:
            scaler.unscale_(self.optimizer)  # as the scaler's step itself does first
        self._guarded(lambda: self._conclude_scaled(self._check(self._read_scaled(scaler, state)), None))
        return self._call(plain_step, args, kwargs)

    def _call(self, plain_step: Callable[..., float | None], args: Any, kwargs: Any) -> float | None:
        self._is_in_scaler = True
        try:
            return plain_step(self.optimizer, *args, **kwargs)
        finally:
            self._is_in_scaler = False

    def _read_scaled(self, scaler: torch.amp.GradScaler, state: Mapping[str, Any]) -> _Checked:
        losses = [widen(each.loss) for each in self._passes if each.loss is not None]
        flags = list(state["found_inf_per_device"].values())
        if not flags:
            self._follow_parameters()
            if not self._gradients.collect():
                return _Checked((), True, 0.0, 1.0)
            largest = torch._foreach_norm([g for g in self._gradients.local if g.numel()], math.inf)
            flags = [(~stack_numbers(largest).isfinite()).any().float()]
        scale = scaler._scale
        assert scale is not None, "a loss was scaled"
        *read, bad, size = _read_numbers([*losses, stack_numbers(flags).sum(), scale])
        return _Checked(tuple(read), bad == 0.0, math.nan, size)

    def _check(self, checked: _Checked) -> _Checked | None:
        """Count a step, and return its numbers if it is not finite."""
        self._steps += 1
        if checked.finite and checked.loss_is_finite:
            self.counts["finite"] += 1
            if self._in_a_row:
                self._in_a_row = 0
            rate = self.optimizer.param_groups[0]["lr"]
            self._history.append((checked.loss, checked.grad_norm, rate if isinstance(rate, (int, float)) else 0.0))
            return None
        return checked

    # -- a step that is not finite ----------------------------------------------------------------------------------

    def _conclude_scaled(self, checked: _Checked | None, report: StepReport | None) -> None:
        if report is not None:
            self._steps += 1
            self.counts["finite"] += report.applied
            self._in_a_row = self._in_a_row if checked else 0
        if checked is not None:
            before, self._in_a_row = self._diagnoses, self._in_a_row + 1
            self._judge_scaled(checked)
            self._report_scale(checked)
            self._diagnosed = report if self._diagnoses > before else self._diagnosed
        self._release()

    def _judge_scaled(self, checked: _Checked) -> None:
        """Report a skip of the scaler, unless it is one of those by which it finds its scale."""
        if not checked.loss_is_finite:
            self._judge(checked, skipped=True)
            return
        if checked.scale < self._floor or self._in_a_row >= SKIPS_IN_A_ROW:
            if self._in_a_row <= SKIPS_IN_A_ROW or checked.scale < self._floor:
                self._judge(checked, skipped=True)
            else:
                self.counts[GRADIENT_OVERFLOW] += 1
            return
        is_tried = self._in_a_row in TRIED_SKIPS and distributed.count_ranks() == 1
        inputs = self._build_inputs(checked) if is_tried else None
        if inputs is not None and not self._is_finite_in_fp32(inputs):
            self._judge(checked, skipped=True)
            return
        self.counts[GRADIENT_OVERFLOW] += 1
        if self.counts[GRADIENT_OVERFLOW] == 1:
            self._say(
                f"{self._step}: gradients overflow at a loss scale of {checked.scale:g}; the scaler skips the "
                "step and lowers the scale: normal, and counted from here on",
                "info",
            )

    def _report_scale(self, checked: _Checked) -> None:
        """Report a scale that falls below 1, and a row of skips: the diagnosis of a known cause is one count."""
        row, last = self._in_a_row, self._steps - self._in_a_row
        if row == SKIPS_IN_A_ROW or (row > SKIPS_IN_A_ROW and row & (row - 1) == 0):
            since = f"since the {format_ordinal(last)} step" if last else "since the start"
            self._say(f"{self._step}: {row} skips in a row; the weights are unchanged {since}")
        if checked.scale >= self._floor or isinstance(self.scaler, GradScaler):
            self._is_below_one = False
        elif not self._is_below_one:
            self._is_below_one = True
            self._say(
                f"{self._step}: the loss scale falls below 1: it is {checked.scale:g} in this step, and each skip "
                "lowers it; at such a scale, small gradients become 0"
            )

    @property
    def _floor(self) -> float:
        """The scale at which the next skip leads below 1."""
        return 1.0 / (self.scaler.get_backoff_factor() if self.scaler is not None else 1.0)

    def _is_finite_in_fp32(self, inputs: StepInputs) -> bool:
        with self._rerun():
            trials = Trials(self.model, inputs)
            outcome = trials.run(ReplayConfig(resolve_precision_name("fp32"), scale=1.0))
        return outcome.finite or bool(outcome.error)

    def _judge(self, checked: _Checked, *, skipped: bool) -> None:
        """Diagnose a step, and report it once per cause."""
        reason = LOSS_NOT_FINITE
        if checked.loss_is_finite:
            reason = GRADIENT_OVERFLOW if checked.scale > 1.0 else GRADIENT_NOT_FINITE
        self.counts[reason] += 1
        if self._is_lost:
            return
        if self._diagnoses >= MOST_DIAGNOSES:
            self._count_undiagnosed(reason)
            return
        if distributed.count_ranks() > 1:
            self._end_at_ranks()
            return
        self._diagnoses += 1
        report = self._build_report(reason, checked)
        verdict = self._find_verdict(reason, checked)
        self.verdict = verdict
        cause = _describe_without(bool(self._passes), self._first_bad()) if verdict is None else verdict.sentence
        origin = (cause,) if verdict is None else build_origin_key(verdict)
        self._known[origin] += 1
        if self._known[origin] > 1:
            times = self._known[origin]
            if times & (times - 1) == 0:
                self._say(f"{self._step}: the same cause, {times} times so far")
            return
        facts: dict[str, object] = {"attempt": self._steps, **({} if verdict is None else verdict.as_dict())}
        text = self._write_text(verdict, cause, checked, skipped=skipped)
        self._tell(GuardEvent("verdict", "warning", text, facts))
        if verdict is not None and self._record is not None and self._last is not None:
            inputs, precision = self._last
            placed = tuple(find_islands(self.model))
            with self._state.before_step():
                self._record(FailedStep(inputs, report, precision.name, placed, self._describe_history(), verdict))

    def _count_undiagnosed(self, reason: str) -> None:
        """Print the count of failed steps at 16, 32, 64 and so on."""
        self._undiagnosed += 1
        times = self._diagnoses + self._undiagnosed
        if times & (times - 1) == 0:
            what = reason.replace("_", " ")
            self._say(f"{self._step}: {what}; {times} failed steps so far, {MOST_DIAGNOSES} of them diagnosed")

    def _find_verdict(self, reason: str, checked: _Checked) -> Verdict | None:
        inputs = self._build_inputs(checked)
        if inputs is None:
            return None
        with self._rerun():
            precision = self._find_precision(inputs)
            self._last = inputs, precision
            return self._diagnose(inputs, precision, reason)

    def _diagnose(self, inputs: StepInputs, precision: Precision, reason: str) -> Verdict:
        verdict = diagnose_attempt(
            self.model,
            inputs,
            precision=precision,
            reason=reason,
            history=self._describe_history(),
            compiled=has_compiled_code(self.model, inputs.loss_fn),
            past=PriorSteps(applied=self.counts["finite"]),
            optimizers=(self.optimizer,),
            tell=lambda cost: self._say(str(cost), "warning"),
        )
        return name_loop_variables(verdict)

    def _diagnose_report(self, report: StepReport) -> Verdict:
        """Return the verdict on the last step of a `halfstep.GradScaler`, for `halfstep.diagnose`."""
        if report is self._diagnosed and self.verdict is not None:
            return self.verdict
        raise WrongUse(
            "diagnose(scaler, report) for a step that halfstep.watch has not diagnosed",
            allowed="the last step, with a loss or gradients that are not finite in fp32",
            do="read the message of halfstep.watch: a gradient that overflows only at this loss scale is normal",
        )

    @contextmanager
    def _rerun(self) -> Iterator[None]:
        """Run the step again inside: nothing is observed, and the buffers are those before the step."""
        with hide_backward_calls(), self._state.before_step(), torch.enable_grad():
            yield

    def _build_inputs(self, checked: _Checked) -> StepInputs | None:
        """Return the inputs of a step that can be run again, or None."""
        passes = [each for each in self._passes if each.code is not None]
        if not passes:
            return None
        loss_fn = LoopLoss(passes, self.model, self._device)
        batches = loss_fn.batches
        return StepInputs(
            loss_fn,
            batches,
            None,
            list(passes[0].random),
            {"loss": LossFactors(checked.scale, None)},
            list_batch_versions(batches),
            {"loss": LossReach(self._gradients.trainable, True)},
        )

    def _find_precision(self, inputs: StepInputs) -> Precision:
        """Return the precision of the loop, from the autocast around its passes or inside of its model."""
        assert isinstance(inputs.loss_fn, LoopLoss), "made here"
        dtype = next((each.autocast for each in self._passes if each.code is not None), None)
        if dtype is None:
            with inputs.loss_fn.leave_autocast():
                Trials(self.model, inputs).run(ReplayConfig(resolve_precision_name("fp32"), scale=1.0))
            dtype = inputs.loss_fn.seen_autocast
            inputs.loss_fn.inner_autocast = dtype is not None
            if dtype is None:
                # Weights in bf16, without autocast: the first trained one decides.
                dtype = next((p.dtype for p in self._gradients.trainable), None)
        return resolve_precision_name(_DTYPES.get(dtype, "fp32") if dtype is not None else "fp32")

    def _describe_history(self) -> StepHistory:
        if not self._history:
            return StepHistory()
        losses, norms, rates = zip(*self._history, strict=True)
        return StepHistory(losses, tuple(norm for norm in norms if math.isfinite(norm)), rates)

    def _build_report(self, reason: str, checked: _Checked) -> StepReport:
        part = OptimizerReport(checked.loss, checked.grad_norm, checked.scale)
        applied = self.counts["finite"]
        name = type(self.optimizer).__name__
        return StepReport(
            applied, self._steps, False, reason, False, checked.loss, checked.grad_norm, checked.scale, {name: part}
        )

    def _first_bad(self) -> str:
        self._gradients.collect()
        bad = self._gradients.first_not_finite() if self._gradients.local else None
        names = (strip_compile_wrappers(name) for name, p in self.model.named_parameters() if p is bad)
        return next(names, "")

    def _find_bad_weight(self) -> str:
        """Return the name of a weight that is not finite before the optimizer runs, or an empty text."""
        trained = set(map(id, self._gradients.trainable))
        parameters = ((strip_compile_wrappers(n), p) for n, p in self.model.named_parameters() if id(p) in trained)
        return next((name for name, parameter in parameters if not bool(parameter.isfinite().all())), "")

    # -- the text ---------------------------------------------------------------------------------------------------

    def _write_text(self, verdict: Verdict | None, cause: str, checked: _Checked, *, skipped: bool) -> str:
        what = "the gradients are not finite"
        if not checked.loss_is_finite:
            bad = next(loss for loss in checked.losses if not math.isfinite(loss))
            what = f"the loss is {bad}"
        lines = [f"{self._step}: {what}", f"  cause: {cause}"]
        lines += [f"         {one}" for one in (() if verdict is None else verdict.evidence)]
        code = suggest_code(verdict, loop="torch", optimizers=(self.optimizer,)) if verdict is not None else NO_SOURCE
        if verdict is not None and verdict.cause == WARM_UP:
            lower = math.floor(math.log2(max(checked.scale, 1.0))) - 1
            code = (f"scaler = torch.amp.GradScaler(device.type, init_scale=2.0**{lower})   # starts at a lower scale",)
        lines += [f"  paste: {line}" if n == 0 else f"         {line}" for n, line in enumerate(code)]
        lines += [
            f"  step:  {line}" if n == 0 else f"         {line}"
            for n, line in enumerate(self._outcome(checked, skipped))
        ]
        return "\n".join(lines)

    def _outcome(self, checked: _Checked, skipped: bool) -> list[str]:
        if not skipped and checked.finite:
            return ["optimizer.step() runs as written; all gradients are finite, so the weights are too"]
        bad = self._find_bad_weight()
        if bad:
            how = "the optimizer is not called" if skipped else "optimizer.step() runs as written"
            return [f"{how}; weight {bad} was not finite before this step, so that no skip repairs it"]
        if not skipped:
            return [
                "optimizer.step() runs as written, and the weights become NaN. Two lines prevent it:",
                "    watched = halfstep.watch(model, optimizer)   # keep the result of watch()",
                "    if watched.skip_nonfinite(): continue        # before optimizer.step()",
            ]
        by = "skipped" if self.scaler is None else "skipped by the scaler"
        bad = self._state.first_not_finite() if not isinstance(self.scaler, GradScaler) else ""
        if bad:
            return [
                f"{by}: the weights are unchanged, but buffer {bad} is not finite any more, and evaluation uses it.",
                "    scaler = halfstep.GradScaler(); scaler.include(model)   # in place of torch's: restores it",
            ]
        return [f"{by}: weights and optimizer are unchanged, nothing was lost"]

    def _say(self, text: str, level: Any = "warning") -> None:
        self._tell(GuardEvent("alarm", level, text, {"attempt": self._steps}))


NO_SOURCE = ("stepper = halfstep.Stepper(model, optimizer)   # and report = stepper.step(loss_fn, batch) in the loop",)
"""The code for a loop whose statements cannot be run again."""


def _describe_without(has_backward: bool, parameter: str) -> str:
    """Return the facts on a step that cannot be run again."""
    where = f"the gradient of {parameter} is not finite" if parameter else "a loss is not finite"
    why = "the source of the loop is not available" if has_backward else "no backward() of this step was seen"
    return f"{where}; {why}, so the step cannot be run again"


def name_loop_variables(verdict: Verdict) -> Verdict:
    """Return the verdict with the names of the loop's variables in place of paths in a batch."""

    def named(text: str) -> str:
        text = re.sub(r"(?:the batch(?:\[\d+\])?|batch)\['([\w.]+)'\]", r"\1", text)
        return re.sub(r"micro-batch (\d+)\['([\w.]+)'\]", r"\2 of micro-batch \1", text)

    return replace(verdict, sentence=named(verdict.sentence), evidence=tuple(map(named, verdict.evidence)))


class _ForwardHook:
    """The hook of a watch before a forward pass. A copy of the model, or a saved one, has a hook without effect."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():
            return
        one = None if self._watch is None else self._watch()
        if one is not None and torch.is_grad_enabled():
            one._guarded(one._forward_starts)

    def __deepcopy__(self, _memo: object) -> _ForwardHook:
        return _ForwardHook()

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


class _StateCopies:
    """What a forward pass writes, as before a step: a model's buffers, and the numbers that its modules count."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = Buffers(model)
        self._kept: list[tuple[Tensor, Tensor, int]] = []
        self._owners: list[str] = []
        """The modules of these."""
        self._attributes: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        """All plain numbers of modules, at the last search."""
        self._counted: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        """Those that steps change."""
        self._steps = 0

    def renew(self) -> None:
        """Copy the values written since the last copy."""
        self._renew_buffers()
        # A search for all numbers after the first steps, and rarely later: to read them takes as long as a small step.
        if self._steps in (0, 1, 2) or self._steps % LOOK_EVERY == 0:
            found = self._find_attributes()
            changed = [key for key, (_, value) in found.items() if key in self._attributes
                       and self._attributes[key][1] != value]  # fmt: skip
            self._counted |= {key: found[key] for key in changed}
            self._attributes = found
        self._steps += 1
        self._counted = {key: (holder, holder.get(key[1])) for key, (holder, _) in self._counted.items()}

    def _find_attributes(self) -> dict[tuple[int, str], tuple[dict[str, Any], Any]]:
        return {
            (id(module), name): (vars(module), value)
            for module in self._model.modules()
            for name, value in vars(module).items()
            if type(value) in (int, float, bool) and name != "training"
        }

    @torch.no_grad()
    def _renew_buffers(self) -> None:
        now = [buffer for buffer in self._buffers if _is_copied(buffer)]
        if len(now) != len(self._kept) or any(a is not kept[0] for a, kept in zip(now, self._kept, strict=True)):
            self._kept = []
            if sum(buffer.nbytes for buffer in now) <= MOST_BUFFER_BYTES:
                self._kept = [(b, b.detach().clone(), read_version_counter(b)) for b in now]
                named = self._buffers.named().items()
                self._owners = [name.rpartition(".")[0] for name, buffer in named if _is_copied(buffer)]
            return
        # Running statistics are written without a new version; the number of batches of their module gets one.
        owners = {
            owner
            for owner, (buffer, _, version) in zip(self._owners, self._kept, strict=True)
            if version == -1 or buffer._version != version
        }
        if owners:
            written = [place for place, owner in enumerate(self._owners) if owner in owners]
            torch._foreach_copy_([self._kept[n][1] for n in written], [self._kept[n][0].detach() for n in written])
            for n in written:
                buffer, copy, _ = self._kept[n]
                self._kept[n] = buffer, copy, read_version_counter(buffer)

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Give buffers and numbers their values from before the step, inside."""
        now = [(buffer, buffer.detach().clone()) for buffer, _, _ in self._kept]
        numbers = {key: (holder, holder.get(key[1])) for key, (holder, _) in self._counted.items()}
        with torch.no_grad():
            for buffer, copy, _ in self._kept:
                buffer.detach().copy_(copy)
        _write_attributes(self._counted)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, copy in now:
                    buffer.detach().copy_(copy)
            _write_attributes(numbers)

    def first_not_finite(self) -> str:
        """Return the name of a buffer that the step has made non-finite, or an empty text; reads the device."""
        names = {id(buffer): name for name, buffer in self._buffers.named().items()}
        for buffer, copy, _ in self._kept:
            if buffer.is_floating_point() and bool(copy.isfinite().all()) and not bool(buffer.isfinite().all()):
                return strip_compile_wrappers(names.get(id(buffer), "?"))
        return ""


def _is_copied(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_meta


def _write_attributes(values: Mapping[tuple[int, str], tuple[dict[str, Any], Any]]) -> None:
    for (_, name), (holder, value) in values.items():
        holder[name] = value


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _check_watchable(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: object) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise WrongUse(
            f"watch({type(model).__name__}, {type(optimizer).__name__})",
            allowed="a module and an optimizer, and the scaler of the loop if it has one",
            do="halfstep.watch(model, optimizer, scaler); for two models, one call for each with its optimizer",
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise WrongUse(
            f"watch(..., scaler={type(scaler).__name__})",
            allowed="torch.amp.GradScaler or halfstep.GradScaler",
            do="leave scaler out if the loop does not use one of these",
        )
    if not any(True for _ in model.parameters()):
        raise WrongUse("watch() of a model without parameters", allowed="a model that is trained", do="watch the model")
    if distributed.count_ranks() > 1 or distributed.is_sharded(model.parameters()):
        raise WrongUse(
            f"watch() in a group of {distributed.count_ranks()} processes, whose reruns would wait for each other",
            allowed="a loop in one process",
            do="halfstep.Guardian(halfstep.Stepper(model, optimizer)), which diagnoses on all ranks together",
        )
    if any(optimizer is one.optimizer and model is not one.model for one in _watches):
        raise WrongUse(
            "watch() of an optimizer that is watched already, with another model",
            allowed="one watch for each optimizer",
            do="halfstep.watch(nn.ModuleList([first, second]), optimizer) once, in place of two calls",
        )
    if is_stepped(optimizer):
        raise WrongUse(
            "watch() of an optimizer that a halfstep.Stepper steps, which checks each step by itself",
            allowed="a loop that calls optimizer.step()",
            do="halfstep.Guardian(stepper), whose step() names the cause; or halfstep.diagnose(stepper, report) after "
            "a skip",
        )
    check_steps_once(type(optimizer).__name__, optimizer)
    check_no_optimizer_in_backward(model, {type(optimizer).__name__: optimizer})


def _is_called_by_lightning() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(("lightning.pytorch.", "pytorch_lightning.")):
            return True
        frame = frame.f_back
    return False


def _close_earlier(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """End an earlier watch of the same loop, as of a notebook's cell that runs again."""
    for one in list(_watches):
        if one.optimizer is optimizer and one.model is model:
            one.close()


def _unwrap(thing: Any, kind: type) -> Any:
    """Return the optimizer or the scaler inside a wrapper of accelerate, timm or the like; the thing itself without."""
    for name in ("optimizer", "_scaler", "scaler"):
        inner = getattr(thing, name, None)
        if isinstance(inner, kind):
            return inner
    return thing


GradientMarks = tuple[list[int], list[int]]
_read_grad, _read_version = operator.attrgetter("grad"), operator.attrgetter("_version")


def _mark_gradients(parameters: Sequence[Tensor]) -> GradientMarks:
    """Return the identities and the versions of gradients, which change where a backward pass writes them."""
    gradients = list(map(_read_grad, parameters))
    identities = list(map(id, gradients))
    if id(None) in identities:
        gradients = [gradient for gradient in gradients if gradient is not None]
    return identities, list(map(_read_version, gradients))


def _read_autocast(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the enabled autocast, or None."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _read_numbers(numbers: Sequence[Tensor]) -> list[float]:
    """Read some numbers from the device: the only wait of the host in a step."""
    found: list[float] = stack_numbers([number.reshape(()) for number in numbers]).tolist()
    return found


def _select_attributes(keys: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of objects all of whose attributes may be read, as by a method of theirs."""
    objects = tuple(key.removesuffix("*") for key in keys if key.endswith(".*"))
    return {key: value for key, value in values.items() if objects and key.startswith(objects)}


def _print_event(event: GuardEvent) -> None:
    text = f"halfstep.watch: {escape_unprintable(event.text)}"
    if sys.stderr.isatty():
        text = wrap_text(text, shutil.get_terminal_size().columns)
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _build_recorder(folder: Path, model: nn.Module, say: Callable[[str, str], None]) -> Callable[[FailedStep], None]:
    # Imported only here: it needs the train extra.
    from halfstep.guard.failed_steps.writing import build_step_recorder

    folder.mkdir(parents=True, exist_ok=True)
    return build_step_recorder(folder, model, say)
