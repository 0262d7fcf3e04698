"""What the measuring commands are given, and what they make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halfstep.errors import WrongUse
from halfstep.measure.batches import count_samples, describe_sample_tensors, move_batch, resize_batch
from halfstep.measure.case import build_case
from halfstep.measure.subject import Subject
from tests.support import cases


def test_a_case_is_the_same_each_time_and_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    one, other = (Subject("tests.support.cases:linear").open() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert torch.equal(one.batch[0], other.batch[0])


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("tests.support.cases:nothing", "has no 'nothing'"),
        ("tests.support.cases:not_a_case", "returned int"),
        ("tests.support.cases:NOT_CALLABLE", "is a int"),
    ],
)
def test_what_is_no_case_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words) as refused:
        Subject(text).open()
    assert refused.value.do
    assert refused.value.allowed


@pytest.mark.wording
def test_settings_beside_a_case_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"train\.batch_size=4"):
        Subject("tests.support.cases:linear", ("train.batch_size=4",)).open()


def test_a_recipe_is_a_case_with_its_settings() -> None:
    case = Subject("classification_tiny", ("train.batch_size=6", "--bf16", "train.microbatches=2")).open()
    assert count_samples(case.batch) == 6
    assert (case.setting.precision, case.setting.batch, case.setting.microbatches) == ("bf16", 6, 2)
    assert case.loss_fn(case.model, case.batch) is not None
    assert case.data is not None
    data = case.data()
    assert all(torch.equal(a, b) for a, b in zip(data.read_batch().values(), case.batch.values(), strict=True))
    assert count_samples(next(data.batches())) == 6


def test_a_loader_in_place_of_a_batch_is_data() -> None:
    loader = DataLoader(TensorDataset(torch.randn(10, 64), torch.zeros(10, dtype=torch.int64)), batch_size=4)
    case = build_case(nn.Linear(64, 10), cases.loss_fn, loader)
    assert count_samples(case.batch) == 4
    assert case.data is not None
    data = case.data()
    assert data.workers == 0
    assert [count_samples(batch) for batch in data.batches()] == [4, 4, 2]
    assert torch.equal(data.read_batch()[0], case.batch[0])


def test_a_case_with_a_loader_has_chosen_no_precision_and_a_recipe_has() -> None:
    loader = DataLoader(TensorDataset(torch.randn(10, 64), torch.zeros(10, dtype=torch.int64)), batch_size=4)
    for batch in (loader, next(iter(loader))):
        assert build_case(nn.Linear(64, 10), cases.loss_fn, batch).requested_precision == "auto"
    assert Subject("segmentation_tiny", ("precision=fp32",)).open().requested_precision == "fp32"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Together(TensorDataset):
    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [(torch.tensor(float(number)),) for number in numbers]


@pytest.mark.parametrize(
    ("loader", "batch"),
    [
        (DataLoader(Stream(), batch_size=3), [0, 1, 2]),
        (DataLoader(Stream(), batch_size=None, collate_fn=lambda one: torch.tensor([one])), [0]),
        (DataLoader(TensorDataset(torch.arange(5)), batch_size=None, collate_fn=lambda one: one[0].reshape(1)), [0]),
        (
            DataLoader(
                Together(torch.arange(5)), batch_size=2, collate_fn=lambda some: torch.stack([x for (x,) in some])
            ),
            [0, 1],
        ),
    ],
    ids=["stream", "stream of batches", "batches", "read together"],
)
def test_a_batch_is_read_here_as_the_loader_would(loader: DataLoader[Any], batch: list[int]) -> None:
    case = build_case(nn.Linear(1, 1), cases.loss_fn, loader)
    assert case.data is not None
    assert case.data().read_batch().tolist() == case.batch.tolist() == batch


@pytest.mark.wording
def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(WrongUse, match="yields no batch"):
        build_case(nn.Linear(1, 1), cases.loss_fn, DataLoader(TensorDataset(torch.zeros(0, 1)), batch_size=2))


def test_a_batch_grows_and_shrinks_by_whole_samples() -> None:
    batch = {"image": torch.arange(6.0).reshape(3, 2), "label": torch.arange(3), "scale": torch.tensor(2.0), "n": 5}
    more, fewer = resize_batch(batch, 5), resize_batch(batch, 2)
    assert more["label"].tolist() == [0, 1, 2, 0, 1]
    assert more["image"][4].tolist() == [2.0, 3.0]
    assert fewer["label"].tolist() == [0, 1]
    assert (more["scale"].item(), more["n"]) == (2.0, 5)
    assert resize_batch(batch, 3) is batch


@pytest.mark.wording
@pytest.mark.parametrize("batch", [None, {}, {"n": 3}, torch.tensor(1.0)])
def test_a_batch_without_samples_is_refused(batch: object) -> None:
    with pytest.raises(WrongUse, match="without a tensor"):
        count_samples(batch)


def test_only_images_are_laid_out() -> None:
    image, label = move_batch(
        (torch.randn(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64)), torch.device("cpu"), True
    )
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert label.is_contiguous()


@pytest.mark.wording
def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(WrongUse, match="0 samples"):
        count_samples({"image": torch.zeros(0, 3)})


def test_tensors_that_another_size_changes_are_named() -> None:
    batch = {"image": torch.zeros(3, 2), "by_accident": torch.zeros(3, 3), "scale": torch.tensor(1.0), "names": "abc"}
    assert describe_sample_tensors(batch) == ["batch['image'] (3, 2)", "batch['by_accident'] (3, 3)"]
