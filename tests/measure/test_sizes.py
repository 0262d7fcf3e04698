"""Bytes: of tensors that share them, and as words."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.measure.batches import bytes_of
from halfstep.measure.setting import size_in_words


def shared_and_alone() -> list[torch.Tensor]:
    whole = torch.zeros(100)
    return [whole, whole.view(10, 10), whole[:3], torch.zeros(100), torch.zeros(7, dtype=torch.int64), torch.zeros(0)]


def test_shared_bytes_count_once_in_tensors_with_and_without_memory() -> None:
    assert bytes_of([]) == 0
    assert bytes_of(shared_and_alone()) == 400 + 400 + 56
    with FakeTensorMode():
        assert bytes_of(shared_and_alone()) == 400 + 400 + 56


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**19, "1.50 MiB"), (768 * 2**20, "768 MiB"),
     (30 * 2**30, "30.00 GiB"), (4000 * 2**30, "4000 GiB")],
)  # fmt: skip
def test_a_size_is_told_in_its_unit(size: int, words: str) -> None:
    assert size_in_words(size) == words
