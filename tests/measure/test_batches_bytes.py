"""The tensors of a batch: bytes that they share, and batches that are objects of a class."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.measure.batches import describe_sample_tensors, list_tensors, resize_batch, sum_storage_bytes
from halfstep.measure.memory.estimate import estimate


def shared_and_alone() -> list[torch.Tensor]:
    whole = torch.zeros(100)
    return [whole, whole.view(10, 10), whole[:3], torch.zeros(100), torch.zeros(7, dtype=torch.int64), torch.zeros(0)]


def test_shared_bytes_count_once_in_tensors_with_and_without_memory() -> None:
    assert sum_storage_bytes([]) == 0
    assert sum_storage_bytes(shared_and_alone()) == 400 + 400 + 56
    with FakeTensorMode():
        assert sum_storage_bytes(shared_and_alone()) == 400 + 400 + 56


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Graph:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.names = x, [y], ["a", "b"]


X, Y = torch.randn(8, 4), torch.arange(8) % 3


@pytest.mark.parametrize("batch", [Pair(X, Y), UserDict(x=X, y=Y), Graph(X, Y), {"in": Pair(X, Y), "id": ["a"]}])
def test_batches_may_be_objects_of_a_class(batch: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = list_tensors(batch)
        return nn.functional.cross_entropy(model(x), y)

    model = nn.Linear(4, 3)
    found = estimate(model, loss, batch, precision="fp32")
    assert found.peak == estimate(model, loss, (X, Y), precision="fp32").peak
    assert list_tensors(batch)[0] is X
    assert len(describe_sample_tensors(batch)) == 2
    larger = resize_batch(batch, 12)
    assert type(larger) is type(batch)
    assert [tuple(tensor.shape) for tensor in list_tensors(larger)] == [(12, 4), (12,)]
    assert [tuple(tensor.shape) for tensor in list_tensors(batch)] == [(8, 4), (8,)]
