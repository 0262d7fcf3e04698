"""halfstep inside Lightning's Trainer, with automatic optimization.

Lightning's loop calls its precision plugin around every forward pass, backward pass and optimizer step; the plugin here
turns these calls into one window of a Stepper. What no plugin is asked about (schedules, the count of steps, the log)
is done by the plugin's callback, through public hooks.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from halfstep.adapters.hosted_step import (
    Clipping,
    HostedStep,
    HostedStepOptions,
    check_adapter_options,
    replace_buffers_in_window,
    unwrap_ddp,
)
from halfstep.errors import WrongUse
from halfstep.precision.select import choose_precision
from halfstep.step.report import StepReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The same library is published under two names with classes of their own; a script uses one of them.
_imported = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
if _imported or find_spec("lightning") is None:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        SingleDeviceStrategy,
        SingleDeviceXLAStrategy,
        XLAStrategy,
    )
    from pytorch_lightning.utilities import GradClipAlgorithmType
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        SingleDeviceStrategy,
        SingleDeviceXLAStrategy,
        XLAStrategy,
    )
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden

_WORDS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "tf32": "32-true", "fp64": "64-true"}
"""Lightning's names of the precisions, for what it prints."""


class HalfstepPrecision(Precision):
    """A precision plugin under which every optimizer step is a transaction.

    ```python
    step = HalfstepPrecision("bf16")
    trainer = Trainer(plugins=step, callbacks=[step.callback], gradient_clip_val=1.0)
    ```

    A skipped step leaves weights, buffers, optimizer state, per-step schedules and `global_step` unchanged.
    Accumulation and clipping are the Trainer's own settings.
    """

    def __init__(self, precision: str = "auto", **options: Unpack[HostedStepOptions]) -> None:
        """Take the name of a precision, or an alias such as `bf16-mixed`; for the rest, see `HostedStepOptions`."""
        if not _imported and "pytorch_lightning" in sys.modules and Precision.__module__.startswith("lightning."):
            warnings.warn("HalfstepPrecision is lightning's; for pytorch_lightning, import that first", stacklevel=2)
        check_adapter_options(options)
        self._asked, self._options = precision, options
        self.callback = HalfstepCallback(self)
        self.hosted: HostedStep | None = None
        """The step of the current or last fit."""
        self.inputs: tuple[Any, ...] | None = None
        """The arguments of the current training_step, if they are known."""
        self.concluded = False
        """Whether the current batch ended a window."""
        self._owes_backward = False
        self._microbatches = 0

    @property
    def report(self) -> StepReport | None:
        """The report of the last window."""
        return None if self.hosted is None else self.hosted.report

    # -- building -----------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Build the Stepper of a fit; raise WrongUse for a Trainer or a module that bypasses the plugin."""
        module: Any = unwrap_ddp(model)
        self._owes_backward = False
        self._device = next(model.parameters(), torch.empty(0)).device
        # Lightning keeps the optimizers of a fit, and shows them again when it validates, tests or predicts after it.
        if module.trainer.state.fn != "fit":
            self._choice = choose_precision(self._asked, device=self._device)
        else:
            self._fit_loop = module.trainer.fit_loop
            self._progress = self._fit_loop.epoch_loop.automatic_optimization
            _check_supported(module, optimizers, self)
            self._optimizer = optimizers[0]
            self._module_clips = any(
                _overrides_hook(module, hook) for hook in ("configure_gradient_clipping", "clip_gradients")
            )
            trainer = module.trainer
            asked = convert_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            self._clipping = Clipping() if self._module_clips else asked
            self.hosted = HostedStep(
                model,
                optimizers[0],
                precision=self._asked,
                clipping=self._clipping,
                loop="lightning",
                on_gradients=lambda _: self._after_closure(module, optimizers[0]),
                **self._options,
            )
            # Lightning clips the parameters of the optimizer, group by group.
            self.hosted.stepper.order_norms_by_groups()
            self._choice = self.hosted.stepper.choice
        self.precision = _WORDS[self._choice.precision.computes.name]
        return model, optimizers, lr_schedulers

    @property
    def moved(self) -> bool:
        """Whether the last window moved the weights."""
        return self.hosted is not None and self.hosted.moved

    def drop_open_window(self) -> None:
        """Drop an unfinished window and restore the state before it."""
        self._owes_backward = False
        if self.hosted is not None and self.hosted.stepper.in_window:
            self.hosted.drop()

    # -- one window ---------------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager[None]:
        """Return the context of a training step: the forward pass of one micro-batch."""
        if self._progress._skip_backward:
            return self.forward_context()
        if self._owes_backward:
            raise WrongUse(
                "training_step returned None inside an accumulation window",
                allowed="a loss for every micro-batch; None only with accumulate_grad_batches=1",
                do="return a loss, such as 0.0 * loss for a batch to skip",
            )
        # An accumulation schedule changes the number between windows only.
        many = self._fit_loop.trainer.accumulate_grad_batches
        self._microbatches = self._microbatches + 1 if self._hosted.stepper.in_window else 1
        if self._microbatches > many:
            self.drop_open_window()
            raise _build_unsupported_error(
                f"training_step run {self._microbatches} times for an update of {many}",
                "each batch once; optimizers such as SAM, which run the closure twice, need their own loop",
                "a halfstep.Stepper with manual forward passes",
            )
        self._owes_backward = True
        rerun = None if self.inputs is None else (_run_training_step, self.inputs)
        return self._hosted.forward(last=not self._fit_loop._should_accumulate(), rerun=rerun)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the Stepper."""
        self._owes_backward = False
        # Lightning has divided the loss by the number of micro-batches; the Stepper divides at the end of the window.
        many = model.trainer.accumulate_grad_batches
        self._hosted.stepper.backward(tensor if many == 1 else tensor * many)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the last micro-batch, which is the closure, and conclude the window; raise Diverged to end the run."""
        if optimizer is not self._optimizer:
            raise _build_unsupported_error(
                f"another {type(optimizer).__name__} than at the start of fit",
                "the optimizer of configure_optimizers",
                "optimizer.add_param_group(...), or write to its param_groups",
            )
        # Lightning calls the closure of other micro-batches by itself: only the last one arrives here.
        loss = closure()
        # None if training_step returned None; also where the module ran the closure before `optimizer.step()`.
        ran_before = loss is None and not self._owes_backward and self._hosted.stepper.in_window
        if (loss is None and not ran_before) or self._progress._skip_backward:
            self._owes_backward = False
            self._hosted.drop()
        else:
            self._hosted.apply()
            self.concluded = True
        if not self._hosted.moved:
            # Lightning is about to count this call of the optimizer in `global_step`; done here, so that every hook
            # after it, and code of the module after `optimizer.step()`, sees the right number. The Guardian ends a run
            # that only skips.
            self._progress.optim_progress.optimizer.step.increment_by(-1)
        return loss

    def _clip_gradients(
        self, model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Let a module with its own clipping clip now; otherwise the Stepper clips, after its check.

        Called by Lightning with unscaled gradients and the Trainer's current settings. Raises WrongUse for settings
        that changed since fit began.
        """
        if self._module_clips:
            super()._clip_gradients(model, optimizer, clip_val, gradient_clip_algorithm)
        elif convert_clipping(clip_val, gradient_clip_algorithm) != self._clipping:
            raise _build_unsupported_error(
                f"gradient_clip_val={clip_val!r} and gradient_clip_algorithm={gradient_clip_algorithm!r}, changed "
                "during fit",
                f"the values at the start of fit: {self._clipping}",
                "configure_gradient_clipping in the module, with self.clip_gradients(optimizer, value, 'norm'), and a "
                "Trainer without gradient_clip_val",
            )

    def clip_grad_by_value(self, optimizer: Any, clip_val: Any) -> None:
        """Clip as a hook of the module asks; an infinite gradient becomes NaN, so that the check still finds it."""
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad.masked_fill_(parameter.grad.isinf(), torch.nan)
        super().clip_grad_by_value(optimizer, clip_val)

    @property
    def _hosted(self) -> HostedStep:
        if self.hosted is None:
            raise WrongUse(
                "HalfstepPrecision outside of Trainer.fit",
                allowed="Trainer(plugins=step, callbacks=[step.callback]).fit(module)",
                do="use a halfstep.Stepper in your own loop",
            )
        return self.hosted

    # -- evaluation and state -----------------------------------------------------------------------------------

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in the precision of the run: validation, test and prediction."""
        precision = self._choice.precision
        with precision.scope(self._device), precision.autocast(self._device):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return counts, loss scale, average and the Guardian's memory, for Lightning's checkpoint."""
        return {} if self.hosted is None else self.hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state from Lightning's checkpoint; raise StateMismatch if it is of another run."""
        if self.hosted is not None:
            self.hosted.load_state_dict(state_dict)


class HalfstepCallback(Callback):
    """The part of the adapter that Lightning asks callbacks for: schedules, `global_step`, the log, the average."""

    def __init__(self, plugin: HalfstepPrecision) -> None:
        self._plugin = plugin
        self._averaged: AbstractContextManager[None] | None = None
        self._frequencies: list[tuple[Any, int]] = []
        """The schedules whose frequency is counted here, in batches of applied steps, during a fit."""
        self._held = self._batches = 0
        """The batches of this epoch that were in skipped steps, and those of the current window."""
        self._validated = False
        """Whether a validation ran after the current batch."""
        self._inputs = 0
        """The number of arguments of training_step that a rerun needs; 0 if it cannot be run again."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer that has the callback without its plugin."""
        if trainer.precision_plugin is not self._plugin:
            raise WrongUse(
                f"the callback of a HalfstepPrecision in a Trainer with {type(trainer.precision_plugin).__name__}",
                allowed="both, from one object",
                do="step = HalfstepPrecision('bf16'); Trainer(plugins=step, callbacks=[step.callback])",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hold schedules that advance per step back after a skip."""
        # How many of batch and index Lightning passes to training_step; 0 if it passes the iterator itself.
        names = inspect.signature(pl_module.training_step).parameters
        self._inputs = 0 if "dataloader_iter" in names else max(1, len(names))
        advance = pl_module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            config = next(config for config in trainer.lr_scheduler_configs if config.scheduler is scheduler)
            if config.interval == "epoch" or self._is_due(config, trainer.fit_loop.batch_idx + 1):
                advance(scheduler, metric)

        # On the instance, and taken off at the end: Lightning looks the hook up there, and a module that overrides it
        # keeps its own. Writing to the scheduler instead would end up in its state_dict.
        pl_module.lr_scheduler_step = lr_scheduler_step
        for config in trainer.lr_scheduler_configs:
            # Lightning counts batches for it, those of skipped steps too.
            if config.interval == "step" and not config.reduce_on_plateau and config.frequency > 1:
                self._frequencies.append((config, config.frequency))
                config.frequency = 1

    def _is_due(self, config: Any, batches: int) -> bool:
        """Return whether a schedule that advances per step advances after this batch of the epoch."""
        if config.reduce_on_plateau:
            # A validation is news, even after a skip; the loss of a skipped step is not.
            return self._validated or self._plugin.moved
        frequency = next((number for known, number in self._frequencies if known is config), 1)
        return self._plugin.concluded and self._plugin.moved and (batches - self._held) % frequency == 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove what `on_train_start` placed, and drop a window that was not concluded."""
        vars(pl_module).pop("lr_scheduler_step", None)
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._frequencies = []
        self._plugin.drop_open_window()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the module's own hooks and weights."""
        self._restore_hooks()
        self.on_train_end(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the arguments of the training step, so that a skipped one can be run again."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            # Lightning clears the gradients here. A window is still open after an epoch that was cut short, or where
            # the module calls the closure without the optimizer.
            self._plugin.drop_open_window()
            self._batches = 0
        if batch_idx == 0:
            self._held = 0
        self._batches += 1
        self._validated = False
        self._plugin.inputs = None if self._inputs == 0 else (batch, batch_idx)[: self._inputs]
        self._plugin.concluded = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the counts."""
        hosted = self._plugin.hosted
        if hosted is None or not self._plugin.concluded:
            return
        # The next batch may be None, and Lightning calls no start hook for it.
        self._plugin.concluded = False
        self._held += 0 if hosted.moved else self._batches
        if trainer.log_every_n_steps and (not hosted.moved or trainer.is_last_batch or _is_logging_due(trainer)):
            numbers = {f"halfstep/{name}": number for name, number in hosted.numbers.items()}
            pl_module.log_dict(numbers, batch_size=1)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches of this epoch were in skipped steps, for schedules with a frequency."""
        return {"held": self._held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict()`."""
        self._held = int(state_dict["held"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the buffers of before an open window, like everything else of the step."""
        if self._plugin.hosted is not None:
            replace_buffers_in_window(self._plugin.hosted.stepper, checkpoint["state_dict"])

    # -- the average --------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate with the averaged weights during a fit, if there is an average.

        `Trainer.validate` alone is asked about the module's own weights, which may be those of any checkpoint.
        """
        hosted = self._plugin.hosted
        if trainer.state.fn != "fit" or hosted is None or hosted.stepper.ema is None:
            return
        if hosted.stepper.in_window:
            raise WrongUse(
                "validation with averaged weights inside an accumulation window",
                allowed="val_check_interval as a multiple of accumulate_grad_batches",
                do="change one of them",
            )
        self._averaged = hosted.stepper.ema.in_place()
        self._averaged.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights that are trained, before anything is saved."""
        self._validated = True
        self._restore_hooks()

    def _restore_hooks(self) -> None:
        if self._averaged is not None:
            self._averaged.__exit__(None, None, None)
            self._averaged = None


def _check_supported(module: LightningModule, optimizers: list[Any], plugin: HalfstepPrecision) -> None:
    """Raise WrongUse for everything that would update weights past the plugin, or undo it."""
    trainer = module.trainer
    if not module.automatic_optimization:
        raise _build_unsupported_error(
            "manual optimization", "automatic optimization", "stepper.step() in training_step"
        )
    if len(optimizers) > 1:
        raise _build_unsupported_error(
            "several optimizers", "one optimizer", "manual loops take halfstep.Stepper(optimizers=...)"
        )
    if _overrides_hook(module, "backward"):
        raise _build_unsupported_error(
            "LightningModule.backward overridden", "Lightning's own", "change the loss instead"
        )
    if _overrides_hook(module, "optimizer_zero_grad"):
        raise _build_unsupported_error(
            "LightningModule.optimizer_zero_grad overridden",
            "Lightning's own: the Stepper clears the gradients of every window, to None",
            "remove it; Trainer(accumulate_grad_batches=...) to accumulate over batches",
        )
    _check_strategy(trainer.strategy)
    if plugin.callback not in trainer.callbacks:
        raise _build_unsupported_error(
            "Trainer(plugins=step) alone",
            "the plugin with its callback",
            "Trainer(plugins=step, callbacks=[step.callback])",
        )


def _check_strategy(strategy: Any) -> None:
    """Raise WrongUse for a strategy that updates weights, or places them, by itself."""
    # These derive from the two that are supported.
    others = (DeepSpeedStrategy, SingleDeviceXLAStrategy, XLAStrategy)
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(strategy, others):
        raise _build_unsupported_error(
            type(strategy).__name__, "one device, or strategy='ddp'", "halfstep's own trainer"
        )
    if isinstance(strategy, DDPStrategy) and strategy._model_averaging_period is not None:
        raise _build_unsupported_error(
            f"DDPStrategy(model_averaging_period={strategy._model_averaging_period})",
            "gradients that are summed over ranks in every step",
            "DDPStrategy() without it, and without a post-local SGD hook",
        )


def _is_logging_due(trainer: Trainer) -> bool:
    """Return whether Lightning passes the numbers of this batch to its loggers: it counts batches, skipped ones too."""
    due = getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", None)
    return trainer.global_step % trainer.log_every_n_steps == 0 if due is None else bool(due)


def _overrides_hook(module: LightningModule, hook: str) -> bool:
    """Return whether the module has its own hook, of its class or set on the instance."""
    found: bool = is_overridden(hook, module, LightningModule)
    return found


def _build_unsupported_error(given: str, allowed: str, do: str) -> WrongUse:
    return WrongUse(f"{given} under HalfstepPrecision", allowed=allowed, do=do)


def convert_clipping(limit: Any, algorithm: Any) -> Clipping:
    """Return Lightning's two settings as those of a Stepper; raise WrongUse for values that Lightning does not have."""
    if not (limit is None or isinstance(limit, (int, float))):
        raise _build_unsupported_error(f"gradient_clip_val={limit!r}", "a number, or None", "gradient_clip_val=1.0")
    kind = _parse_clip_algorithm(algorithm)
    # As in Lightning: without a positive value nothing is clipped.
    if limit is None or limit <= 0:
        return Clipping()
    return Clipping(value=float(limit)) if kind is GradClipAlgorithmType.VALUE else Clipping(norm=float(limit))


def _parse_clip_algorithm(given: Any) -> GradClipAlgorithmType:
    """Return the member of Lightning's enum: NORM or VALUE, which are those that a Stepper has too."""
    if given is None:
        return GradClipAlgorithmType.NORM  # Lightning's own default
    known = (GradClipAlgorithmType.NORM, GradClipAlgorithmType.VALUE)
    # A string where a script has written to the attribute of the Trainer; Lightning ignores its case.
    found = next((one for one in known if isinstance(given, str) and given.lower() == one.value), None)
    if found is None:
        raise _build_unsupported_error(
            f"gradient_clip_algorithm={given!r}",
            ", ".join(repr(one.value) for one in known),
            "gradient_clip_algorithm='norm'",
        )
    return found


def _run_training_step(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Run training_step without its log, and return its loss."""
    module: Any = unwrap_ddp(model)
    with _disable_log(module), _keep_metrics(module):
        output = module.training_step(*inputs)
    return output["loss"] if isinstance(output, Mapping) else output


@contextmanager
def _disable_log(module: Any) -> Iterator[None]:
    """Make `self.log` do nothing: a rerun must not be counted in metrics."""
    own = {name: vars(module).pop(name) for name in ("log", "log_dict") if name in vars(module)}
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]
        vars(module).update(own)


@contextmanager
def _keep_metrics(module: nn.Module) -> Iterator[None]:
    """Leave the module's metrics as they are: a rerun must not be counted in them."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    # Their numbers rather than deep copies of the metrics: those crash Python 3.11's garbage collector here.
    kept = [({name: _copy_state(state) for name, state in m.metric_state.items()}, m._update_count) for m in metrics]
    try:
        yield
    finally:
        for metric, (states, count) in zip(metrics, kept, strict=True):
            for name, state in states.items():
                setattr(metric, name, state)
            metric._update_count, metric._computed = count, None


def _copy_state(state: Any) -> Any:
    return state.detach().clone() if isinstance(state, Tensor) else list(state)
