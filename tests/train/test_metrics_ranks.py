"""Metrics over several processes: exact, and the same for all. Apart, because its processes need no torchmetrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep import distributed
from halfstep.tasks.shared.confusion import Overlap
from halfstep.train.evaluation import compute_metric_values
from halfstep.train.metrics import Metrics, TopK
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def together() -> Metrics:
    return Metrics({"top1": TopK(1), "top5": TopK(5)})


def heard(metrics: Metrics, table: Metrics, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, label = torch.randn(33, 7, generator=generator), torch.randint(7, (33,), generator=generator)
    metrics.update(scores, label)
    table.update(scores.argmax(1), label)


def over(seeds: list[int]) -> dict[str, float]:
    metrics, table = together(), Metrics({"overlap": Overlap(list("abcdefg"), 255)})
    for seed in seeds:
        heard(metrics, table, seed)
    return compute_metric_values(metrics) | compute_metric_values(table)


def over_processes(rank: int) -> dict[str, Any]:
    large = torch.tensor([2**53 + rank])  # more than float64 can count
    return {
        **over([seed for seed in range(3) if seed % 2 == rank]),
        "sum": distributed.sum_tensor_over_ranks(large).tolist(),
        "own": large.item(),
    }


def test_processes_add_up_exactly(on_ranks: Ranks) -> None:
    expected = over([0, 1, 2])
    for rank, found in enumerate(on_ranks(over_processes)):
        assert found.pop("sum") == [2**54 + 1]
        assert found.pop("own") == 2**53 + rank, "what was given is not changed"
        assert found == expected
