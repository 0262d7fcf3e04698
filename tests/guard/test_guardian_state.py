"""A guardian that is saved and loaded goes on as it would have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged, StateMismatch
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import GuardEvent
from tests.support.models import plain_model


def weighted(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[0][:, :4]) * batch[1]


def factors(seed: int, steps: int) -> list[float]:
    """Spikes, batches that are not finite, and once too many of them."""
    draw = random.Random(seed)
    stream = [draw.choices([1.0, 1e4, float("nan")], [90, 5, 5])[0] for _ in range(steps)]
    return stream + [float("nan")] * 6


def new(spikes: Any) -> tuple[Guardian, list[GuardEvent]]:
    model = plain_model()
    told: list[GuardEvent] = []
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32", observe=False)
    return Guardian(stepper, tell=told.append, limits=Limits(diagnoses=4, spikes=spikes)), told


def run(guardian: Guardian, stream: list[float], first: int = 0) -> list[str | None]:
    outcomes: list[str | None] = []
    for step, factor in enumerate(stream, start=first):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        try:
            outcomes.append(guardian.step(weighted, (x, factor)).reason)
        except Diverged as error:
            return [*outcomes, error.given]
    return outcomes


@pytest.mark.parametrize(
    ("spikes", "points"), [("off", (33, 82)), ("warn", (1, 19, 47, 62, 79, 84)), ("refuse", (33, 82))]
)
@pytest.mark.wording
def test_decisions_are_the_same_after_saving_at_any_point(spikes: str, points: tuple[int, ...]) -> None:
    stream = factors(0, 80)
    whole, told = new(spikes)
    expected = run(whole, stream)
    assert expected[-1] is not None
    assert expected[-1].startswith("code: ")
    for at in points:
        first, told_first = new(spikes)
        outcomes = run(first, stream[:at])
        second, told_second = new(spikes)
        second.stepper.load_state_dict(first.stepper.state_dict())
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        outcomes += run(second, stream[at:], first=at)
        assert outcomes == expected
        assert [t.text for t in told_first + told_second] == [t.text for t in told]


def test_what_was_learnt_about_losses_serves_any_way_of_heeding_them() -> None:
    first, _ = new("warn")
    run(first, [1.0] * 40)
    second, told = new("refuse")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, [1e4], first=40) == ["guard:spike"]
    assert told[-1].text.startswith("spike: the loss is ")


@pytest.mark.wording
def test_an_old_state_is_refused_by_name_and_changes_nothing() -> None:
    guardian, _ = new("warn")
    run(guardian, [1.0] * 30)
    now = json.dumps(guardian.state_dict())
    old = json.loads(now)
    old["spike"] = {"loss": {"losses": [1.0], "tallest": 1.0, "first": 1.0, "beginning": [], "refused": []}}
    with pytest.raises(StateMismatch, match="a spike guard's state with beginning, first, losses, refused, tallest"):
        guardian.check_state(old)
    assert json.dumps(guardian.state_dict()) == now
