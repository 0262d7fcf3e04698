"""The learning rate after each applied update."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from halfstep import Stepper
from halfstep.recipe.schema import ScheduleOptions
from halfstep.train.schedules import Plateau, make_schedule


def rates(total: int, per_epoch: int = 10, **options: object) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, _ = make_schedule(ScheduleOptions(**options), optimizer, total, per_epoch)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_cosine_falls_to_its_final_share_as_torchs_own_does() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.1)
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert rates(40, name="cosine", final=0.1) == pytest.approx(expected, rel=1e-9)


def test_warmup_rises_evenly_and_hands_over_without_a_jump() -> None:
    found = rates(50, name="cosine", warmup_steps=9)
    steps = [b - a for a, b in itertools.pairwise(found[:10])]
    assert found[0] == pytest.approx(0.1)
    assert steps == pytest.approx([0.1] * 9)
    assert found[9] == pytest.approx(1.0)
    assert max(found) == found[9]


def test_a_warmup_longer_than_the_run_never_reaches_the_top() -> None:
    found = rates(5, name="cosine", warmup_steps=100)
    assert all(a < b < 1.0 for a, b in itertools.pairwise(found))


def test_steps_cut_every_so_many_epochs() -> None:
    found = rates(60, per_epoch=10, name="step", every_epochs=2, factor=0.1)
    assert found[:20] == [1.0] * 20
    assert found[20:40] == pytest.approx([0.1] * 20)
    assert found[40:] == pytest.approx([0.01] * 20)


def test_one_cycle_peaks_after_three_tenths() -> None:
    found = rates(100, name="one-cycle")
    assert found[0] == pytest.approx(1 / 25)
    assert max(found) == found[30] == pytest.approx(1.0)
    assert found[-1] < 0.01


def test_plateau_waits_for_its_patience_and_cuts_once() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, shape = make_schedule(ScheduleOptions(name="plateau", patience=1, factor=0.5), optimizer, 100, 10)
    seen = []
    for better in (True, False, False, False, False, True):
        shape.progress(1.0 if better else None)
        optimizer.step()
        schedule.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_plateaus_cuts_are_saved_with_the_schedule() -> None:
    def build() -> tuple[torch.optim.lr_scheduler.LambdaLR, Plateau]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        schedule, shape = make_schedule(ScheduleOptions(name="plateau", patience=0), optimizer, 100, 10)
        assert isinstance(shape, Plateau)
        return schedule, shape

    schedule, shape = build()
    shape.progress(None)
    again, other = build()
    again.load_state_dict(schedule.state_dict())
    assert other.num_reductions == 1


@pytest.mark.parametrize("name", ["constant", "cosine", "step", "plateau", "one-cycle"])
def test_a_skipped_step_leaves_the_schedule_alone(name: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule, _ = make_schedule(ScheduleOptions(name=name, warmup_steps=5), optimizer, 20, 10)
    stepper = Stepper(model, optimizer, precision="fp32", schedule=schedule)
    before = optimizer.param_groups[0]["lr"]
    report = stepper.step(lambda m, x: m(x).sum() * math.nan, torch.ones(2, 4))
    assert not report.applied
    assert optimizer.param_groups[0]["lr"] == before
    assert stepper.step(lambda m, x: m(x).sum(), torch.ones(2, 4)).applied
    assert optimizer.param_groups[0]["lr"] != before
