"""A guardian among others: somebody's guards and loops, a recorder that fails, and a guardian from before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import FailedStep, GuardEvent
from halfstep.step.report import StepReport
from tests.support.digest import digest_of
from tests.support.models import plain_model


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def nan(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * math.nan


class EveryNth:
    """Refuses one step in so many."""

    name = "picky"

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, 0

    def passes(self, report: StepReport) -> bool:
        self.seen += 1
        return self.seen % self.n != 0


def guarded(*guards: Any, **options: Any) -> tuple[Guardian, list[GuardEvent]]:
    model, told = plain_model(), list[GuardEvent]()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision="fp32", guards=guards, observe=False)
    return Guardian(stepper, tell=told.append, **options), told


def train(guardian: Guardian, steps: int) -> None:
    for _ in range(steps):
        guardian.step(square, torch.randn(6, 8))


@pytest.mark.wording
def test_somebodys_guard_that_refuses_for_ever_ends_the_run_with_its_name() -> None:
    guardian, _ = guarded(EveryNth(1))
    before = digest_of(dict(guardian.stepper.model.named_parameters()))
    with pytest.raises(Diverged, match="the guard 'picky' refuses") as raised:
        train(guardian, 60)
    assert guardian.stepper.counts.attempted == 26
    assert "'picky'" in raised.value.do
    assert digest_of(dict(guardian.stepper.model.named_parameters())) == before


def test_somebodys_guard_may_refuse_now_and_then() -> None:
    guardian, told = guarded(EveryNth(4))
    train(guardian, 300)
    assert guardian.stepper.counts.skipped == {"guard:picky": 75}
    assert told == []


def test_a_recorder_that_fails_does_not_end_the_run() -> None:
    def full(trouble: FailedStep) -> None:
        raise OSError(28, "No space left on device")

    guardian, told = guarded(record=full)
    assert guardian.step(nan, torch.randn(6, 8)).reason == "loss_not_finite"
    assert guardian.step(square, torch.randn(6, 8)).applied
    assert sorted(t.kind for t in told) == ["alarm", "verdict"]
    assert "No space left on device" in next(t.text for t in told if t.kind == "alarm")


def test_the_last_diagnosis_is_said_to_be_the_last() -> None:
    guardian, told = guarded(limits=Limits(diagnoses=2, skip_share=1.0))
    for _ in range(6):
        guardian.step(square, torch.randn(6, 8))
        guardian.step(nan, torch.randn(6, 8))
    assert [t.kind for t in told] == ["verdict", "verdict", "alarm"]
    assert told[-1].text.startswith("2 diagnoses were made")
    assert told[-1].level == "warning"


def test_a_second_guardian_takes_the_place_of_the_first() -> None:
    first, _ = guarded(EveryNth(1000))
    second = Guardian(first.stepper, tell=lambda told: None)
    assert [guard.name for guard in first.stepper.guards] == ["picky", "spike", "guardian"]
    assert first.stepper.guards[-1] is second


# -- the form for loops that cannot be turned inside out ---------------------------------------------------------------


def by_hand(guardian: Guardian, factor: float) -> None:
    x = torch.randn(6, 8)
    with guardian.stepper.forward():
        loss = square(guardian.stepper.model, x) * factor
    guardian.stepper.backward(loss)
    guardian.look(guardian.stepper.apply())


@pytest.mark.wording
def test_the_context_form_names_what_it_can_see_and_says_why_it_is_no_more() -> None:
    guardian, told = guarded()
    weight = guardian.stepper.model[2].weight
    by_hand(guardian, 1.0)
    handle = weight.register_hook(lambda gradient: gradient * float("inf"))
    by_hand(guardian, 1.0)
    handle.remove()
    assert told[0].text.startswith("the gradient of 2.weight is not finite")
    assert "cannot be rerun" in told[0].text
    by_hand(guardian, 1.0)
    for _ in range(4):
        by_hand(guardian, math.nan)
    with pytest.raises(Diverged, match="the loss is nan"):
        by_hand(guardian, math.nan)


@pytest.mark.wording
@pytest.mark.filterwarnings("ignore:note batch.written")
def test_a_batch_that_the_step_itself_wrote_into_has_its_own_cure() -> None:
    def writing(model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x.clone()) * x.clone().min().log()
        x.fill_(1.0)
        return loss

    guardian, _ = guarded()
    with pytest.raises(Diverged) as raised:
        [guardian.step(writing, -torch.ones(6, 8)) for _ in range(5)]
    assert raised.value.do.startswith("copy a tensor of the batch before writing into it")
