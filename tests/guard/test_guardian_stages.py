"""A spike is refused; a new stage of the data, or a run that begins with losses of nothing, is not stopped for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.limits import Limits
from halfstep.guard.told import Told

Batch = tuple[Tensor, Tensor]


def fit(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def guarded(mode: Any = "watch", **limits: Any) -> tuple[Guardian, list[Told]]:
    torch.manual_seed(0)
    model, told = nn.Linear(4, 1), list[Told]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    stepper = Stepper(model, optimizer, precision="fp32", observe=False)
    return Guardian(stepper, mode=mode, tell=told.append, limits=Limits(**limits)), told


def stages(*factors: float, steps: int = 400) -> Iterator[Batch]:
    """What is to be learnt is something else in each."""
    draw = torch.Generator().manual_seed(1)
    true = torch.randn(4, 1, generator=draw)
    for factor in factors:
        for _ in range(steps):
            x = torch.randn(32, 4, generator=draw)
            yield x, x @ true * factor


@pytest.mark.parametrize(("mode", "rollbacks"), [("watch", 0), ("repair", 1)])
def test_a_new_stage_is_accepted_after_a_few_steps_and_learnt(mode: str, rollbacks: int) -> None:
    guardian, told = guarded(mode)
    reports = [guardian.step(fit, batch) for batch in stages(1.0, -1.0)]
    assert [r.attempt for r in reports if not r.applied] == [401, 402, 403, 404]
    assert reports[-1].loss < 0.01 * reports[404].loss
    assert guardian.state_dict()["rollbacks"] == rollbacks  # damaged weights would look the same, and be cured by it
    assert told[-1].text.startswith("a new level: the loss is ")
    assert (told[-1].kind, told[-1].level) == ("alarm", "warning")


def test_a_stage_far_beyond_the_first_losses_is_not_and_the_way_out_is_said() -> None:
    guardian, _ = guarded()
    with pytest.raises(Diverged, match=r"if a new stage of the data has begun: Limits\(spikes=False\)"):
        [guardian.step(fit, batch) for batch in stages(1.0, 1000.0)]
    assert guardian.stepper.counts.attempted == 405


def test_with_spikes_off_nothing_finite_is_refused() -> None:
    guarded_before, _ = guarded()
    told: list[Told] = []
    guardian = Guardian(guarded_before.stepper, tell=told.append, limits=Limits(spikes=False))
    assert all(guardian.step(fit, batch).applied for batch in stages(1.0, 1000.0))
    assert told == []
    other, _ = guarded(spikes=False)
    other.load_state_dict(guardian.state_dict())


def test_a_run_whose_first_losses_are_exactly_nothing_is_not_refused_for_ever() -> None:
    guardian, told = guarded()
    with torch.no_grad():
        for parameter in guardian.stepper.model.parameters():
            parameter.zero_()
    batches = [(torch.rand(4, 4), torch.full((4, 1), target)) for target in [0.0] * 60 + [1e-3] * 40]
    assert all(guardian.step(fit, batch).applied for batch in batches)
    assert told == []
