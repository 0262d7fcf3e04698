"""Build a Stepper, and everything around its step: precision, observation, findings, evaluation, state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import distributed
from halfstep.errors import StateMismatch, WrongUse, check_same_keys, check_same_presence
from halfstep.finding import Finding
from halfstep.formats import FP32
from halfstep.observe.flops import Observation
from halfstep.observe.precision_check import (
    ObservationCost,
    ObservationSchedule,
    PrecisionObserver,
    RepeatedPrecisionObserver,
    can_observe_again,
)
from halfstep.observe.recorder import MemoryListener
from halfstep.precision.converted import count_model_changes, find_converted_layers
from halfstep.precision.island import find_islands, mark_inner_islands
from halfstep.precision.precision import Precision
from halfstep.precision.select import Choice, choose_precision
from halfstep.step import checks
from halfstep.step.agreement import RankAgreement
from halfstep.step.census import Buffers, Census
from halfstep.step.divided_loss import DividedLosses
from halfstep.step.earlier_steps import EarlierSteps, continue_earlier_steps
from halfstep.step.ema import Ema, StepCounts, check_ema_model
from halfstep.step.experiment.start_check import StartCheck
from halfstep.step.interrupts import DeferredInterrupts
from halfstep.step.loss import ONLY, LossScale, LossSlot, choose_loss_scale
from halfstep.step.objective import Objective
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.ranks import RankFailureHandler, Ranks
from halfstep.step.report import Guard
from halfstep.step.rollback import Rollback
from halfstep.step.step_inputs import LossFunctionHoldings, StepInputs
from halfstep.step.storage.stored_formats import find_stored_format_mistakes
from halfstep.step.sync import SingleRankSynchronizer, Synchronizer
from halfstep.step.synchronizers import reshard_gathered_parameters
from halfstep.step.window import CallOrder
from halfstep.user_code import warn_user

if TYPE_CHECKING:
    from halfstep.step.storage.weight_format import NarrowWeights
    from halfstep.step.synchronizers.shard_formats import ShardFormats

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
V = TypeVar("V")
ByName: TypeAlias = V | Mapping[str, V] | None
"""One value for all, one for each by name, or none."""


class StepperBase:
    """Everything of a Stepper but the step: how it is built, what it computes in, what it finds, its state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
        precision: str | Precision | Choice = "auto",
        clip_norm: ByName[float] = None,
        clip_value: ByName[float] = None,
        schedule: ByName[Any] = None,
        ema: Ema | None = None,
        loss_scale: ByName[LossScale] = None,
        guards: Sequence[Guard] = (),
        on_gradients: Callable[[list[Tensor]], object] | None = None,
        weight_format: str | None = None,
        gradient_sums: str = "fp32",
        rounding_seed: int = 0,
        observe: bool = True,
        check: bool = False,
        keep_gradients: bool = False,
        ddp: Mapping[str, Any] | None = None,
        process_group: Any = None,
        strict: None = None,
    ) -> None:
        """Build a Stepper.

        With several optimizers, a loss function that returns one loss trains all of them with one backward pass, and a
        number as `clip_norm` clips them by their common norm; a dict of losses trains each by its own loss. `schedule`,
        `clip_norm`, `clip_value` and `loss_scale` may be dicts by optimizer name.

        Args:
            model: The model.
            optimizer: One optimizer, or a dict of several by name.
            optimizers: A dict of several optimizers by name, instead of `optimizer`.
            precision: A precision by name, which runs (with the finding `precision.slow` if the device emulates it) or
                is refused; or `auto`, which chooses.
            clip_norm: The maximum norm of the gradients.
            clip_value: The maximum absolute value of a gradient.
            schedule: A learning rate scheduler, stepped after each applied update.
            ema: An average of the weights, updated after each applied update.
            loss_scale: The loss scale of fp16; by default a `DynamicScale`.
            guards: Checks that may refuse an update before it is applied.
            on_gradients: A callback with the parameters that have a gradient, after unscaling and before the finite
                check.
            weight_format: How trained weights are stored: `fp32`; `bf16-split`, bf16 weights and the other 16 bits next
                to them, which together are the bits of fp32 weights; or `bf16-stochastic`, bf16 weights that are
                rounded at random. Parameters of islands and of normalization and recurrent layers stay in fp32.
            gradient_sums: With weights in bf16, the format in which gradients are added up over micro-batches and
                ranks: `fp32`, or `bf16`.
            rounding_seed: The seed of `bf16-stochastic`.
            observe: Check in the first step which precision really runs.
            check: Compare the first micro-batch with fp32 before the first update, and refuse a step without gradients
                or values that fp32 has. The loss function is called twice more for it.
            keep_gradients: Keep `p.grad`, unscaled and clipped, until the start of the next step, for code that reads
                gradients after the step; by default, the step clears them.
            ddp: Options for DistributedDataParallel, which wraps a plain model on several ranks.
            process_group: The group of ranks that train together; by default all ranks.
            strict: Not supported: a precision by name is always strict.

        Raises:
            WrongUse: The combination would train nothing, or train it wrongly.
            PrecisionRefused: The precision cannot run on the device, would run as another one, or is known to give
                wrong numbers there.
        """
        checks.refuse_strict("Stepper", strict)
        self._start_without_window()
        self.ranks = Ranks(process_group)
        # A forward pass before this leaves FSDP2's parameters gathered, and the checks below look at the shards.
        reshard_gathered_parameters(model)
        named = _name_optimizers(optimizer, optimizers)
        stale = checks.check_model_and_optimizers(
            model, named, self.ranks.size, narrow=weight_format not in (None, FP32.name)
        )
        checks.check_trainable(model, named)
        self.model, self.guards, self.counts = model, list(guards), StepCounts()
        self.ema = check_ema_model(ema, model)
        self.device = next(model.parameters()).device
        self.findings: list[Finding] = []
        self._slots = _build_optimizer_slots(model, named, schedule, clip_norm, clip_value)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        self._with_end = [slot for slot in self._slots.values() if isinstance(slot.schedule, one_cycle)]
        """The optimizers whose schedule ends after a number of steps."""
        self.clip_norm = None if isinstance(clip_norm, Mapping) else check_positive_limit("clip_norm", clip_norm)
        self.on_gradients = on_gradients
        self._interrupts = DeferredInterrupts()
        self._census = Census(model, named.values())
        self._rollback, self._holdings = Rollback(self._emit, self._census), LossFunctionHoldings(model)
        self._observe, self._look_schedule = observe, ObservationSchedule()
        self._cost = ObservationCost() if observe and self.ranks.size == 1 else None
        """Until the tenth update; with several ranks, all of them observe it."""
        self.observed: Observation | None = None
        self._check = check
        self.keep_gradients = checks.check_keep_gradients(keep_gradients, weight_format)
        """Whether gradients are cleared at the start of the next step instead of the end of their own."""
        self.start_check: StartCheck | None = None
        """The result of the start check; None before it, without `check`, on a resumed run, and in fp32."""
        self.handles_non_finite = False
        """Whether a guard examines non-finite steps, so that the start check leaves them to it."""
        with self.ranks.here():
            # Rank 0 decides and broadcasts, so it has to be this process group's rank 0.
            self._compute_in(choose_precision(precision, device=self.device))
        self._as_built = self.choice
        self.weights: NarrowWeights | None = None
        """The weights that are stored in bf16; None if all are in fp32."""
        if weight_format is not None and weight_format != FP32.name:
            self._store_narrow(weight_format, gradient_sums, rounding_seed)
        self._losses = _build_loss_slots(list(named), self.precision, loss_scale)
        self._emit(stale)
        mark_inner_islands(model)
        self._synchronizer = choose_synchronizer(
            model, optimizers=len(self._slots), ddp=ddp or {}, ranks=self.ranks, narrow=self.weights is not None
        )
        self._emit(self._synchronizer.findings)
        if self.weights is not None:
            self.weights.share(self.ranks)
        self._agreement, self._together = RankAgreement(self.ranks, len(self._slots)), RankFailureHandler(self.ranks)
        self._note_census()
        self._call_order = CallOrder()
        own = EarlierSteps(
            tuple(named), self.precision.name, self.counts, self._losses, self._look_schedule, weakref.ref(self)
        )
        self._emit(continue_earlier_steps(named, own))

    def _store_narrow(self, weight_format: str, sums: str, seed: int) -> None:
        """Convert the trained weights to bf16."""
        from halfstep.step.storage.weight_format import NarrowWeights, check_weight_format

        check_weight_format(weight_format, sums, self.precision)
        slots = list(self._slots.values())
        self.weights = NarrowWeights(
            self.model,
            slots,
            weight_format,
            seed=seed,
            sums=sums,
            applied=lambda: self.counts.applied,
            emit=self._emit,
        )
        if self.ema is not None:
            self.ema.weights = self.weights

    def _start_without_window(self) -> None:
        """Set what a window changes, as it is before the first one."""
        self.attempt: StepInputs | None = None
        self._draws: bool | None = None
        """Whether an observed step has drawn random numbers of torch; None before the first one."""
        self._open: list[OptimizerSlot] = []
        self._objectives: list[Objective] = []
        self._last_objectives: list[Objective] = []
        self._paired: dict[tuple[bool, tuple[str, ...]], list[Objective]] = {}
        self._aux: list[Any] = []
        self._pending: list[Callable[[], object]] = []
        self._agreed = True
        """Whether the window's agreement is done: from then on all ranks know the same."""
        self._torn, self._concluding, self._begun, self.model_version = False, False, 0, 0
        self._divided = DividedLosses()
        self._batch_written = False
        """Whether a batch that was written in place was reported."""
        self.bad_buffer: str | None = None
        """The buffer that was non-finite in the last step that was skipped for one."""
        self.stop_requested = False
        """Set on any rank to stop all ranks: they learn it in the next step."""
        self.stop_votes = 0
        """The number of ranks whose `stop_requested` was set in the last step; the same on all ranks."""
        self.save_requested = False
        """Set on rank 0 to have all ranks save after the next step, such as by its clock; ignored on other ranks."""
        self.save_agreed = False
        """Whether rank 0's `save_requested` was set in the last step; the same on all ranks."""

    def __repr__(self) -> str:
        optimizers = ", ".join(f"{name}={type(slot.optimizer).__name__}" for name, slot in self._slots.items())
        ranks = f", {self.ranks.size} ranks" if self.ranks.size > 1 else ""
        if self.shard_formats:
            from halfstep.step.synchronizers.shard_formats import (
                describe_shard_formats,  # loaded where there are shards
            )

            ranks += f", shards {describe_shard_formats(self.shard_formats)}"
        state = ", torn" if self._torn else ", window open" if self._open else ""
        return (
            f"Stepper({type(self.model).__name__}, {optimizers}, precision={self.precision.name}, "
            f"device={self.device}{ranks}{state}, {self.counts!r})"
        )

    def include(self, thing: Any) -> None:
        """Restore this object on a skipped step, too.

        Modules that run in an observed step are found automatically. Of an included module, parameters, buffers, plain
        attributes and the members of its lists, dicts and sets are copied before each window; of another object, its
        state.

        Args:
            thing: A module, or an object with `state_dict()` and `load_state_dict()`.

        Raises:
            WrongUse: The object has no state to restore, or a window is open.
        """
        checks.check_window_can_start(torn=False, in_one=bool(self._open), empty=False)
        self._rollback.include(thing)
        if isinstance(thing, nn.Module):
            self._rollback.copy_parameters(thing.parameters())

    @property
    def shard_formats(self) -> Sequence[ShardFormats]:
        """The formats in which FSDP2 gathers and sums each shard group; empty without shards."""
        return self._synchronizer.shard_formats

    @property
    def steps_to_check(self) -> int:
        """The number of steps after which a tensor that steps write through `.data` is noticed at the latest."""
        return self._rollback.steps_to_check

    def change_precision(self, name: str) -> None:
        """Continue in another precision, or in the original one again, from the next step on.

        The loss scale restarts. Raises WrongUse inside a window, and PrecisionRefused like the constructor.
        """
        checks.check_window_can_start(torn=self._torn, in_one=bool(self._open), empty=False)
        first = self._as_built
        self._compute_in(first if name == first.precision.name else choose_precision(name, device=self.device))
        if self.weights is not None:
            self.weights.compute_in(self.precision)
            self._note_census()
        for loss in self._losses.values():
            loss.reset_scale(self.precision, as_built=self.choice is first)

    def _compute_in(self, choice: Choice) -> None:
        """Set the precision, and observe what really runs until every optimizer had a step."""
        checks.check_fp64_storage(choice.precision, self.model, self.optimizers)
        self.choice, self.precision = choice, choice.precision
        self._emit(find_stored_format_mistakes(self.model, self.precision))
        self.findings += [finding for finding in choice.findings if finding not in self.findings]
        self._prepare()
        self._autocast, self._scope = self.precision.autocast(self.device), self.precision.scope(self.device)
        self._unseen, self._idle = set(self._slots), set(find_islands(self.model))
        # Wrapped around the real scope, and removed after one step, so that observing costs nothing afterwards.
        if self._observe:
            self._scope = self._watch(PrecisionObserver)

    def _note_census(self) -> None:
        """Record that everything here follows the current modules and parameters."""
        self._census.update()
        self._followed = self._census.members, self._census.kinds

    def _prepare(self) -> None:
        """Convert the layers of the model as the precision asks for, and no others."""
        self.precision.prepare(self.model, self.device)
        self._prepared = count_model_changes()

    def _watch(self, kind: type[PrecisionObserver]) -> PrecisionObserver:
        done, emit, memory = self._watched, self._emit, _UninterruptedListener(self._rollback, self._interrupts)
        return kind(self._scope, self.model, self.precision, done=done, emit=emit, memory=memory)

    def _look_again(self) -> None:
        """Observe the next step again; unlike the first time, nothing that it finds stops the run."""
        if self._observe and not isinstance(self._scope, PrecisionObserver) and can_observe_again(self.model):
            self._unseen, self._idle = set(self._slots), set(find_islands(self.model))
            self._scope = self._watch(RepeatedPrecisionObserver)

    def _emit(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
                warn_user(str(finding))

    def _watched(self, inner: AbstractContextManager[object], observation: Observation) -> None:
        """Store the precision that really ran; remove the observer once every optimizer had a step."""
        self.observed = observation
        self._idle &= set(observation.idle_islands)
        self._unseen -= {slot.name for slot in self._open}
        if not self._unseen:
            self._scope = inner
            self._emit([checks.build_idle_island_finding(path) for path in sorted(self._idle)])

    @property
    def in_window(self) -> bool:
        """Whether a window opened with `forward()` is still open."""
        return bool(self._open)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        return {name: slot.optimizer for name, slot in self._slots.items()}

    @property
    def scale_in_use(self) -> float:
        """The loss scale of the current step, for gradient penalties; the smallest one if there are several losses.

        Multiply the inner loss by it and divide the gradients by it, so that they do not underflow in fp16.
        """
        if len(self._slots) == 1 or len(self._open) == 1:
            return self._losses[(self._open or list(self._slots.values()))[0].name].scale.value
        return min(loss.scale.value for loss in self._losses.values())

    @property
    def loss_scales(self) -> dict[str, float]:
        """The scale of each optimizer's next step, for the optimizers of the last step."""
        return {slot.name: o.loss.scale.value for o in self._objectives for slot in o.slots}

    @property
    def slots(self) -> Mapping[str, OptimizerSlot]:
        """The optimizers by name, with the norms and factors of their last step."""
        return self._slots

    def order_norms_by_groups(self) -> None:
        """Sum norms in the order of the optimizers' groups: bit-identical to a loop that clips these parameters."""
        for slot in self._slots.values():
            slot.order_by_groups()

    @property
    def model_changed(self) -> bool:
        """Whether modules or parameters were added, removed or unfrozen since the last step; reads no tensor."""
        self._census.update()
        return (self._census.members, self._census.kinds) != self._followed

    def buffers_to_keep(self) -> dict[str, Tensor | None]:
        """Return the model's buffers that match its current weights: inside a step, those from before it."""
        if not self._open:
            return Buffers(self.model).registered()
        remembered, own = self._rollback.remembered(), Buffers(self.model).names()
        return {name: buffer for name, buffer in remembered.items() if name in own}

    @property
    def gathered_bytes(self) -> int | None:
        """The bytes of weights that FSDP2 gathered on this rank in the last window; None if nothing is sharded."""
        return self._synchronizer.gathered_bytes

    @property
    def bad_parameter(self) -> Tensor | None:
        """The first parameter whose gradient was non-finite in the last step."""
        return next((o.bad_parameter for o in self._objectives if o.bad_parameter is not None), None)

    @contextmanager
    def evaluating(self, *, ema: bool = False) -> Iterator[nn.Module]:
        """Evaluate in the precision of the run: eval mode, no gradients, autocast.

        Everything is restored afterwards, including each module's own mode.

        Args:
            ema: Use the averaged weights.

        Yields:
            The model.

        Raises:
            WrongUse: A window is open, or `ema=True` without an Ema.
        """
        checks.check_window_can_start(torn=self._torn, in_one=bool(self._open), empty=False)
        if ema and self.ema is None:
            raise WrongUse(
                "evaluating(ema=True) without an average", allowed="an Ema", do="Stepper(..., ema=Ema(model))"
            )
        # Each module's own: `model.train()` afterwards would undo eval modes of the user, as for a frozen BatchNorm.
        # A module that torch.jit has frozen has none.
        modes = [(module, module.training) for module in self.model.modules() if hasattr(module, "training")]
        with ExitStack() as active:
            if ema and self.ema is not None:
                active.enter_context(self.ema.in_place())
            active.callback(_set_training_modes, modes)
            self.model.eval()
            active.enter_context(self.precision.inference(self.device))
            yield self.model

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run except the model's own weights.

        Returns:
            Counts, loss scales, average, optimizers and schedules.

        Raises:
            WrongUse: A window is open.
        """
        checks.check_window_can_start(torn=self._torn, in_one=bool(self._open) and not self._concluding, empty=False)
        return {**self.own_state(), "optimizers": {name: slot.state_dict() for name, slot in self._slots.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`.

        Args:
            state: The saved state.

        Raises:
            StateMismatch: The state does not fit; nothing is changed.
        """
        ours = self.state_dict()
        _check_same_weight_format(ours, state)
        checks.check_same_conversion(ours.get("converted", {}), state.get("converted", {}))
        check_same_keys("a Stepper's state", ours, state)
        check_same_keys("optimizers", ours["optimizers"], state["optimizers"])
        for name, slot in self._slots.items():
            slot.check_state(state["optimizers"][name])
        # Before the optimizers, because it can still refuse.
        self.load_own_state({key: state[key] for key in state if key != "optimizers"})
        for name, slot in self._slots.items():
            slot.load_state_dict(state["optimizers"][name])

    def own_state(self) -> dict[str, Any]:
        """Return the state without optimizers and schedules, for a loop whose own checkpoints have those.

        Inside a window it is the state before the window.
        """
        counts = self.counts.state_dict()
        counts["attempted"] -= int(bool(self._open) and not self._concluding)
        converted = find_converted_layers(self.model)
        return {
            "precision": self.precision.name,
            **({"converted": converted} if converted else {}),
            "counts": counts,
            "ema": None if self.ema is None else self.ema.state_dict(),
            "losses": {name: loss.state_dict() for name, loss in self._losses.items()},
            **({} if self.weights is None else {"weights": self.weights.state_dict()}),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of `own_state()`; raise StateMismatch before anything is changed."""
        ours = self.own_state()
        _check_same_weight_format(ours, state)
        checks.check_same_conversion(ours.get("converted", {}), state.get("converted", {}))
        check_same_keys("a Stepper's own state", ours, state)
        for key in ("losses", "counts"):
            check_same_keys(key, ours[key], state[key])
        check_same_keys("precision", [self.precision.name], [state["precision"]])
        check_same_presence("riders", "ema", ours, state)
        for name, loss in self._losses.items():
            loss.check_state(state["losses"][name])
        if self.weights is not None:
            self.weights.check_state(state["weights"])
        if self.ema is not None:
            # First, because the average checks a state only while it loads it: a refusal here has changed nothing.
            self.ema.load_state_dict(state["ema"])
        for name, loss in self._losses.items():
            loss.load_state_dict(state["losses"][name])
        self.counts.load_state_dict(state["counts"])
        if self.weights is not None:
            self.weights.load_state_dict(state["weights"])


def _check_same_weight_format(ours: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    own, then = (state["weights"]["format"] if "weights" in state else FP32.name for state in (ours, saved))
    if own != then:
        raise StateMismatch(
            f"the weights were saved as {then}",
            allowed=f"{own}, which this Stepper has",
            do=f"Stepper(..., weight_format={then!r})",
        )


class _UninterruptedListener:
    """A memory listener that Ctrl-C leaves with complete records: those of a half-made copy restore nothing."""

    def __init__(self, listener: MemoryListener, interrupts: DeferredInterrupts) -> None:
        self._listener, self._interrupts = listener, interrupts

    def module_runs(self, module: nn.Module) -> None:
        """Pass the call on."""
        self._call(lambda: self._listener.module_runs(module))

    def before_use(self, written: Sequence[Tensor], read: Sequence[Tensor], line: str | None) -> None:
        """Pass the call on."""
        self._call(lambda: self._listener.before_use(written, read, line))

    def before_replace(self, tensor: Tensor, line: str | None) -> None:
        """Pass the call on."""
        self._call(lambda: self._listener.before_replace(tensor, line))

    def _call(self, report: Callable[[], None]) -> None:
        allowed = self._interrupts.forbid()
        try:
            report()
        finally:
            if allowed:
                self._interrupts.allow()


def _set_training_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


# -- settings by optimizer --------------------------------------------------------------------------------------------


def _name_optimizers(
    optimizer: Optimizers | None, optimizers: Mapping[str, torch.optim.Optimizer] | None
) -> dict[str, torch.optim.Optimizer]:
    if (optimizer is None) == (optimizers is None):
        raise WrongUse(
            "a Stepper with both optimizer= and optimizers="
            if optimizer is not None
            else "a Stepper without an optimizer",
            allowed="one optimizer, or a dict of several by name",
            do="Stepper(model, optimizer), or Stepper(model, optimizers={'muon': muon, 'adamw': adamw})",
        )
    given = optimizers if optimizer is None else optimizer
    return dict(given) if isinstance(given, Mapping) else {ONLY: given}  # type: ignore[dict-item]


def _build_optimizer_slots(
    model: nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    schedule: ByName[Any],
    clip_norm: ByName[float],
    clip_value: ByName[float],
) -> dict[str, OptimizerSlot]:
    if clip_norm is not None and clip_value is not None:
        raise WrongUse("clip_norm and clip_value together", allowed="one of them", do="clip_norm=1.0")
    names = list(optimizers)
    if schedule is not None and not isinstance(schedule, Mapping) and len(names) > 1:
        raise WrongUse(
            f"one {type(schedule).__name__} for optimizers {names}",
            allowed="a dict by optimizer name",
            do=f"schedule={{{names[0]!r}: ..., {names[1]!r}: ...}}",
        )
    by_name = isinstance(clip_norm, Mapping)
    return {
        name: OptimizerSlot(
            name,
            optimizer,
            schedule=select_optimizer_setting(schedule, name, names, "schedule"),
            clip_norm=check_positive_limit("clip_norm", select_optimizer_setting(clip_norm, name, names, "clip_norm"))
            if by_name
            else None,
            clip_value=check_positive_limit(
                "clip_value", select_optimizer_setting(clip_value, name, names, "clip_value")
            ),
            model=model,
        )
        for name, optimizer in optimizers.items()
    }


def _build_loss_slots(names: Sequence[str], precision: Precision, given: ByName[LossScale]) -> dict[str, LossSlot]:
    """Return a slot for each optimizer's own loss, and one for a loss that several optimizers share."""
    known = list(dict.fromkeys([*names, ONLY] if len(names) > 1 else names))
    found = {
        name: choose_loss_scale(precision, select_optimizer_setting(given, name, known, "loss_scale")) for name in known
    }
    # One scale given for all is copied: each loss has its own, for one may overflow where another does not.
    return {
        name: LossSlot(name, scale if i == 0 else copy.deepcopy(scale)) for i, (name, scale) in enumerate(found.items())
    }


def select_optimizer_setting(values: ByName[V], name: str, names: Sequence[str], what: str) -> V | None:
    """Return the setting of one optimizer; a value without names is for all. Raises WrongUse for unknown names."""
    if not isinstance(values, Mapping):
        return values
    unknown = set(values) - set(names)
    if unknown:
        raise WrongUse(
            f"{what}: no optimizer named {sorted(unknown)}",
            allowed=str(list(names)),
            do="use the optimizers' names",
        )
    return values.get(name)


def check_positive_limit(name: str, given: Any) -> float | None:
    """Return a limit on gradients as a float, or None; raise WrongUse if it is not positive."""
    if given is None:
        return None
    if not isinstance(given, (int, float)) or not given > 0:
        raise WrongUse(f"{name}={given!r}", allowed="a positive number, or None", do=f"{name}=1.0")
    return float(given)


# -- ranks ------------------------------------------------------------------------------------------------------------


def choose_synchronizer(
    model: nn.Module, *, optimizers: int, ddp: Mapping[str, Any], ranks: Ranks, narrow: bool = False
) -> Synchronizer:
    """Return the synchronizer that fits this model and these ranks; raise WrongUse if only parts are sharded.

    Gradients of `narrow` weights are averaged here: DistributedDataParallel sums in the format of the weights.
    """
    if ranks.size == 1:
        return SingleRankSynchronizer(model)
    from halfstep.step.synchronizers.replicated import (  # here, because one rank needs none
        AveragingSynchronizer,
        ReplicatedSynchronizer,
        UserDdpSynchronizer,
    )

    if distributed.is_sharded(model.parameters()):
        from halfstep.step.synchronizers.sharded import ShardedSynchronizer

        _check_sharding(model)
        return ShardedSynchronizer(model, ranks)
    if isinstance(model, DistributedDataParallel):
        if narrow:
            raise WrongUse(
                "weight_format with a model in DistributedDataParallel, which sums gradients in the format of weights",
                allowed="the plain model, whose gradients halfstep sums in fp32",
                do="Stepper(model.module, ..., weight_format=...)",
            )
        return UserDdpSynchronizer(model, ranks)
    # Several optimizers may have several losses, each with its own backward; DistributedDataParallel expects one
    # backward for each forward.
    return (
        ReplicatedSynchronizer(model, ddp, ranks)
        if optimizers == 1 and not narrow
        else AveragingSynchronizer(model, ranks)
    )


def _check_sharding(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule  # slow to load, and loaded already where it is needed

    if not isinstance(model, FSDPModule):
        raise WrongUse(
            "a model of which only parts are sharded",
            allowed="fully_shard on the model itself",
            do="fully_shard(model) after its parts",
        )
