"""halfstep inside Lightning's Trainer, with automatic optimization.

Lightning's loop calls its precision plugin around every forward pass, backward pass and optimizer step; the plugin here
turns these calls into one window of a Stepper. What no plugin is asked about (schedules, the count of steps, the log)
is done by the plugin's callback, through public hooks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.adapters.hosted_step import HostedStep, Options, unwrapped
from halfstep.errors import WrongUse
from halfstep.precision.select import choose_precision
from halfstep.step.report import StepReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The same library is published under two names with classes of their own; a script uses one of them.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
else:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

_WORDS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "tf32": "32-true"}
"""Lightning's names of the precisions, for what it prints."""


class HalfstepPrecision(Precision):
    """A precision plugin under which every optimizer step is a transaction.

    ```python
    step = HalfstepPrecision("bf16")
    trainer = Trainer(plugins=step, callbacks=[step.callback], gradient_clip_val=1.0)
    ```

    A skipped step leaves weights, buffers, optimizer state, schedules that advance per step, and `global_step` as they
    were. Accumulation and clipping are the Trainer's own settings.
    """

    def __init__(self, precision: str = "auto", **options: Unpack[Options]) -> None:
        """Take halfstep's own name of a precision, or any alias such as `bf16-mixed`; see `Options` for the rest."""
        self._asked, self._options = precision, options
        self.callback = HalfstepCallback(self)
        self.hosted: HostedStep | None = None
        """The step of the current fit; None while only validating, testing or predicting."""
        self.inputs: tuple[Any, ...] | None = None
        """The arguments of the current training_step, if they are known."""
        self.concluded = False
        """Whether the current batch ended a window."""
        self._last = self._owes_backward = False

    @property
    def report(self) -> StepReport | None:
        """The report of the last window."""
        return None if self.hosted is None else self.hosted.report

    # -- building -----------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Build the Stepper; raise WrongUse for a Trainer or a module that bypasses the plugin."""
        self.hosted, self._last, self._owes_backward = None, False, False
        self._device = next(model.parameters(), torch.empty(0)).device
        if not optimizers:  # validation, test or prediction alone
            strict = self._options.get("strict", False)
            self._choice = choose_precision(self._asked, device=self._device, strict=strict)
        else:
            module = unwrapped(model)
            _check_supported(module, optimizers, self)
            self._clipping = _clipping(module)
            self.hosted = HostedStep(
                model,
                optimizers[0],
                precision=self._asked,
                on_gradients=lambda _: self._after_closure(module, optimizers[0]),
                **self._clipping,
                **self._options,
            )
            self._choice = self.hosted.stepper.choice
        self.precision = _WORDS[self._choice.precision.name]
        return model, optimizers, lr_schedulers

    # -- one window ---------------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager[None]:
        """Return the context of a training step: the forward pass of one micro-batch."""
        if self._owes_backward:
            raise WrongUse(
                "training_step returned None inside an accumulation window",
                allowed="a loss for every micro-batch; None only with accumulate_grad_batches=1",
                do="return a loss, such as 0.0 * loss for a batch to leave out",
            )
        self._owes_backward = True
        rerun = None if self.inputs is None else (_training_loss, self.inputs)
        return self._hosted.forward(last=self._last, rerun=rerun)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of the Stepper."""
        self._owes_backward = False
        # Lightning has divided the loss by the number of micro-batches; the Stepper divides at the end of the window.
        many = model.trainer.accumulate_grad_batches
        self._hosted.stepper.backward(tensor if many == 1 else tensor * many)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the last micro-batch, which is the closure, and conclude the window; raise Diverged to end the run."""
        # Lightning calls the closure of other micro-batches by itself: only the last one arrives here.
        self._last = True
        try:
            loss = closure()
        finally:
            self._last = False
        self.concluded = True
        if loss is None:
            self._owes_backward = False
            self._hosted.drop()
        else:
            self._hosted.apply()
        return loss

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip as an overridden `configure_gradient_clipping` asks; the Trainer's own settings are the Stepper's."""
        # Called by Lightning with unscaled gradients, before the Stepper checks and clips them.
        if not self._clipping:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @property
    def _hosted(self) -> HostedStep:
        if self.hosted is None:
            raise WrongUse(
                "HalfstepPrecision outside of Trainer.fit",
                allowed="Trainer(plugins=step, callbacks=[step.callback]).fit(module)",
                do="use a halfstep.Stepper in a loop of your own",
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
        advance = pl_module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            config = next(config for config in trainer.lr_scheduler_configs if config.scheduler is scheduler)
            moved = self._plugin.hosted is None or self._plugin.hosted.moved
            if config.interval == "epoch" or moved:
                advance(scheduler, metric)

        # On the instance, and taken off at the end: Lightning looks the hook up there, and a module that overrides it
        # keeps its own. Writing to the scheduler instead would end up in its state_dict.
        pl_module.lr_scheduler_step = lr_scheduler_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove what `on_train_start` placed."""
        vars(pl_module).pop("lr_scheduler_step", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was: its own hooks and its own weights."""
        self.on_train_end(trainer, pl_module)
        self._put_back()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the arguments of the training step, so that a skipped one can be run again."""
        self._plugin.inputs = _arguments(pl_module, batch, batch_idx)
        self._plugin.concluded = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a skipped step out of `global_step`, and log the counts."""
        hosted = self._plugin.hosted
        if hosted is None or not self._plugin.concluded or hosted.report is None:
            return
        if not hosted.moved:
            # Lightning counts every call of the optimizer. The Guardian ends a run that only skips.
            trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_by(-1)
        if not hosted.moved or trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict({f"halfstep/{name}": number for name, number in hosted.numbers.items()})

    # -- the average --------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate with the averaged weights, if there is an average."""
        hosted = self._plugin.hosted
        if hosted is None or hosted.stepper.ema is None:
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
        self._put_back()

    def _put_back(self) -> None:
        if self._averaged is not None:
            self._averaged.__exit__(None, None, None)
            self._averaged = None


# -- what is supported ------------------------------------------------------------------------------------------------


def _check_supported(module: LightningModule, optimizers: list[Any], plugin: HalfstepPrecision) -> None:
    """Raise WrongUse for everything that would update weights past the plugin, or undo it."""
    trainer = module.trainer
    if not module.automatic_optimization:
        raise _unsupported("manual optimization", "automatic optimization", "stepper.step() in training_step")
    if len(optimizers) > 1:
        raise _unsupported("several optimizers", "one optimizer", "manual loops take halfstep.Stepper(optimizers=...)")
    if type(module).backward is not LightningModule.backward:
        raise _unsupported("LightningModule.backward overridden", "Lightning's own", "change the loss instead")
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise _unsupported(type(trainer.strategy).__name__, "one device, or strategy='ddp'", "halfstep's own trainer")
    if plugin.callback not in trainer.callbacks:
        raise _unsupported(
            "Trainer(plugins=step) alone",
            "the plugin with its callback",
            "Trainer(plugins=step, callbacks=[step.callback])",
        )


def _unsupported(given: str, allowed: str, do: str) -> WrongUse:
    return WrongUse(f"{given} under HalfstepPrecision", allowed=allowed, do=do)


def _clipping(module: LightningModule) -> dict[str, float | None]:
    """Return the Trainer's clipping as settings of a Stepper; nothing if the module has its own way of clipping."""
    limit, algorithm = module.trainer.gradient_clip_val, str(module.trainer.gradient_clip_algorithm or "norm")
    own = type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
    if not limit or own:
        return {}
    return {"clip_value": float(limit)} if algorithm.endswith("value") else {"clip_norm": float(limit)}


# -- running a step again ---------------------------------------------------------------------------------------------


def _arguments(module: LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...] | None:
    """Return the arguments that Lightning passes to training_step; None where it passes the iterator itself."""
    names = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in names:
        return None
    return (batch, batch_idx)[: max(1, len(names))]


def _training_loss(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Run training_step without its log, and return its loss."""
    module: Any = unwrapped(model)
    with _without_log(module):
        output = module.training_step(*inputs)
    return output["loss"] if isinstance(output, Mapping) else output


@contextmanager
def _without_log(module: Any) -> Iterator[None]:
    """Make `self.log` do nothing: a rerun must not be counted in metrics."""
    own = {name: vars(module).pop(name) for name in ("log", "log_dict") if name in vars(module)}
    module.log = module.log_dict = lambda *_, **__: None
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]
        vars(module).update(own)
