"""Situations of people who train with transformers' Trainer, which the contract's own cases do not have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerControl, TrainerState

from halfstep.adapters.transformers import HalfstepMixin
from halfstep.errors import WrongUse
from tests.adapters.test_transformers import InOrder, Ours, arguments, build, logged
from tests.support.foreign_loops import WINDOWS, Case, same

pytestmark = pytest.mark.filterwarnings("ignore")
ONE, TWO = Case("fp32", 1, "loss", 1), Case("fp32", 2, "loss", 1)


def language_model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def tokens() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(50, (8,), generator=generator) for _ in range(8)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def spoil(model: nn.Module, forward: int) -> None:
    """Make the output of one forward pass of the training NaN."""
    seen = []
    head = next(module for name, module in model.named_modules() if name.endswith("lm_head"))

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return output
        seen.append(None)
        return output * math.nan if len(seen) == forward else output

    head.register_forward_hook(hook)


def tuned(folder: Path, kind: type = Ours, *, model: Any = None, bad: int = 3, **settings: Any) -> Any:
    """A Trainer of a small language model; one forward pass of its training gives NaN."""
    model = model or language_model()
    spoil(model, bad)
    own = {"halfstep": {"tell": lambda event: None}} if issubclass(kind, HalfstepMixin) else {}
    given = {name: settings.pop(name) for name in ("callbacks", "eval_dataset") if name in settings}
    asked = arguments(folder, settings.pop("case", ONE), **{"max_steps": 6, "learning_rate": 1e-2, **settings})
    return kind(model, asked, train_dataset=tokens(), **own, **given)


def held(trainer: Any) -> bool:
    counts = trainer.hosted.stepper.counts
    finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    return finite and (counts.applied, counts.attempted) == (5, 6)


# -- classes of people's own ------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_training_step_past_the_mixin_is_refused_by_name(tmp_path: Path) -> None:
    """It would train without the step, in silence."""

    class Past(Ours):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model.train(), self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = tuned(tmp_path, Past)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(WrongUse, match=r"Past\.training_step"):
        trainer.train()
    assert same(before, dict(trainer.model.state_dict()))


@pytest.mark.wording
@pytest.mark.parametrize("many", [1, 2])
def test_a_batch_that_is_run_twice_is_refused(many: int, tmp_path: Path) -> None:
    """The Trainer adds up both gradients, where the Stepper would average them."""

    class Twice(Ours):
        def training_step(self, *given: Any) -> Any:
            super().training_step(*given)
            return super().training_step(*given)

    trainer = tuned(tmp_path, Twice, case=Case("fp32", many, "loss", 1))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(WrongUse, match=r"Twice\.training_step"):
        trainer.train()
    assert same(before, dict(trainer.model.state_dict()))


@pytest.mark.wording
def test_the_mixin_comes_first() -> None:
    with pytest.raises(WrongUse, match="after the Trainer"):

        class Behind(Trainer, HalfstepMixin): ...

    with pytest.raises(WrongUse, match="after the Trainer"):

        class FarBehind(InOrder, HalfstepMixin): ...


def test_what_a_loss_logs_is_its_own_and_is_not_logged_again_by_a_diagnosis(tmp_path: Path) -> None:
    class Tells(Ours):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, **named)
            self.log({"loss": 7.0, "mine": 1.0})
            return loss

    trainer = tuned(tmp_path, Tells)
    trainer.train()
    mine = [line for line in trainer.state.log_history if "mine" in line]
    assert [line["loss"] for line in mine] == [7.0] * WINDOWS
    theirs = [line["loss"] for line in trainer.state.log_history if "learning_rate" in line]
    assert sum(map(math.isnan, theirs)) == 1


# -- the log ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 6])
def test_the_loss_of_the_whole_run_is_that_of_applied_steps(tmp_path: Path, every: int) -> None:
    output = tuned(tmp_path, logging_steps=every).train()
    steps = tuned(tmp_path)
    steps.train()
    applied = [loss for loss in logged(steps, "loss") if not math.isnan(loss)]
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(sum(applied) / 5)


# -- windows that are not concluded, and runs that begin again --------------------------------------------------------


def test_a_run_that_stops_inside_a_window_drops_it(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    trainer, seen = build(tmp_path, TWO)
    trainer.add_callback(Stops())
    trainer.train()
    assert not trainer.hosted.stepper.in_window
    assert same(dict(trainer.model.state_dict()), seen.states[-1]["model"])


def test_a_smaller_batch_after_running_out_of_memory_begins_anew(tmp_path: Path) -> None:
    class RunsOut(Ours):
        left = 1

        def compute_loss(self, *args: Any, **named: Any) -> Any:
            if self.left and self.state.global_step == 1:
                self.left -= 1
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(*args, **named)

    trainer = tuned(tmp_path, RunsOut, bad=0, auto_find_batch_size=True, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.hosted.stepper.counts.attempted == trainer.state.global_step == 6


def test_a_second_training_is_protected_too(tmp_path: Path) -> None:
    trainer, seen = build(tmp_path, ONE)
    trainer.train()
    trainer.train()
    assert same(seen.states[WINDOWS + 2], seen.states[WINDOWS + 1])
    assert trainer.hosted.stepper.counts.applied == WINDOWS - 1


def test_an_interrupt_inside_a_window_drops_it(tmp_path: Path) -> None:
    class Interrupted(Ours):
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(*args, **named)
            if self.state.global_step == 2:
                raise KeyboardInterrupt
            return loss

    trainer, seen = build(tmp_path, TWO)
    trainer.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert same(dict(trainer.model.state_dict()), seen.states[-1]["model"])


# -- models and settings of people's own ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"max_grad_norm": 0.0},
        {"optim": "adafactor"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2},
        {"case": TWO, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        | {"load_best_model_at_end": True},
    ],
    ids=lambda settings: "-".join(settings)[:40],
)
def test_settings_hold(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = tuned(tmp_path, eval_dataset=tokens()[:2], **settings)
    trainer.train()
    assert held(trainer)
    norms = logged(trainer, "grad_norm")
    assert sum(map(math.isfinite, norms)) == 5


def test_lora_resumes_exactly_after_a_skip(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        return peft.get_peft_model(language_model(), config)

    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = tuned(tmp_path / "whole", model=adapted(), bad=2, **saving)
    whole.train()
    again = tuned(tmp_path / "again", model=adapted(), bad=0, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert held(whole)
    assert same(dict(again.model.state_dict()), dict(whole.model.state_dict()))
    assert again.hosted.stepper.counts.state_dict() == whole.hosted.stepper.counts.state_dict()


def test_the_last_checkpoint_under_a_limit_is_found_and_resumed(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    whole, seen = build(tmp_path / "whole", TWO, **saving)
    whole.train()
    half, _ = build(tmp_path / "half", TWO, **saving)
    half.add_callback(Stops())
    half.train()
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["checkpoint-4"]
    rest, end = build(tmp_path / "half", TWO, **saving)
    rest.train(resume_from_checkpoint=True)
    assert same(end.states[-1], seen.states[-1])
    assert rest.hosted.stepper.counts.state_dict() == whole.hosted.stepper.counts.state_dict()


def test_evaluation_alone_may_be_nan(tmp_path: Path) -> None:
    trainer = tuned(tmp_path, bad=0, eval_strategy="steps", eval_steps=2, eval_dataset=tokens()[:2])
    trainer.evaluate()
    trainer.model.lm_head.register_forward_hook(lambda *given: None if torch.is_grad_enabled() else given[2] * math.nan)
    trainer.train()
    assert trainer.hosted.stepper.counts.applied == 6
    assert math.isnan([line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line][-1])


# -- what it cannot protect -------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_callback_before_the_step_sees_gradients_with_their_scale_and_may_not_edit_them(tmp_path: Path) -> None:
    """The Trainer calls it between backward and its optimizer, and the Stepper unscales in the optimizer's place."""
    norms = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))

    class Edits(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            model.lm_head.weight.grad.mul_(0.5)

    trainer = tuned(tmp_path, bad=0, case=TWO, max_steps=1, callbacks=[Looks()])
    trainer.train()
    assert norms[0] == pytest.approx(2 * logged(trainer, "grad_norm")[0], rel=1e-5)
    with pytest.raises(WrongUse, match="between backward"):
        tuned(tmp_path, bad=0, callbacks=[Edits()]).train()
