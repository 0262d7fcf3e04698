"""A step inside the loop of another library, which owns the order of calls, the schedules and the checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import WrongUse, build_unknown_name_error, check_same_presence
from halfstep.guard.event_text import build_event_warner
from halfstep.guard.guardian import Guardian
from halfstep.guard.repair.paste import Loop
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import GuardEvent, Level
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.step.checks import refuse_strict, refuse_weight_format
from halfstep.step.earlier_steps import forget_earlier_steps
from halfstep.step.ema import Ema
from halfstep.step.loss import LossScale
from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper
from halfstep.step.sync import LossFunction

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Unpack


_LEVELS: dict[str, Level] = {"info": "info", "warning": "warning"}


class HostedStepOptions(TypedDict, total=False):
    """The settings that every adapter accepts."""

    guard: Literal["watch", "repair", "off"]
    """What a Guardian does about failed steps; `off` is without one, and then nothing ends a run of skips."""
    limits: Limits
    loss_scale: LossScale
    ema_decay: float
    """The decay of an average of the weights, in fp32, that moves with applied steps only."""
    record: str | Path
    """A folder that failed steps are recorded in, to run them again; needs the train extra."""
    tell: Callable[[GuardEvent], None]


def check_adapter_options(options: HostedStepOptions) -> None:
    """Raise UnknownName for an option that no adapter has: a misspelled one would do nothing."""
    refuse_strict("an adapter", options.get("strict"))
    refuse_weight_format("an adapter", options)
    for name in options:
        if name not in HostedStepOptions.__annotations__:
            raise build_unknown_name_error("option", name, HostedStepOptions.__annotations__)


class Clipping(NamedTuple):
    """The clipping that a foreign library is set to, as settings of a Stepper: none, or one of the two."""

    norm: float | None = None
    value: float | None = None


class HostedStep:
    """A Stepper with its Guardian, driven from the hooks of a foreign loop."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        precision: str,
        clipping: Clipping,
        loop: Loop,
        on_gradients: Callable[[list[Tensor]], object] | None = None,
        **options: Unpack[HostedStepOptions],
    ) -> None:
        """Build the Stepper of a model that the foreign library has placed and wrapped already.

        Raises WrongUse and PrecisionRefused like `Stepper`.
        """
        decay = options.get("ema_decay")
        # The foreign library counts the steps of each of its trainings from zero.
        forget_earlier_steps(optimizer)
        self.stepper = Stepper(
            model,
            optimizer,
            precision=precision,
            clip_norm=clipping.norm,
            clip_value=clipping.value,
            ema=None if decay is None else Ema(model, decay),
            loss_scale=options.get("loss_scale"),
            on_gradients=on_gradients,
        )
        self.applying = False
        refuse_other_steps(optimizer, self)
        self.guardian = _build_guardian(self.stepper, unwrap_ddp(model), loop, options)
        self.report: StepReport | None = None
        """The report of the last window; None before the first one, and after one that was dropped."""
        self._last = False

    @property
    def complete(self) -> bool:
        """Whether the last micro-batch of the open window was computed, so that only `apply` may follow."""
        return self._last and self.stepper.in_window

    @property
    def moved(self) -> bool:
        """Whether the last window moved the weights."""
        return self.report is not None and self.report.applied

    @property
    def numbers(self) -> dict[str, float]:
        """The counts of the run and the current loss scale, for a foreign log."""
        counts = self.stepper.counts
        found = {"applied": float(counts.applied), "skipped": float(sum(counts.skipped.values()))}
        return {**found, **({"loss_scale": self.stepper.scale_in_use} if self.stepper.precision.scaled else {})}

    def forward(self, *, last: bool, rerun: tuple[LossFunction, Any] | None = None) -> AbstractContextManager[None]:
        """Return the context for one forward pass; see `Stepper.forward`."""
        self._last = last
        return self.stepper.forward(last=last, rerun=rerun)

    def apply(self) -> StepReport:
        """Conclude the window, and let the Guardian examine it; raise Diverged if the run cannot continue."""
        self.applying = True
        try:
            self.report = self.stepper.apply()
        finally:
            self.applying = False
        if self.guardian is not None:
            self.guardian.look(self.report)
        return self.report

    def drop(self) -> None:
        """Drop an open window and restore the state before it."""
        self.stepper.discard()
        self.report = None

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the foreign library's checkpoints lack: counts, loss scale, average, the Guardian's memory."""
        guardian = None if self.guardian is None else self.guardian.state_dict()
        return {"stepper": self.stepper.own_state(), "guardian": guardian}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict()`; raise StateMismatch before anything is changed."""
        check_same_presence("a guard", "guardian", self.state_dict(), state)
        if self.guardian is not None:
            self.guardian.check_state(state["guardian"])
        self.stepper.load_own_state(state["stepper"])
        if self.guardian is not None:
            self.guardian.load_state_dict(state["guardian"])


def refuse_other_steps(optimizer: Optimizer, hosted: HostedStep) -> None:
    """Make the optimizer's own `step()` raise WrongUse while a window is open: only `hosted.apply()` may step."""
    # By a weak reference: the optimizer may outlive the run.
    known = weakref.ref(hosted)

    def before_step(*_: object) -> None:
        one = known()
        if one is not None and one.stepper.in_window and not one.applying:
            raise WrongUse(
                f"{type(optimizer).__name__}.step() inside an open window of the Stepper",
                allowed="the optimizer that the library passes to its hooks, whose step() concludes the window",
                do="remove the call, or call step() of that optimizer instead of the inner one's",
            )

    optimizer.register_step_pre_hook(before_step)


def _build_guardian(stepper: Stepper, model: nn.Module, loop: Loop, options: HostedStepOptions) -> Guardian | None:
    mode, tell = options.get("guard", "watch"), options.get("tell", build_event_warner(loop))
    if mode == "off":
        return None
    folder = options.get("record")
    record = None
    if folder is not None:
        # Imported only here: it needs the train extra.
        from halfstep.guard.failed_steps.writing import build_step_recorder

        def said(text: str, level: str) -> None:
            tell(GuardEvent("verdict", _LEVELS[level], text, {}))

        Path(folder).mkdir(parents=True, exist_ok=True)
        record = build_step_recorder(Path(folder), model, said)
    return Guardian(stepper, mode=mode, limits=options.get("limits", Limits()), tell=tell, record=record)


def replace_buffers_in_window(stepper: Stepper, weights: dict[str, Any]) -> None:
    """Put the buffers of before an open window into weights that are saved inside it, by the model's own names."""
    if stepper.in_window:
        for name, buffer in stepper.buffers_to_keep().items():
            own = strip_compile_wrappers(name).removeprefix("module.")
            if own in weights and buffer is not None:
                weights[own] = buffer.clone()


def unwrap_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the model itself."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return inner
