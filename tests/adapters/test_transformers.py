"""The transaction inside the Trainer of transformers, with the real library."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from halfstep.adapters.transformers import STATE, HalfstepMixin
from halfstep.errors import Diverged, StateMismatch, WrongUse
from halfstep.guard.streak import Limits
from halfstep.step.loss import StaticScale
from tests.support.foreign_loops import (
    BAD,
    CASES,
    ON_RANKS,
    WINDOWS,
    Case,
    Model,
    Seen,
    check_contract,
    check_ranks,
    same,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")


class InOrder(Trainer):
    """A Trainer that takes the data in their order."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Ours(HalfstepMixin, InOrder):
    """The same, with halfstep."""


class Looks(TrainerCallback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_step_end(self, *_: Any, model: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
        self.seen.look(model, optimizer, lr_scheduler)


def arguments(folder: Path, case: Case, **settings: Any) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    data = {"per_device_train_batch_size": 1, "remove_unused_columns": False, "max_steps": WINDOWS}
    numbers = {"gradient_accumulation_steps": case.accumulate, "max_grad_norm": 1.0, "use_cpu": True}
    formats = {"bf16": case.precision == "bf16", "fp16": case.precision == "fp16"}
    return TrainingArguments(str(folder), **{**quiet, **data, **numbers, **formats, **settings})


def build(folder: Path, case: Case, kind: type = Ours, *, bad: bool = True, **settings: Any) -> tuple[Any, Seen]:
    torch.manual_seed(0)
    model, looks = Model(), Looks()
    optimizer = case.optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WINDOWS)
    # A static scale: a dynamic one is lower after the skip, and fp16 rounds other gradients away then.
    scale = {"loss_scale": StaticScale(2.0**10)} if case.precision == "fp16" else {}
    own = {"halfstep": {"tell": lambda event: None, **scale, **settings.pop("halfstep", {})}} if kind is Ours else {}
    data = case.microbatches(bad=bad)
    windows = len(data) // case.accumulate
    trainer = kind(
        model,
        arguments(folder, case, **{"max_steps": windows, **settings}),
        train_dataset=data,
        data_collator=lambda items: items[0],
        optimizers=(optimizer, schedule),
        callbacks=[looks],
        **own,
    )
    return trainer, looks.seen


def logged(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if "loss" in line]


_without: dict[Case, Seen] = {}


def without_trouble(folder: Path, case: Case) -> Seen:
    if case not in _without:
        trainer, _without[case] = build(folder, case, bad=False)
        trainer.train()
    return _without[case]


@pytest.mark.parametrize("case", CASES)
def test_a_skip_changes_nothing_and_the_run_goes_on_as_if_it_had_not_been(tmp_path: Path, case: Case) -> None:
    trainer, seen = build(tmp_path, case)
    trainer.train()
    check_contract(seen, without_trouble(tmp_path, case.without_trouble))
    assert trainer.hosted.stepper.counts.applied == WINDOWS - 1
    assert trainer.state.global_step == WINDOWS, "attempts bound the run"


def test_the_log_is_right(tmp_path: Path) -> None:
    trainer, seen = build(tmp_path, Case("fp32", 2, "loss", 1))
    trainer.train()
    losses, norms = logged(trainer, "loss"), logged(trainer, "grad_norm")
    assert math.isnan(losses[BAD])
    assert math.isnan(norms[BAD])
    assert all(
        math.isfinite(x) and x > 0 for place in range(WINDOWS) if place != BAD for x in (losses[place], norms[place])
    )
    assert logged(trainer, "halfstep_applied") == [1, 2, 2, 3, 4, 5]
    assert logged(trainer, "halfstep_skipped") == [0, 0, 1, 1, 1, 1]
    # The rate that a step was made with: after the skip the same again.
    rates = logged(trainer, "learning_rate")
    assert rates[BAD] == rates[BAD + 1] == seen.lrs[BAD]


def test_healthy_steps_are_the_trainers_own_to_the_bit(tmp_path: Path) -> None:
    case = Case("fp32", 2, "loss", 1)
    ours, seen = build(tmp_path, case, bad=False)
    theirs, expected = build(tmp_path, case, InOrder, bad=False)
    ours.train()
    theirs.train()
    assert same(seen.states, expected.states)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-6)
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-6)


def test_a_language_model_that_divides_by_its_tokens(tmp_path: Path) -> None:
    """transformers' models divide by the tokens of the whole window; so does the step."""

    def run(kind: type) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = GPT2LMHeadModel(config)
        generator = torch.Generator().manual_seed(3)
        data = []
        for length in (8, 5, 12, 3, 9, 7, 4, 11):
            tokens = torch.randint(50, (1, length), generator=generator)
            data.append({"input_ids": tokens, "labels": tokens})
        case = Case("fp32", 4, "loss", 1)
        told = {"halfstep": {"tell": lambda event: None}} if kind is Ours else {}
        settings = arguments(tmp_path, case, max_steps=2, learning_rate=1e-2, optim="sgd")
        trainer = kind(model, settings, train_dataset=data, data_collator=lambda items: items[0], **told)
        trainer.train()
        return model, logged(trainer, "loss")

    (ours, losses), (theirs, expected) = run(Ours), run(InOrder)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_resumes_exactly(tmp_path: Path, precision: str) -> None:
    case = Case(precision, 2, "gradient", 1)
    saving = {"save_strategy": "steps", "save_steps": 4, "halfstep": {"ema_decay": 0.9}}
    whole, seen = build(tmp_path / "whole", case, **saving)
    whole.train()
    again, rest = build(tmp_path / "again", case, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert same(rest.states, seen.states[4:])
    assert again.hosted.stepper.counts.state_dict() == whole.hosted.stepper.counts.state_dict()
    assert same(again.hosted.stepper.ema.averages(), whole.hosted.stepper.ema.averages())
    assert again.hosted.stepper.scale_in_use == whole.hosted.stepper.scale_in_use


@pytest.mark.wording
def test_a_checkpoint_without_its_state_is_refused(tmp_path: Path) -> None:
    case = Case("fp32", 1, "loss", 1)
    trainer, _ = build(tmp_path, case, save_strategy="steps", save_steps=3)
    trainer.train()
    (tmp_path / "checkpoint-3" / STATE).unlink()
    again, seen = build(tmp_path, case)
    with pytest.raises(StateMismatch, match="HalfstepMixin"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert not seen.states


def test_a_run_that_only_skips_is_ended(tmp_path: Path) -> None:
    case = Case("fp32", 1, "loss", 1)
    limits = {"limits": Limits(skips_in_a_row=3, diagnoses=0)}
    trainer, _ = build(tmp_path, case, halfstep=limits, max_steps=50)
    trainer.train_dataset = [case.microbatches()[BAD]] * 10
    with pytest.raises(Diverged):
        trainer.train()
    assert trainer.hosted.stepper.counts.applied == 0


def test_a_failed_step_is_diagnosed_and_recorded(tmp_path: Path) -> None:
    from halfstep.adapters.replay import replay

    told: list[Any] = []
    own = {"tell": told.append, "record": tmp_path / "failed"}
    trainer, _ = build(tmp_path, Case("fp32", 2, "loss", 1), halfstep=own)
    trainer.train()
    assert any(event.kind == "verdict" and event.facts.get("cause") == "data" for event in told)
    verdict = replay(tmp_path / "failed", Model(), lambda model, batch: model(**batch[0][0])["loss"])
    assert verdict.cause == "data"


def test_evaluation_computes_in_the_same_precision(tmp_path: Path) -> None:
    case, formats = Case("bf16", 1, "loss", 1), []

    class Tells(Ours):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
            formats.append((model.training, outputs["logits"].dtype))
            return (loss, outputs) if return_outputs else loss

    trainer, _ = build(tmp_path, case, bad=False)
    trainer.__class__ = Tells
    trainer.train()
    trainer.evaluate(case.microbatches(bad=False)[:1])
    assert {dtype for _, dtype in formats} == {torch.bfloat16}
    assert {training for training, _ in formats} == {True, False}


@pytest.mark.wording
def test_trainable_weights_in_sixteen_bits_are_refused_by_name(tmp_path: Path) -> None:
    trainer, _ = build(tmp_path, Case("bf16", 1, "loss", 1))
    trainer.model.to(torch.bfloat16)
    with pytest.raises(WrongUse, match=r"first\.weight"):
        trainer.train()


def test_what_it_cannot_protect(tmp_path: Path) -> None:
    """`global_step` counts the skip, for the Trainer finds its place in the data by it."""
    trainer, _ = build(tmp_path, Case("fp32", 1, "loss", 1))
    trainer.train()
    assert trainer.state.global_step == trainer.hosted.stepper.counts.applied + 1


# -- two ranks --------------------------------------------------------------------------------------------------------


def _train_on(rank: int, folder: str, case: Case) -> Any:
    trainer, seen = build(Path(folder), case)
    trainer.train_dataset = case.dealt()
    trainer.train()
    return seen, trainer.hosted.stepper.counts.state_dict(), logged(trainer, "halfstep_applied") if rank == 0 else []


@pytest.mark.ranks
@pytest.mark.parametrize("case", ON_RANKS, ids=str)
def test_two_ranks_skip_together(tmp_path: Path, two_ranks: Ranks, case: Case) -> None:
    (seen, counts, applied), (other, other_counts, _) = two_ranks(_train_on, str(tmp_path), case)
    check_ranks(seen, other)
    assert counts == other_counts
    assert applied == [1, 2, 2, 3, 4, 5]


def test_the_model_is_untouched_by_accelerates_autocast(tmp_path: Path) -> None:
    trainer, _ = build(tmp_path, Case("bf16", 1, "loss", 1), bad=False)
    trainer.train()
    assert "forward" not in vars(trainer.model)
    assert isinstance(trainer.model.first, nn.Linear)
