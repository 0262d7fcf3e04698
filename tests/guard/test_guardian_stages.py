"""Spikes are told or refused, as asked for; a new stage of the data, or losses of nothing, end no run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged, UnknownName, WrongUse
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import GuardEvent
from tests.support.combinations import one_per_value

Batch = tuple[Tensor, Tensor]


def fit(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def guarded(mode: Any = "watch", **limits: Any) -> tuple[Guardian, list[GuardEvent]]:
    torch.manual_seed(0)
    model, told = nn.Linear(4, 1), list[GuardEvent]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    stepper = Stepper(model, optimizer, precision="fp32", observe=False)
    return Guardian(stepper, mode=mode, tell=told.append, limits=Limits(**limits)), told


def stages(*factors: float, steps: int = 400) -> Iterator[Batch]:
    """What is to be learned is something else in each."""
    draw = torch.Generator().manual_seed(1)
    true = torch.randn(4, 1, generator=draw)
    for factor in factors:
        for _ in range(steps):
            x = torch.randn(32, 4, generator=draw)
            yield x, x @ true * factor


@pytest.mark.parametrize("mode", ["watch", "repair"])
def test_a_new_stage_is_trained_from_its_first_step_and_told_once(mode: str) -> None:
    guardian, told = guarded(mode)
    reports = [guardian.step(fit, batch) for batch in stages(1.0, -1.5)]
    assert all(report.applied for report in reports)
    assert reports[-1].loss < 0.01 * reports[404].loss
    assert [(t.kind, t.level) for t in told] == [("alarm", "warning")]
    assert told[0].text.startswith("a new level: the loss is ")
    assert guardian.state_dict()["rollbacks"] == 0


def test_where_spikes_are_refused_a_new_stage_costs_four_steps_and_is_learnt() -> None:
    guardian, told = guarded(spikes="refuse")
    reports = [guardian.step(fit, batch) for batch in stages(1.0, -1.5)]
    assert [r.attempt for r in reports if not r.applied] == [401, 402, 403, 404]
    assert reports[-1].loss < 0.01 * reports[404].loss
    assert told[-1].text.startswith("a new level: the loss is ")


def test_a_stage_far_beyond_all_losses_is_learnt_in_the_default() -> None:
    guardian, told = guarded()
    reports = [guardian.step(fit, batch) for batch in stages(1.0, 1000.0)]
    assert all(report.applied for report in reports)
    assert [t.level for t in told] == ["error", "warning"]
    assert told[0].text.startswith("divergence: ")
    assert told[1].text.startswith("a new level: ")


@pytest.mark.parametrize("spikes", ["warn", "refuse"])
def test_under_repair_the_weights_from_before_show_that_they_are_not_to_blame(spikes: str) -> None:
    """Going back does not make the losses small: what is trained on has changed, and the rollback is not counted."""
    guardian, told = guarded("repair", spikes=spikes)
    reports = [guardian.step(fit, batch) for batch in stages(1.0, 1000.0, 1e6)]
    assert [t.kind for t in told].count("remedy") == 2
    assert guardian.state_dict()["rollbacks"] == 0
    assert sum(report.applied for report in reports) >= 1200 - 2 * 5
    assert told[-1].text.startswith("a new level: ")


@pytest.mark.wording
def test_a_stage_far_beyond_the_first_losses_is_refused_by_name_and_the_way_out_is_said() -> None:
    guardian, _ = guarded(spikes="refuse")
    with pytest.raises(Diverged, match=r'if a new stage of the data has started: Limits\(spikes="warn"\)'):
        [guardian.step(fit, batch) for batch in stages(1.0, 1000.0)]
    assert guardian.stepper.counts.attempted == 404


def test_with_spikes_off_nothing_finite_is_refused_or_told() -> None:
    guarded_before, _ = guarded(spikes="refuse")
    told: list[GuardEvent] = []
    guardian = Guardian(guarded_before.stepper, tell=told.append, limits=Limits(spikes="off"))
    assert all(guardian.step(fit, batch).applied for batch in stages(1.0, 1000.0))
    assert told == []
    other, _ = guarded(spikes="off")
    other.load_state_dict(guardian.state_dict())


@pytest.mark.wording
@pytest.mark.parametrize(("given", "do"), [(True, 'Limits(spikes="refuse")'), (False, 'Limits(spikes="off")')])
def test_the_old_switch_is_refused_with_the_word_that_took_its_place(given: Any, do: str) -> None:
    with pytest.raises(WrongUse) as caught:
        Limits(spikes=given)
    assert caught.value.do == do


@pytest.mark.wording
def test_an_unknown_way_of_heeding_spikes_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="refuse"):
        Limits(spikes="refues")  # type: ignore[arg-type]


def weighted(model: nn.Module, batch: tuple[Batch, float]) -> Tensor:
    return fit(model, batch[0]) * batch[1]


def trained(guardian: Guardian, factors: list[float]) -> list[str | None]:
    batches = stages(1.0, steps=len(factors))
    noisy = ((x, y + 0.3 * torch.randn(32, 1)) for x, y in batches)
    return [guardian.step(weighted, pair).reason for pair in zip(noisy, factors, strict=True)]


def test_one_bad_batch_is_told_once_it_is_over_and_its_update_applied() -> None:
    guardian, told = guarded()
    assert trained(guardian, [1.0] * 60 + [1e5] + [1.0] * 3) == [None] * 64
    assert [(t.kind, t.level) for t in told] == [("alarm", "warning")]
    assert told[0].text.startswith("spike: at attempt 61, the loss is ")


def test_the_budget_of_skips_is_not_spent_on_spikes() -> None:
    """Fourteen of every hundred batches are bad, as many in a row as three: each is refused, and the run goes on."""
    guardian, _ = guarded(spikes="refuse", skip_share=0.05)
    factors = [1.0] * 60 + ([1e4] * 3 + [1.0] * 18) * 8
    reasons = trained(guardian, factors)
    assert [reason == "guard:spike" for reason in reasons] == [factor > 1 for factor in factors]


@pytest.mark.parametrize(*one_per_value(mode=["watch", "repair"], spikes=["warn", "refuse"]))
def test_losses_that_become_scattered_over_decades_end_no_run(mode: str, spikes: str) -> None:
    draw = random.Random(7)
    guardian, _ = guarded(mode, spikes=spikes)
    factors = [1e-3] * 60 + [10.0 ** draw.uniform(-3.0, -1.0) for _ in range(200)]
    reasons = trained(guardian, factors)
    assert reasons[-100:].count("guard:spike") <= 2


def test_under_repair_nothing_is_kept_while_losses_are_above_the_usual() -> None:
    guardian, _ = guarded("repair", keep_every=1)
    trained(guardian, [1.0] * 60 + [1e5])
    assert guardian._snapshot.step == 59  # of the last step whose loss was usual, before its update
    assert guardian.in_trouble


def test_a_guard_that_is_off_goes_on_from_a_state_in_the_middle_of_a_spike() -> None:
    guardian, _ = guarded("repair")
    trained(guardian, [1.0] * 60 + [1e5])
    other, told = guarded("repair", spikes="off", keep_every=1)
    other.load_state_dict(guardian.state_dict())
    trained(other, [1.0] * 3)
    assert not other.in_trouble
    assert other._snapshot.step is not None
    assert told == []


def test_a_run_whose_first_losses_are_exactly_nothing_is_not_refused_for_ever() -> None:
    guardian, told = guarded()
    with torch.no_grad():
        for parameter in guardian.stepper.model.parameters():
            parameter.zero_()
    batches = [(torch.rand(4, 4), torch.full((4, 1), target)) for target in [0.0] * 60 + [1e-3] * 40]
    assert all(guardian.step(fit, batch).applied for batch in batches)
    assert told == []
