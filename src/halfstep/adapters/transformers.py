"""halfstep inside the Trainer of transformers: a mixin that turns its optimizer steps into transactions.

The Trainer keeps its loop, its data, its schedule, its log and its checkpoints. The mixin runs every forward pass in
the precision of `TrainingArguments`, every backward pass with the Stepper's loss scale, and concludes the window where
the Trainer calls its optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from transformers.trainer_utils import get_last_checkpoint

from halfstep.adapters.accelerate import refuse_other_engines
from halfstep.adapters.hosted_step import (
    Clipping,
    HostedStep,
    HostedStepOptions,
    check_adapter_options,
    unwrap_ddp,
)
from halfstep.errors import StateMismatch, WrongUse
from halfstep.finding import Finding, format_first_names
from halfstep.precision.select import Choice, choose_precision
from halfstep.step.census import list_optimizer_parameters
from halfstep.step.report import StepReport
from halfstep.step.storage.stored_formats import TRAINED, store_trained_in_fp32
from halfstep.user_code import warn_user

if TYPE_CHECKING:
    # The mixin stands before the Trainer in a class's bases, and calls it through super().
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

STATE = "halfstep.safetensors"
"""The file of the Stepper's own state in a checkpoint of the Trainer."""


class HalfstepMixin(_Trainer):
    """A mixin for `transformers.Trainer`: every optimizer step is a transaction.

    ```python
    class MyTrainer(HalfstepMixin, Trainer): ...
    trainer = MyTrainer(model, TrainingArguments("out", bf16=True, max_grad_norm=1.0), train_dataset=data)
    ```

    The precision is that of the arguments: `bf16`, `fp16`, `tf32`, or fp32. Accumulation and `max_grad_norm` are
    respected. A skipped step leaves weights, buffers, optimizer state and schedule unchanged; `global_step` counts it,
    because the Trainer derives its position in the data from it. The log has the number of applied and skipped steps.
    """

    def __init__(self, *args: Any, halfstep: HostedStepOptions | None = None, **kwargs: Any) -> None:
        """Take the Trainer's own arguments, and `halfstep` for the settings in `HostedStepOptions`."""
        self._options: HostedStepOptions = halfstep or {}
        check_adapter_options(self._options)
        self.hosted: HostedStep | None = None
        """The step of the current `train`."""
        self._for_evaluation: Choice | None = None
        """The precision of an evaluation or a prediction before any training."""
        self._resumed_from: str | None = None
        self._in_step = False
        self._again = False
        self._inputs: tuple[Any, Any] | None = None
        self._losses: list[float] = []
        """The losses of applied steps since the last line of the log."""
        self._loss_of_all, self._of_steps = 0.0, 0
        """The sum of the losses of all applied steps of a run, and their number."""
        super().__init__(*args, **kwargs)
        self.add_callback(_TrainerEvents(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse the bases in the other order, where the Trainer's own methods would hide those of the mixin."""
        super().__init_subclass__(**kwargs)
        names = [base.__name__ for base in cls.__mro__[1:]]
        if "Trainer" in names[: names.index(HalfstepMixin.__name__)]:
            raise WrongUse(
                f"class {cls.__name__} with HalfstepMixin after the Trainer",
                allowed="the mixin first",
                do=f"class {cls.__name__}(HalfstepMixin, Trainer)",
            )

    @property
    def report(self) -> StepReport | None:
        """The report of the last window."""
        return None if self.hosted is None else self.hosted.report

    # -- building -----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator without its own mixed precision: no second autocast, no second scaler."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = False
        self.accelerator.scaler = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; before, store what an adapter of peft trains in fp32, and report it by name.

        peft leaves `modules_to_save` in the base's format, and TRL casts adapters of a quantized base to bf16.
        """
        widened = store_trained_in_fp32(self.model) if hasattr(self.model, "peft_config") else []
        if widened:
            evidence = (
                "adapters in 16 bits, which lose small updates to rounding, are now in fp32: "
                f"{format_first_names(widened)}"
            )
            fix = "nothing; get_peft_model(..., autocast_adapter_dtype=True) widens all but modules_to_save"
            warn_user(str(Finding(TRAINED, "note", evidence, fix)))
        return super().create_optimizer(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; resume as the Trainer does, with the Stepper's own state."""
        found = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self._resumed_from = found or None
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def begin(self) -> None:
        """Start a run after everything is prepared; the Trainer may start it again with a smaller batch."""
        self.hosted, self._losses, self._loss_of_all, self._of_steps = None, [], 0.0, 0
        self._host(self.model_wrapped)

    def drop_open_window(self) -> None:
        """Drop a window that the Trainer has left without a step of the optimizer."""
        if self.hosted is not None and self.hosted.stepper.in_window:
            self.hosted.drop()

    def _host(self, model: nn.Module) -> HostedStep:
        """Return the step of this run."""
        if self.hosted is None:
            _check_supported(self)
            clipping = _convert_max_grad_norm(self.args.max_grad_norm)
            _check_all_owned(unwrap_ddp(model), self.optimizer.optimizer, clipping)
            self.hosted = HostedStep(
                model,
                self.optimizer.optimizer,
                precision=_find_requested_precision(self.args),
                clipping=clipping,
                loop="transformers",
                **self._options,
            )
            # Turn a prepared optimizer into a `_HostedOptimizer`; everyone who holds it keeps the same object.
            # A torch schedule has put its own wrapper of `step` on the instance, in front of the class.
            optimizer: Any = self.optimizer
            vars(optimizer).pop("step", None)
            optimizer.__class__ = _HostedOptimizer
            optimizer.hosted, optimizer.after = self.hosted, self._after
            self.accelerator.backward = self._backward
            self.accelerator.clip_grad_norm_ = _DeferredClipping(clipping)
            if self._resumed_from is not None:
                self.hosted.load_state_dict(_read_state(Path(self._resumed_from)))
        return self.hosted

    # -- one window ---------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run the forward and backward pass of one micro-batch."""
        self._host(model)
        self._inputs = inputs, num_items_in_batch
        self._in_step = True
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._in_step, self._inputs = False, None
        return loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass: a window's while training, the same precision otherwise."""
        if self._in_step and self.hosted is not None:
            if self.hosted.complete:
                self.hosted.drop()
                raise WrongUse(
                    f"{type(self).__name__}.training_step, which runs a batch twice for one update",
                    allowed="one call of super().training_step for each batch",
                    do="compute the sum of both losses in compute_loss; for several batches in one update, set "
                    "TrainingArguments(gradient_accumulation_steps=...)",
                )
            rerun = (self._loss_again, (self._inputs, self.current_gradient_accumulation_steps))
            return self.hosted.forward(last=self.accelerator.sync_gradients, rerun=rerun)
        return self._evaluating()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        device = self.args.device
        precision = self._choice.precision
        with precision.scope(device), precision.autocast(device):
            yield

    @property
    def _choice(self) -> Choice:
        if self.hosted is not None:
            return self.hosted.stepper.choice
        if self._for_evaluation is None:
            self._for_evaluation = choose_precision(_find_requested_precision(self.args), device=self.args.device)
        return self._for_evaluation

    def _backward(self, loss: Tensor, **_: Any) -> None:
        # The Trainer has divided the loss, by micro-batches or by items; the Stepper divides at the end of the window.
        many = self.current_gradient_accumulation_steps
        if self.hosted is None or not self._in_step:
            raise WrongUse(
                f"{type(self).__name__}.training_step without that of HalfstepMixin",
                allowed="compute_loss overridden, or a training_step that calls super().training_step(...)",
                do="call super().training_step(model, inputs, num_items_in_batch)",
            )
        self.hosted.stepper.backward(loss if many == 1 else loss * many)

    def _loss_again(self, model: nn.Module, batch: Any) -> Any:
        """Run the forward pass of a micro-batch again, outside of the Trainer's loop."""
        (inputs, num_items), many = batch
        self._again = True
        try:
            loss = self.compute_loss(unwrap_ddp(model), self._prepare_inputs(inputs), num_items_in_batch=num_items)
        finally:
            self._again = False
        by_items = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        return loss * many if by_items else loss

    def _after(self, report: StepReport) -> None:
        if report.applied:
            self._losses.append(report.loss)
            self._loss_of_all, self._of_steps = self._loss_of_all + report.loss, self._of_steps + 1

    # -- log and checkpoints ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss of applied steps, the real gradient norm, and how many steps were applied and skipped."""
        if self._again:
            return
        # The Trainer's own figures replace a NaN by 0 or by the mean of other steps.
        if self.hosted is not None and "train_loss" in logs:
            logs["train_loss"] = self._loss_of_all / self._of_steps if self._of_steps else math.nan
        if self.hosted is not None and self.hosted.report is not None and {"loss", "learning_rate"} <= logs.keys():
            logs["loss"] = sum(self._losses) / len(self._losses) if self._losses else math.nan
            logs["grad_norm"] = self.hosted.report.grad_norm
            logs |= {f"halfstep_{name}": number for name, number in self.hosted.numbers.items()}
            self._losses = []
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the Stepper's state next to the optimizer's, before the checkpoint counts as complete."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.hosted is not None and self.args.should_save:
            _write_state(Path(output_dir), self.hosted.state_dict())


class _TrainerEvents(TrainerCallback):
    """Events that the Trainer passes only to callbacks: the start of a run and the end of an epoch, however it ends."""

    def __init__(self, trainer: HalfstepMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Build the step, so that nothing is trained without it."""
        self._trainer.begin()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Drop an open window before anything is evaluated or saved."""
        self._trainer.drop_open_window()


class _HostedOptimizer(AcceleratedOptimizer):
    """The Trainer's optimizer: its step concludes the window, and it knows whether that was skipped."""

    hosted: HostedStep
    after: Any

    def step(self, closure: Any = None) -> None:
        """Conclude the window; raise Diverged if the run cannot continue."""
        self._opt_called = True  # torch's schedules warn where they are stepped before it
        self.after(self.hosted.apply())

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # and where `step` is not the one they have wrapped

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last window moved no weight; the Trainer then leaves its schedule alone."""
        return not self.hosted.moved


def _convert_max_grad_norm(limit: Any) -> Clipping:
    """Return `max_grad_norm` as a setting of a Stepper: as in the Trainer, nothing is clipped unless it is positive."""
    if not (limit is None or isinstance(limit, (int, float))):
        raise WrongUse(f"max_grad_norm={limit!r}", allowed="a number, or None", do="max_grad_norm=1.0")
    return Clipping(norm=float(limit)) if limit is not None and limit > 0 else Clipping()


def _check_all_owned(model: nn.Module, optimizer: Optimizer, clipping: Clipping) -> None:
    """Raise WrongUse if the Trainer's norm would have gradients in it that the Stepper does not clip."""
    owned = {id(p) for p in list_optimizer_parameters(optimizer)}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned]
    if clipping.norm is not None and others:
        raise WrongUse(
            f"max_grad_norm={clipping.norm} and {len(others)} trainable parameters that the optimizer does not have, "
            f"such as {others[0]}: the Trainer's norm counts their gradients",
            allowed="an optimizer with every trainable parameter, or max_grad_norm=0",
            do="requires_grad_(False) on parameters that are not trained",
        )


class _DeferredClipping:
    """In the place of the accelerator's `clip_grad_norm_`: the Stepper clips, after its check."""

    def __init__(self, clipping: Clipping) -> None:
        self._clipping = clipping

    def __call__(self, parameters: object, max_norm: float, norm_type: float = 2) -> float:
        """Clip nothing, and return NaN: the report has the norm that is logged; raise WrongUse for another clip."""
        # The Trainer asks for the norm alone by an infinite limit.
        if norm_type != 2 or (max_norm != math.inf and _convert_max_grad_norm(max_norm) != self._clipping):
            raise WrongUse(
                f"clip_grad_norm_(max_norm={max_norm!r}, norm_type={norm_type!r}) under HalfstepMixin",
                allowed=f"the run's initial max_grad_norm: {self._clipping}",
                do="TrainingArguments(max_grad_norm=...), unchanged during train()",
            )
        return math.nan


def _find_requested_precision(arguments: Any) -> str:
    if arguments.bf16 or arguments.fp16:
        return "bf16" if arguments.bf16 else "fp16"
    return "tf32" if arguments.tf32 else "fp32"


def _check_supported(trainer: Any) -> None:
    refuse_other_engines(trainer.accelerator)
    if trainer.args.n_gpu > 1:
        raise WrongUse(
            f"DataParallel on {trainer.args.n_gpu} GPUs in one process",
            allowed="one process a GPU",
            do="torchrun --nproc-per-node GPUS script.py",
        )
    if isinstance(trainer.optimizer.optimizer, LayerWiseDummyOptimizer) or trainer.accelerator.has_lomo_optimizer:
        raise WrongUse(
            f"optim={str(trainer.args.optim)!r}, which updates the weights during backward",
            allowed="an optimizer whose step() makes the update",
            do="the same optimizer without `layerwise`, or adamw_torch",
        )


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    from halfstep.checkpoint.packing import pack_state

    plain, tensors = pack_state(state, "halfstep")
    save_file(
        {name: t.detach().contiguous() for name, t in tensors.items()}, folder / STATE, {"halfstep": json.dumps(plain)}
    )


def _read_state(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    from halfstep.checkpoint.packing import unpack_state

    if not (folder / STATE).exists():
        raise StateMismatch(
            f"{folder} has no {STATE}: it was saved without HalfstepMixin",
            allowed="a checkpoint of a Trainer with HalfstepMixin",
            do="start from its weights: from_pretrained(...), without resume_from_checkpoint",
        )
    with safe_open(folder / STATE, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        plain = json.loads(file.metadata()["halfstep"])
    state: dict[str, Any] = unpack_state(plain, tensors, str(folder / STATE))
    return state
