"""Compared steps draw the same random numbers: a verdict does not depend on the coefficients that mixup draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import audit, island, survival
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import Case
from halfstep.measure.setting import StepSetting
from halfstep.measure.survival import run_emulated_step
from tests.support.random_streams import OwnStreams, loss_fn, seed_streams, small_model

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 10


def mixup(coefficient: Callable[[], float]) -> Callable[[nn.Module, Any], Tensor]:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share = coefficient()
        out = model(share * x + (1 - share) * x.flip(0))
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))

    return loss_fn


def judged(coefficient: Callable[[], float]) -> tuple[bool | None, bool]:
    """Whether the island is needed, and whether the step survives fp16."""
    torch.manual_seed(0)
    first, last = nn.Linear(32, 64), nn.Linear(64, 10)
    model = nn.Sequential(first, nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), last)
    island(model, "3")
    (found,) = audit(model, mixup(coefficient), (X, Y), precision="bf16").islands
    return found.needed, survival(model, mixup(coefficient), (X, Y)).survives


def _from_numpy_object(seed: int) -> Callable[[], float]:
    own = np.random.default_rng(seed)
    return lambda: float(own.beta(1.0, 1.0))


def _from_torch_object(seed: int) -> Callable[[], float]:
    own = torch.Generator().manual_seed(seed)
    return lambda: float(torch.rand((), generator=own))


DRAWS: dict[str, Callable[[int], Callable[[], float]]] = {
    "NumPy": lambda seed: lambda: float(np.random.beta(1.0, 1.0)),
    "Python": lambda seed: lambda: random.betavariate(1.0, 1.0),
    "a generator of NumPy": _from_numpy_object,
    "a generator of torch": _from_torch_object,
}
SHORT = (0, 1, 3, 6)


@pytest.mark.parametrize("drawn", DRAWS)
@pytest.mark.parametrize(
    "seed", [seed if seed in SHORT else pytest.param(seed, marks=pytest.mark.full) for seed in range(15)]
)
def test_an_island_is_judged_as_with_a_fixed_coefficient(seed: int, drawn: str) -> None:
    seed_streams(seed)
    assert judged(DRAWS[drawn](seed)) == judged(lambda: 0.7) == (False, True)


@pytest.mark.parametrize("make_loss", [lambda: loss_fn, OwnStreams])
def test_steps_that_are_compared_draw_the_same(make_loss: Callable[[], Any]) -> None:
    case = Case("model", small_model(), make_loss(), torch.ones(4, 8))
    losses = {run_emulated_step(case, torch.device("cpu"), None).loss for _ in range(3)}
    assert len(losses) == 1
    one, other = Candidate(case, StepSetting("fp32")), Candidate(case, StepSetting("fp32"))
    drawn = {each: each.losses(2) for each in (one, other)}
    for each in (other, one):
        drawn[each] += each.losses(2)
    assert drawn[one] == drawn[other]
    assert len(set(drawn[one])) == 4
