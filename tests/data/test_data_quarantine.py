"""Which samples are to blame for a step that was not finite."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import Batch, Order, Sample, Samples, find_nonfinite_samples
from halfstep.data.loader import TrainLoader


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_samples_with_numbers_that_are_not_finite_are_found(value: float) -> None:
    x, y = torch.zeros(4, 2, 3), torch.zeros(4)
    x[1, 1, 2], y[3] = value, value
    tensors = {
        "x": x,
        "y": y,
        "label": torch.arange(4),
        "scalar": torch.tensor(value),
        "other": torch.full((2,), value),
    }
    assert find_nonfinite_samples(Batch(tensors, [10, 11, 12, 13], [])) == [11, 13]
    assert find_nonfinite_samples(Batch({"x": torch.ones(2, 0)}, [1, 2], [])) == []
    assert find_nonfinite_samples(Batch({}, [], [])) == []


class OnePoisoned:
    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> Sample:
        return {"image": torch.full((3, 2, 2), float("nan") if index == 5 else 1.0), "label": torch.tensor(index)}

    def name(self, index: int) -> str:
        return f"number {index}"


def mixed(samples: list[Sample]) -> Sample:
    """Each with its neighbor, as mixup does."""
    batch: Sample = default_collate(samples)
    return {**batch, "image": 0.9 * batch["image"] + 0.1 * batch["image"].roll(1, 0)}


def unchanged(sample: Sample) -> Sample:
    return sample


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_was_mixed_with_a_bad_one_is_not_blamed(workers: int) -> None:
    samples = Samples(OnePoisoned(), unchanged, seed=0)
    here = torch.empty(0).device
    loader = TrainLoader(samples, Order(8, 0), batch_size=4, collate=mixed, workers=workers, device=here)
    batches = [batch for window in loader.windows(epoch=0) for batch in window]
    assert sum(int(batch.tensors["image"].isnan().any(1).any(1).any(1).sum()) for batch in batches) == 2
    assert [number for batch in batches for number in find_nonfinite_samples(batch)] == [5]


def test_what_mixing_itself_made_is_found_in_the_batch() -> None:
    batch = Batch({"x": torch.tensor([0.0, float("inf")])}, [3, 4], [], [])
    assert find_nonfinite_samples(batch) == [4]
