"""A GradScaler for existing AMP loops: torch's calls and arithmetic, with atomic updates.

    scaler = halfstep.GradScaler("cuda")                # was: torch.amp.GradScaler("cuda")
    scaler.include(model, scheduler, ema)               # a skip rolls these back or holds them

It derives from `torch.amp.GradScaler`: scaling, unscaling and the scale updates are torch's own. This class only
decides whether an optimizer steps, from one device read and with the same decision on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.autograd.graph import increment_version

from halfstep.adapters.included import IncludedObjects, Moves, find_moving_methods, skip_methods_without_update
from halfstep.adapters.scaled_backward import ScaledBackward
from halfstep.adapters.scaler_slot import ScalerSlot, build_empty_update_error
from halfstep.errors import PrecisionRefused, StateMismatch, WrongUse
from halfstep.formats import FP32, widest_dtype
from halfstep.step.agreement import LocalFlags
from halfstep.step.census import list_optimizer_parameters
from halfstep.step.ema import StepCounts
from halfstep.step.optimizer_slot import move_number_to_device
from halfstep.step.ranks import Ranks
from halfstep.step.report import (
    BUFFER_NOT_FINITE,
    GRADIENT_NOT_FINITE,
    GRADIENT_OVERFLOW,
    GUARD,
    LOSS_NOT_FINITE,
    OptimizerReport,
    StepReport,
)

if TYPE_CHECKING:
    from halfstep.finding import Finding
    from halfstep.guard.verdict import Verdict
    from halfstep.precision.precision import Precision

NOT_STEPPED = GUARD + "loop"
"""The reason of an update that the loop itself left out: it called `unscale_` and `update`, and no `step`."""


class _AgreedNumbers(NamedTuple):
    """The numbers of one decision, the same on all ranks."""

    finite: bool
    loss: float | None
    """None if no backward pass of a scaled loss was seen."""
    bad_buffer: bool
    scale: float
    norms: list[float]


def _resolve_precision(asked: object) -> Precision:
    from halfstep.precision.names import parse_precision  # with the first scaler, and not with the class
    from halfstep.precision.precision import resolve_precision_name

    return resolve_precision_name(parse_precision(asked).name)


def _report_device_findings(name: str, device: str) -> tuple[Finding, ...]:
    # Imported here: the tables of devices are long, and a scaler that is not enabled has no use for them.
    from halfstep.precision.hardware import list_device_types
    from halfstep.precision.select import report_precision_findings

    return report_precision_findings(name, device) if str(device).split(":")[0] in list_device_types() else ()


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose skipped updates change nothing, in fp16, bf16 and fp32.

    `report` is the `StepReport` of the last decision, None before the first; `counts` counts decisions and the reasons
    of skips. `findings` has `precision.slow` if the device emulates the precision. Calls out of order raise WrongUse
    with the name of the call, instead of torch's AssertionError or RuntimeError; so do gradients written before
    `unscale_`, a direct `optimizer.step()`, and a backward pass into unscaled gradients.

    Args:
        device: As in torch.
        init_scale: As in torch.
        growth_factor: As in torch.
        backoff_factor: As in torch.
        growth_interval: As in torch.
        enabled: As in torch.
        precision: The format of the loop's own autocast. With "bf16" or "fp32" nothing is scaled, and the finite check
            still works.
        floor: The smallest scale; torch's can fall to 0.0. Lowered if necessary to include `init_scale`.
        cap: The largest scale. Raised if necessary to include `init_scale`.
        process_group: The group of ranks that decide together; by default all ranks.

    Raises:
        PrecisionRefused: The device cannot run the precision, or is known to give wrong numbers.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        precision: object = "fp16",
        floor: float = 1.0,
        cap: float = 2.0**24,
        process_group: Any = None,
    ) -> None:
        self.precision = _resolve_precision(precision)
        name = self.precision.name
        if self.precision.changes_model:
            raise PrecisionRefused(
                f"GradScaler with precision={name!r}, which converts layers of a model that it does not know",
                allowed="bf16, fp16, fp32 and tf32",
                do=f"Stepper(model, optimizer, precision={name!r})",
            )
        scale = init_scale if self.precision.scaled else 1.0
        super().__init__(device, scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.findings = _report_device_findings(name, device) if self._enabled else ()
        self.floor, self.cap = min(floor, scale), max(cap, scale)
        self.counts = StepCounts()
        self._start(process_group)

    def _start(self, process_group: Any) -> None:
        """Initialize the state that is never saved: windows, optimizers, ranks."""
        self.report: StepReport | None = None
        self._process_group = process_group
        self._ranks: Ranks | None = None
        self._slots: dict[int, ScalerSlot] = {}
        self._included, self._backward = IncludedObjects(), ScaledBackward()
        self._stepping: torch.optim.Optimizer | None = None
        self._last_scale: float | None = None
        self._adjusted_at = 0
        self._constants: tuple[Tensor, Tensor] | None = None
        self._diagnoser: weakref.WeakMethod[Callable[[StepReport], Verdict]] | None = None

    def accept_diagnoser(self, diagnoser: Callable[[StepReport], Verdict]) -> None:
        """Let `halfstep.diagnose` ask a bound method for the verdict on a step, such as one of `halfstep.watch`."""
        self._diagnoser = weakref.WeakMethod(diagnoser)

    def diagnose_report(self, report: StepReport) -> Verdict:
        """Return the verdict on the last step, for `halfstep.diagnose`; raise WrongUse if nothing watches the loop."""
        diagnoser = None if self._diagnoser is None else self._diagnoser()
        if diagnoser is None:
            raise WrongUse(
                "diagnose(scaler, report): a GradScaler sees neither the batch nor the loss function of a step",
                allowed="a scaler whose loop is watched, or a Stepper",
                do="halfstep.watch(model, optimizer, scaler) once, before the loop: it prints the cause by itself",
            )
        return diagnoser(report)

    def include(self, *things: Any, hold: str | Literal[False] | None = None) -> None:
        """Make a skip roll these back, or hold them.

        Buffers of a module, and the state of an object with `state_dict()`, are restored to their values before the
        window's first forward pass. A schedule or a weight average does nothing when the loop calls it after a skip; a
        module counts as an average if it holds a copy of another module's parameters. `hold` names the method for
        unknown classes, and is False for a module that only looks like an average. An optimizer is registered before
        its first step. Raises WrongUse for other objects and for ambiguous modules.
        """
        others = [*self._included.modules, *(thing for thing in things if isinstance(thing, nn.Module))]
        for thing in things if self._enabled else ():
            if isinstance(thing, torch.optim.Optimizer):
                self._slot(thing)
                continue
            methods = find_moving_methods(thing, hold, others)
            if methods:
                skip_methods_without_update(thing, methods, self._moves_of(getattr(thing, "optimizer", None)))
            # A teacher that its own method moves runs in training mode too, and has statistics.
            if not methods or (isinstance(thing, nn.Module) and any(True for _ in thing.parameters())):
                self._included.add(thing)

    def _moves_of(self, optimizer: Any) -> Callable[[], Moves]:
        """Return a count of the decisions about one optimizer; about all of them if it is not known."""

        def moves() -> Moves:
            slots = [slot] if (slot := self._slots.get(id(optimizer))) else self._slots.values()
            return sum(s.attempted for s in slots), sum(s.applied for s in slots)

        return moves

    # -- torch's calls ------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Return the loss, or the losses, multiplied by the scale; raise as torch does for anything else."""
        if not self._enabled:
            return outputs
        self._drop_owed()
        if not isinstance(outputs, (Tensor, list, tuple)) and isinstance(outputs, Iterable):
            outputs = list(outputs)  # a generator can be walked once, and torch would do so later
        scaled = super().scale(outputs) if self.precision.scaled else outputs
        for loss, ready in zip(_iterate_tensors(outputs), _iterate_tensors(scaled), strict=True):
            self._backward.follow(ready, loss)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and look for non-finite ones; the host does not wait.

        Raises WrongUse for a call out of order, for gradients that were written since backward, and for an optimizer
        without any gradient.
        """
        if not self._enabled:
            return
        slot = self._slot(optimizer)
        self._check(slot, "unscale_")
        state = self._per_optimizer_states[slot.key]
        if self.precision.scaled:
            super().unscale_(optimizer)
            if not slot.gradients.sharded:
                # torch's kernel writes them without a new version, and they must differ from the scaled ones.
                increment_version([p.grad for p in slot.gradients.parameters if p.grad is not None])
        slot.unscaled = slot.awaits = True
        state["stage"] = OptState.UNSCALED
        self._backward.unscaled(slot.key, slot.gradients.parameters)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer if its gradients, the loss and the included buffers are finite on all ranks.

        On a skip the optimizer is not called, not even a fused one, and included objects are rolled back or held. See
        `report`. Optimizers already passed to `unscale_` share one decision. Raises WrongUse like `unscale_`, and for a
        closure.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        slot = self._slot(optimizer)
        slot.check_closure([*args, *kwargs.values()])
        if slot.verdict is None or self._stage(slot) is OptState.STEPPED:
            self._take(slot)
            self._decide([other for other in self._slots.values() if other.awaits])
        assert slot.verdict is not None, "just decided"
        result = None
        if slot.verdict.applied:
            with self._step_of(optimizer):
                result = slot.call(self, args, kwargs)
        self._per_optimizer_states[slot.key]["stage"] = OptState.STEPPED
        self._backward.stepped(slot.key)
        slot.note_judged()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after the window's last step, as torch does, within [floor, cap], and close the window.

        It is held after a loss that is not finite: a lower scale could not have helped. Raises WrongUse if nothing was
        unscaled or stepped since the last call.
        """
        if not self._enabled:
            return
        waiting = [slot for slot in self._slots.values() if self._stage(slot) is OptState.UNSCALED]
        # accelerate calls update() after each of several optimizers: those that were decided on together with the
        # first keep their decision until the next loss is scaled.
        owed = [slot for slot in waiting if slot.verdict is not None]
        for slot in waiting:
            if slot.verdict is None:
                self._close_unstepped(slot)
        decided = [slot.verdict for slot in self._slots.values() if slot.verdict is not None]
        if not decided:
            raise build_empty_update_error()
        reasons = [report.reason for report in decided if report.attempt > self._adjusted_at]
        if self.precision.scaled and (reasons or new_scale is not None):
            self._adjust(new_scale, reasons)
        self._adjusted_at, self._last_scale = self.counts.attempted, None
        self._close_window(owed)

    def _close_window(self, owed: Sequence[ScalerSlot]) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for slot in self._slots.values():
            slot.verdict = slot.verdict if slot in owed else None
        for slot in owed:
            self._per_optimizer_states[slot.key]["stage"] = OptState.UNSCALED
        self._backward.end()
        self._included.window_over()

    def _drop_owed(self) -> None:
        """Forget steps of the window before that never came."""
        for slot in self._slots.values():
            if slot.verdict is not None and not self._backward.asked:
                slot.verdict = None
                self._per_optimizer_states.pop(slot.key, None)

    def accept_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Accept gradients that the loop wrote between backward and `unscale_`, such as their sum over ranks.

        They still carry the scale, so only linear operations are valid here: a sum or a mean, not clipping.
        """
        if self._enabled:
            self._backward.accept(self._slot(optimizer).gradients.parameters)

    # -- the order of calls -------------------------------------------------------------------------------------

    def _slot(self, optimizer: torch.optim.Optimizer) -> ScalerSlot:
        """Return the slot of an optimizer; the first call starts watching its `step()`."""
        slot = self._slots.get(id(optimizer))
        if slot is None:
            alike = [type(known.optimizer).__name__ for known in self._slots.values()].count(type(optimizer).__name__)
            name = type(optimizer).__name__ + (f" {alike + 1}" if alike else "")
            slot = self._slots[id(optimizer)] = ScalerSlot(name, optimizer)
            optimizer.register_step_pre_hook(_StepHook(self))
        elif _have_same_tensors(list_optimizer_parameters(optimizer), slot.gradients.parameters):
            return slot
        slot.follow()
        self._backward.watch(p for known in self._slots.values() for p in known.gradients.parameters)
        return slot

    def _stage(self, slot: ScalerSlot) -> Any:
        return self._per_optimizer_states[slot.key]["stage"] if slot.key in self._per_optimizer_states else None

    def _check(self, slot: ScalerSlot, call: str) -> None:
        """Raise WrongUse for a call out of order, or for gradients that are not those of a scaled backward."""
        slot.check_turn(call, self._stage(slot), asked=self._backward.asked or not self.precision.scaled)
        written = self._backward.written(slot.gradients.parameters) if self.precision.scaled else []
        slot.check_gradients(written)

    def _check_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise WrongUse for an `optimizer.step()` that does not come from this scaler, while it has a say in it."""
        slot = self._slots.get(id(optimizer))
        if slot is None or self._stepping is optimizer:
            return
        owned = slot.gradients.parameters
        in_window = self._stage(slot) in (OptState.UNSCALED, OptState.STEPPED) or self._backward.still_scaled(owned)
        # After update() the same gradients may still be there: applied a second time, or those of a skipped step.
        if in_window or slot.was_judged():
            raise slot.stepped_beside()

    # -- the decision -------------------------------------------------------------------------------------------

    def _take(self, slot: ScalerSlot) -> None:
        """Look at the gradients, unless `unscale_` has."""
        if self._stage(slot) is OptState.UNSCALED:
            return
        if not self.precision.scaled or not getattr(slot.optimizer, "_step_supports_amp_scaling", False):
            self.unscale_(slot.optimizer)
            return
        # A fused optimizer divides by the scale in its kernel, as with torch's own scaler, to the same bits.
        self._check(slot, "step")
        self._check_inf_per_device(slot.optimizer)
        slot.unscaled, slot.awaits = False, True

    def _constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return 0 and 1 on a device, made once."""
        if self._constants is None or self._constants[0].device != device:
            self._constants = torch.zeros((), device=device), torch.ones((), device=device)
        return self._constants

    @property
    def _group(self) -> Ranks:
        if self._ranks is None:
            # Not in the constructor: loops build their scaler before the process group, too.
            self._ranks = Ranks(self._process_group)
        return self._ranks

    def _decide(self, slots: Sequence[ScalerSlot]) -> None:
        """Decide on some optimizers together, with all ranks, from one read of the device; count and report it."""
        agreed = self._agree(slots)
        self._last_scale = agreed.scale
        reason = self._reason(agreed)
        finite = reason not in (LOSS_NOT_FINITE, GRADIENT_OVERFLOW, GRADIENT_NOT_FINITE)
        loss = math.nan if agreed.loss is None else agreed.loss
        self._conclude(slots, reason, finite=finite, loss=loss, scale=agreed.scale, norms=agreed.norms)

    def _agree(self, slots: Sequence[ScalerSlot]) -> _AgreedNumbers:
        """Sum this rank's numbers over all ranks, and read them: the only wait of the host, and one collective."""
        ranks = self._group
        with ranks.here():
            # Squares can be summed over ranks; of a single rank, torch's own norm to the bit.
            norms = [slot.norm_now(squared=ranks.size > 1) for slot in slots]
        device = norms[0].device
        numbers = [*self._numbers(slots, device), *norms, *self._buffer_flags(ranks.size, device)]
        flags = LocalFlags(None, self._included.unseen_writes())
        if ranks.size == 1:
            agreed = flags.read_alone(numbers, device)
        else:
            # Stacked as they are, and widened once: this is done in every step.
            vector = torch.stack([move_number_to_device(device, number) for number in numbers])
            agreed = flags.read_with(ranks.agree(vector.to(widest_dtype(device))))
        self._included.look(flags.read)
        nonfinite, with_loss, loss, scale, *rest = agreed
        read, largest = rest[: len(slots)], rest[len(slots) :]
        if ranks.size > 1:
            scale, read = scale / ranks.size, [math.sqrt(square) for square in read]
        norms_ = [norm / (1.0 if slot.unscaled else scale) for slot, norm in zip(slots, read, strict=True)]
        bad_buffer = not all(map(math.isfinite, largest))
        return _AgreedNumbers(nonfinite == 0.0, loss / with_loss if with_loss else None, bad_buffer, scale, norms_)

    def _numbers(self, slots: Sequence[ScalerSlot], device: torch.device) -> list[Tensor]:
        """Return how many non-finite gradients were found, whether there is a loss, the loss, and the scale."""
        zero, one = self._constants_on(device)
        found = [f for slot in slots for f in self._per_optimizer_states[slot.key]["found_inf_per_device"].values()]
        # One number on every rank, over however many devices it has its gradients.
        not_finite = found[0] if len(found) == 1 else sum((move_number_to_device(device, f) for f in found), zero)
        total = self._backward.total
        losses = (zero, zero) if total is None else (one, total)
        return [not_finite, *losses, one if self._scale is None else self._scale]

    def _buffer_flags(self, ranks: int, device: torch.device) -> list[Tensor]:
        """Return numbers of which one is not finite if an included buffer is not."""
        zeros = [move_number_to_device(device, number) for number in self._included.zeros_if_finite()]
        if ranks == 1:
            return zeros
        # One on every rank, whose parts of a model may have other buffers.
        return [torch.stack(zeros).sum() if zeros else self._constants_on(device)[0]]

    def _reason(self, agreed: _AgreedNumbers) -> str | None:
        if agreed.loss is not None and not math.isfinite(agreed.loss):
            return LOSS_NOT_FINITE
        # A norm beyond fp32's range counts as non-finite, as for the Stepper: nothing could be clipped by it.
        if not (agreed.finite and all(norm <= FP32.largest for norm in agreed.norms)):
            return GRADIENT_OVERFLOW if self.precision.scaled and agreed.scale > self.floor else GRADIENT_NOT_FINITE
        # The flag on the device does not show whether the buffer was non-finite before; all ranks must decide the same.
        if agreed.bad_buffer and (self._included.first_not_finite() is not None or self._group.size > 1):
            return BUFFER_NOT_FINITE
        return None

    def _conclude(
        self,
        slots: Sequence[ScalerSlot],
        reason: str | None,
        *,
        finite: bool,
        loss: float,
        scale: float,
        norms: list[float],
    ) -> None:
        self.counts.attempted += 1
        self.counts.count(reason)
        for slot, norm in zip(slots, norms, strict=True):
            slot.norm, slot.awaits = norm, False
            slot.attempted += 1
            slot.applied += reason is None
        self.report = StepReport(
            step=self.counts.applied,
            attempt=self.counts.attempted,
            applied=reason is None,
            reason=reason,
            finite=finite,
            loss=loss,
            grad_norm=math.hypot(*norms),
            loss_scale=scale,
            parts={slot.name: OptimizerReport(loss, slot.norm, scale) for slot in slots},
        )
        for slot in slots:
            slot.verdict = self.report
            slot.gradients.release()
        self._included.decided(applied=reason is None)
        self._backward.decided()

    def _close_unstepped(self, slot: ScalerSlot) -> None:
        """Close a window of which the loop stepped nothing: a skip, decided by the loop."""
        unknown = math.nan  # nothing was read, so that the host does not wait
        self._conclude([slot], NOT_STEPPED, finite=True, loss=unknown, scale=unknown, norms=[unknown])

    @contextmanager
    def _step_of(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self._stepping = optimizer
        try:
            yield
        finally:
            self._stepping = None

    # -- the scale ----------------------------------------------------------------------------------------------

    def _adjust(self, new_scale: float | Tensor | None, reasons: Sequence[str | None]) -> None:
        overflow = any(reason in (GRADIENT_OVERFLOW, GRADIENT_NOT_FINITE) for reason in reasons)
        if new_scale is None and LOSS_NOT_FINITE in reasons and not overflow:
            return
        if new_scale is None and overflow:
            for state in self._per_optimizer_states.values():
                for found in state["found_inf_per_device"].values():
                    found.fill_(1.0)  # another rank may have found it
        super().update(new_scale)
        if new_scale is None:
            self._bound(self._last_scale, overflow=overflow)

    def _bound(self, before: float | None, *, overflow: bool) -> None:
        """Keep the scale within [floor, cap], from the number that the decision has read: no scale is read here."""
        assert self._scale is not None, "a loss was scaled"
        if before is None:
            self._scale.clamp_(self.floor, self.cap)
        elif overflow and before * self._backoff_factor < self.floor:
            self._scale.fill_(min(before, self.floor))
        elif before * self._growth_factor > self.cap:
            self._scale.clamp_(max=max(before, self.cap))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, which `torch.amp.GradScaler` can load, and ours: bounds, precision, counts."""
        if not self._enabled:
            return {}
        own = {"floor": self.floor, "cap": self.cap, "precision": self.precision.name}
        return {**super().state_dict(), **own, "counts": self.counts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`; a scale outside [floor, cap] is moved to the bound.

        Raises StateMismatch, before anything is changed, for a scale that is not a finite number, and between a
        precision that is scaled and one that is not; RuntimeError for an empty state, as torch does.
        """
        if not self._enabled or not state_dict:
            super().load_state_dict(state_dict)
            return
        self._check_state(state_dict)
        if "counts" in state_dict:
            self.counts.load_state_dict(state_dict["counts"])
            self._adjusted_at = self.counts.attempted
        floor, cap = float(state_dict.get("floor", self.floor)), float(state_dict.get("cap", self.cap))
        self.floor, self.cap = floor, cap
        super().load_state_dict({**state_dict, "scale": min(max(float(state_dict["scale"]), floor), cap)})

    def _check_state(self, state: dict[str, Any]) -> None:
        scale = float(state["scale"])
        if not math.isfinite(scale) or scale < 0.0:
            raise StateMismatch(f"a saved loss scale of {scale}", allowed="a finite number", do="start a new scale")
        # A state of torch's own says nothing about its precision: a scale of 1 fits both.
        saved = state.get("precision", self.precision.name if scale == 1.0 else "fp16")
        if _resolve_precision(saved).scaled != self.precision.scaled:
            raise StateMismatch(
                f"the state of a scaler for {saved}",
                allowed=f"one for {self.precision.name}",
                do="do not load it: start with a new scaler when the precision changes",
            )

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(GradScaler)
        fresh._start(None)
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in vars(fresh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start(None)


class _StepHook:
    """A hook before an optimizer's step, which does not keep the scaler alive."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = weakref.ref(scaler)

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        scaler = self._scaler()
        if scaler is not None:
            scaler._check_foreign_step(optimizer)


def _iterate_tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            yield from _iterate_tensors(output)


def _have_same_tensors(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
