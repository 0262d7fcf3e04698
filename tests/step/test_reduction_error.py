"""The error of gradients that FSDP2 sums in bf16, held against sums made by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep.step.experiment import reduction_error
from halfstep.step.experiment.reduction_error import ReductionErrorMeter
from halfstep.step.synchronizers.shard_units import apply_fully_shard, create_shard_mesh, list_shard_units
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


class Slope(nn.Module):
    """One row of weights, whose gradient is the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * x).sum()


def measured(rank: int, shard_size: int, inputs: list[list[float]], steps: int) -> list[float | None]:
    """Return the error after each step in which the gradient on each rank is its input."""
    x = torch.tensor(inputs[rank])
    model = Slope(len(x))
    mesh = create_shard_mesh(torch.device("cpu"), dist.get_world_size(), shard_size)
    apply_fully_shard(list_shard_units(model, None), mesh, None, reduce="bf16")
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    error = ReductionErrorMeter(model, lambda: stepper.counts.attempted)
    found = []
    for _ in range(steps):
        assert stepper.step(lambda model, batch: model(batch), x).applied
        found.append(error.read())
    return found


def by_hand(inputs: list[list[float]], shard_size: int) -> float:
    """Return the error of a mean in bf16: of each group of ranks first, then of the groups."""
    given = torch.tensor(inputs).bfloat16()
    groups = given.view(4 // shard_size, shard_size, -1)
    narrow = torch.stack([_mean(group) for group in groups])
    summed = _mean(narrow) if len(narrow) > 1 else narrow[0]
    wide = given.float().mean(0)
    return float((summed.float() - wide).norm() / wide.norm())


def _mean(rows: torch.Tensor) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)


@pytest.mark.parametrize("shard_size", [4, 2])
def test_the_error_is_that_of_the_sum(four: Ranks, shard_size: int) -> None:
    # Sums of whole numbers below 256 are exact in bf16; 1 beside 256 is lost.
    exact = [[float(rank + column) for column in range(8)] for rank in range(4)]
    lossy = [[256.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 8]
    assert four(measured, shard_size, exact, 1) == [[0.0]] * 4
    found = four(measured, shard_size, lossy, 1)
    assert found == [found[0]] * 4
    assert found[0][0] == pytest.approx(by_hand(lossy, shard_size), rel=0.6)
    assert 0.001 < found[0][0] < 0.01


@pytest.mark.parametrize("shard_size", [4, 2])
def test_gradients_that_cancel_are_a_large_error(four: Ranks, shard_size: int) -> None:
    cancelling = [[1001.0] * 8, [1.0] * 8, [-1000.0] * 8, [1.0] * 8]
    assert four(measured, shard_size, cancelling, 1)[0][0] > 0.2


def test_a_step_in_a_hundred_is_measured(four: Ranks) -> None:
    found = four(measured, 4, [[1.0] * 4] * 4, reduction_error.EVERY + 1)[0]
    assert [step for step, error in enumerate(found) if error is not None] == [0, reduction_error.EVERY]
