"""halfstep for loops that have accelerate prepare their model, optimizer and data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import PrecisionType
from torch import nn
from torch.optim import Optimizer

from halfstep.adapters.hosted_step import replace_buffers_in_window, unwrap_ddp
from halfstep.errors import WrongUse, check_same_keys
from halfstep.finding import Finding
from halfstep.precision.names import parse_precision
from halfstep.step.checks import refuse_weight_format
from halfstep.step.loss import DynamicScale, LossScale
from halfstep.step.optimizer_slot import check_schedule
from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper

_DDP = ("CPU", "GPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
"""The devices that accelerate trains with DistributedDataParallel; older versions have fewer."""
_SUPPORTED = [DistributedType.NO]
_SUPPORTED += [kind for kind in DistributedType if kind.name in [f"MULTI_{device}" for device in _DDP]]

_PRECISIONS = {PrecisionType.NO: "fp32", PrecisionType.FP16: "fp16", PrecisionType.BF16: "bf16"}


def from_accelerate(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    *,
    precision: str | None = None,
    **options: Any,
) -> Stepper:
    """Return a Stepper for objects that `accelerator.prepare` returned.

    ```python
    stepper = halfstep.from_accelerate(accelerator, model, optimizer, scheduler, clip_norm=1.0)
    ```

    accelerate's autocast is removed from the model, because a rerun in another precision needs its own: evaluate inside
    `stepper.evaluating()`. Only the Stepper steps the optimizer and the scheduler; `accelerator.save_state` and
    `load_state` save and load its counts and its loss scale.

    Args:
        accelerator: The Accelerator.
        model: The prepared model.
        optimizer: The prepared optimizer.
        scheduler: The prepared scheduler.
        precision: The precision; by default accelerate's own setting.
        options: Further arguments of `Stepper`.

    Returns:
        The Stepper.

    Raises:
        WrongUse: The engine has its own optimizer, such as DeepSpeed, or the model or the optimizer is not prepared;
            and as in `Stepper`.
    """
    refuse_weight_format("from_accelerate", options)
    refuse_other_engines(accelerator)
    _check_prepared(accelerator, model, optimizer)
    _remove_earlier_stepper(accelerator, model)
    inner = optimizer.optimizer
    had_autocast = remove_accelerate_autocast(accelerator, model)
    asked = precision or read_accelerate_precision(accelerator)
    schedule = None if scheduler is None else _OwnSchedule(scheduler, inner)
    if options.get("loss_scale") is None and parse_precision(asked).name == "fp16":
        options["loss_scale"] = build_accelerate_scale(accelerator)
    stepper = Stepper(model, inner, precision=asked, schedule=schedule, **options)
    if had_autocast:
        evidence = (
            f"accelerate's autocast in {accelerator.mixed_precision} was removed from "
            f"{type(unwrap_ddp(model)).__name__}"
        )
        stepper.findings.append(
            Finding("accelerate.autocast", "note", evidence, "evaluate inside stepper.evaluating()")
        )
    twice = _CalledTwiceGuard(inner, schedule, stepper)
    stepper.guards.append(twice)
    own = _StepperState(
        stepper, schedule, saves_schedule=scheduler is not None and scheduler not in accelerator._schedulers
    )
    own.handles = [twice.handle, accelerator.register_save_state_pre_hook(own.before_save)]
    accelerator.register_for_checkpointing(own)
    return stepper


def _check_prepared(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    """Raise WrongUse for objects that accelerate does not place and save."""
    for what, given, known in (
        ("model", _unwrap_kept_module(model), accelerator._models),
        ("optimizer", optimizer, accelerator._optimizers),
    ):
        if not any(given is one for one in known):
            raise WrongUse(
                f"from_accelerate with a {type(given).__name__} that is not a prepared {what} of this Accelerator",
                allowed="one model and one optimizer as accelerator.prepare returned them",
                do="model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
            )


def _unwrap_kept_module(model: nn.Module) -> nn.Module:
    """Return the module that accelerate keeps and saves of a prepared model: without what it was wrapped in after."""
    return unwrap_ddp(getattr(model, "_orig_mod", model))


def _remove_earlier_stepper(accelerator: Accelerator, model: nn.Module) -> None:
    """Take out what an earlier Stepper of this model, or of one that accelerate has freed, placed."""
    for own in [one for one in accelerator._custom_objects if isinstance(one, _StepperState)]:
        if own.model is _unwrap_kept_module(model) or not any(own.model is known for known in accelerator._models):
            accelerator._custom_objects.remove(own)
            for handle in own.handles:
                handle.remove()


def read_accelerate_precision(accelerator: Accelerator) -> str:
    """Return accelerate's setting by halfstep's name; raise WrongUse for one that has none, such as fp8."""
    word = accelerator.mixed_precision
    found = next((name for kind, name in _PRECISIONS.items() if kind.value == word), None)
    if found is None:
        allowed = ", ".join(kind.value for kind in _PRECISIONS)
        raise WrongUse(f"accelerate with mixed_precision={word}", allowed=allowed, do="precision='bf16'")
    handler = accelerator.autocast_handler
    if found != "fp32" and handler is not None and not handler.enabled:
        raise WrongUse(
            f"accelerate with mixed_precision={word} and AutocastKwargs(enabled=False), which computes in fp32",
            allowed="one of them",
            do="from_accelerate(..., precision='fp32'), or no AutocastKwargs",
        )
    return found


def build_accelerate_scale(accelerator: Accelerator) -> LossScale | None:
    """Return the loss scale that the Accelerator was given for fp16, or None; raise WrongUse for one that is off."""
    handler = accelerator.scaler_handler
    if handler is None or accelerator.mixed_precision != PrecisionType.FP16.value:
        return None
    if not handler.enabled:
        raise WrongUse(
            "accelerate with GradScalerKwargs(enabled=False)",
            allowed="a loss scale for fp16",
            do="from_accelerate(..., loss_scale=StaticScale(1.0))",
        )
    return DynamicScale(
        init_scale=handler.init_scale,
        growth_factor=handler.growth_factor,
        backoff_factor=handler.backoff_factor,
        growth_interval=handler.growth_interval,
        # torch's scaler has no bounds: these include any initial scale.
        floor=min(1.0, handler.init_scale),
        cap=max(2.0**24, handler.init_scale),
    )


def refuse_other_engines(accelerator: Accelerator) -> None:
    """Raise WrongUse for engines other than one device and DistributedDataParallel."""
    if accelerator.distributed_type not in _SUPPORTED:
        raise WrongUse(
            f"accelerate with {accelerator.distributed_type.value}",
            allowed="one device, or several with DistributedDataParallel",
            do="halfstep train, which shards with FSDP2 itself",
        )


def remove_accelerate_autocast(accelerator: Accelerator, model: nn.Module) -> bool:
    """Restore the model's own forward, in place; return whether accelerate had wrapped it."""
    had = "_original_forward" in vars(unwrap_ddp(model))
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return had


class _OwnSchedule:
    """A schedule that only the Stepper may advance."""

    def __init__(self, scheduler: Any, optimizer: Optimizer) -> None:
        self._scheduler, self.optimizer = scheduler, optimizer
        # accelerate's scheduler advances torch's several times a step on several ranks.
        self._counted = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
        if not hasattr(self._counted, "step"):
            raise WrongUse(
                f"a {type(scheduler).__name__} as the scheduler",
                allowed="one scheduler",
                do="torch.optim.lr_scheduler.ChainedScheduler([...]), or SequentialLR",
            )
        owner = getattr(self._counted, "optimizer", optimizer)
        ours = isinstance(owner, AcceleratedOptimizer) and owner.optimizer is optimizer
        check_schedule(self._counted, owner if ours else optimizer)
        self.look()

    def step(self) -> None:
        """Advance the schedule after an applied update."""
        if not isinstance(self._scheduler, AcceleratedScheduler):
            self._scheduler.step()
        else:
            # It stands still inside what `accumulate` takes for a window, but an update was applied.
            accumulation, was = self._scheduler.gradient_state, self._scheduler.gradient_state.sync_gradients
            accumulation._set_sync_gradients(True)
            self._scheduler.step()
            accumulation._set_sync_gradients(was)
        self.look()

    def look(self) -> None:
        """Take the number of its steps as it is now for the Stepper's own."""
        self._seen = getattr(self._counted, "_step_count", None)

    @property
    def advanced_elsewhere(self) -> bool:
        """Whether something else has advanced it."""
        return getattr(self._counted, "_step_count", None) != self._seen

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the schedule's state."""
        self._scheduler.load_state_dict(state)
        self.look()


class _CalledTwiceGuard:
    """A guard that refuses an update if the loop still makes a call that the Stepper makes."""

    name = "called_twice"
    same_on_all_ranks = True

    def __init__(self, optimizer: Optimizer, schedule: _OwnSchedule | None, stepper: Stepper) -> None:
        self._schedule, self._stepper = schedule, stepper
        self.handle = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        if not self._stepper.in_window:
            raise _build_called_twice_error("optimizer.step()")

    def passes(self, report: StepReport) -> bool:
        """Raise WrongUse if the loop has advanced the schedule; otherwise accept the step."""
        if self._schedule is not None and self._schedule.advanced_elsewhere:
            raise _build_called_twice_error("scheduler.step()")
        return True


def _build_called_twice_error(call: str) -> WrongUse:
    return WrongUse(
        f"{call} in a loop with a Stepper",
        allowed="stepper.apply() or stepper.step(), which step the optimizer and the schedule",
        do=f"remove {call} from the loop",
    )


class _StepperState:
    """What accelerate's checkpoints lack: counts, loss scale and average, under the names that it calls."""

    def __init__(self, stepper: Stepper, schedule: _OwnSchedule | None, *, saves_schedule: bool) -> None:
        self._stepper, self._schedule, self._saves_schedule = stepper, schedule, saves_schedule
        self.model = _unwrap_kept_module(stepper.model)
        self.handles: list[Any] = []
        """Of the hooks that belong to the Stepper."""

    def before_save(self, models: list[nn.Module], weights: list[dict[str, Any]], _: str) -> None:
        """Save the buffers of before an open window, like everything else of the step."""
        place = next((place for place, model in enumerate(models) if model is self.model), None)
        if place is not None:
            replace_buffers_in_window(self._stepper, weights[place])

    def state_dict(self) -> dict[str, Any]:
        """Return the Stepper's own state, and that of a schedule that accelerate does not save."""
        schedule = self._schedule.state_dict() if self._schedule is not None and self._saves_schedule else None
        return {"stepper": self._stepper.own_state(), "schedule": schedule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`; accelerate has loaded the schedule that it saves just before."""
        check_same_keys("the state of from_accelerate", ["stepper", "schedule"], state)
        self._stepper.load_own_state(state["stepper"])
        if self._schedule is not None:
            if state["schedule"] is not None:
                self._schedule.load_state_dict(state["schedule"])
            self._schedule.look()
