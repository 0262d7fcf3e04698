"""A guardian that is saved and loaded goes on as it would have."""

from __future__ import annotations

import json
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.limits import Limits
from halfstep.guard.told import Told
from tests.support.models import plain_model


def weighted(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[0][:, :4]) * batch[1]


def factors(seed: int, steps: int) -> list[float]:
    """Spikes, batches that are not finite, and once too many of them."""
    draw = random.Random(seed)
    stream = [draw.choices([1.0, 1e4, float("nan")], [90, 5, 5])[0] for _ in range(steps)]
    return stream + [float("nan")] * 6


def new() -> tuple[Guardian, list[Told]]:
    model = plain_model()
    told: list[Told] = []
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32", observe=False)
    return Guardian(stepper, tell=told.append, limits=Limits(diagnoses=4)), told


def run(guardian: Guardian, stream: list[float], first: int = 0) -> list[str | None]:
    outcomes: list[str | None] = []
    for step, factor in enumerate(stream, start=first):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        try:
            outcomes.append(guardian.step(weighted, (x, factor)).reason)
        except Diverged as error:
            return [*outcomes, error.given]
    return outcomes


def test_decisions_are_the_same_after_saving_at_any_point() -> None:
    stream = factors(0, 80)
    whole, told = new()
    expected = run(whole, stream)
    assert expected[-1] is not None
    assert expected[-1].startswith("divergence: ")
    for at in (1, 19, 33, 47, 62, 79, 82, 84):
        first, told_first = new()
        outcomes = run(first, stream[:at])
        second, told_second = new()
        second.stepper.load_state_dict(first.stepper.state_dict())
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        outcomes += run(second, stream[at:], first=at)
        assert outcomes == expected
        assert [t.text for t in told_first + told_second] == [t.text for t in told]
