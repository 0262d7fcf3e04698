"""Bytes of tensors that share them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.measure.batches import bytes_of


def shared_and_alone() -> list[torch.Tensor]:
    whole = torch.zeros(100)
    return [whole, whole.view(10, 10), whole[:3], torch.zeros(100), torch.zeros(7, dtype=torch.int64), torch.zeros(0)]


def test_shared_bytes_count_once_in_tensors_with_and_without_memory() -> None:
    assert bytes_of([]) == 0
    assert bytes_of(shared_and_alone()) == 400 + 400 + 56
    with FakeTensorMode():
        assert bytes_of(shared_and_alone()) == 400 + 400 + 56
