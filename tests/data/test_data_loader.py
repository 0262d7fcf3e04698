"""Batches: the same from any number of workers and ranks, with bad samples replaced, left out or fatal."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import (
    LEFT_OUT,
    QUARANTINED,
    BadSample,
    BadSampleBudget,
    Batch,
    Order,
    ReplacedSample,
    Sample,
    Samples,
    ValSamples,
)
from halfstep.data.loader import TrainLoader, ValLoader
from halfstep.errors import BadData

HERE = torch.empty(0).device


class Numbers:
    """Sample n holds n; those in `bad` cannot be read, those in `wrong` are errors."""

    def __init__(self, size: int, bad: set[int] = frozenset(), wrong: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.size, self.bad, self.wrong = size, bad, wrong

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> Sample:
        if index in self.bad:
            raise BadSample(self.name(index), "is bad")
        if index in self.wrong:
            raise BadData(f"{self.name(index)} is wrong", allowed="right ones", do="mend it")
        return {"x": torch.full((3, 4, 5), float(index))}

    def name(self, index: int) -> str:
        return f"number {index}"


def jittered(sample: Sample) -> Sample:
    return {"x": sample["x"] + torch.rand(1) / 4}


def mixed(samples: list[Sample]) -> Sample:
    batch: Sample = default_collate(samples)
    return {**batch, "chance": torch.rand(len(samples))}


def plain(sample: Sample) -> Sample:
    return sample


def loader(source: Any, workers: int = 0, quarantined: tuple[int, ...] = (), **options: Any) -> TrainLoader:
    samples = Samples(source, options.pop("transform", jittered), 11, quarantined)
    options = {"batch_size": 4, "collate": mixed, "device": HERE, **options}
    return TrainLoader(samples, Order(len(source), 11), workers=workers, **options)


def flat(windows: Any) -> list[Batch]:
    return [batch for window in windows for batch in window]


def same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert [(b.ids, b.replaced) for b in ours] == [(b.ids, b.replaced) for b in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    source = Numbers(30, bad={3, 17})
    same(flat(loader(source, workers).windows(epoch=1)), flat(loader(source, 0).windows(epoch=1)))


def shift(batches: list[Batch]) -> dict[int, float]:
    return {n: float(x.flatten()[0]) - n for b in batches for n, x in zip(b.ids, b.tensors["x"], strict=True)}


def test_augmentation_and_mixing_change_with_the_epoch_and_the_sample() -> None:
    first, second = (flat(loader(Numbers(8)).windows(epoch)) for epoch in (0, 1))
    assert set(shift(first)) == set(shift(second)) == set(range(8))
    assert all(shift(first)[n] != shift(second)[n] for n in range(8))
    assert len({round(v, 5) for v in shift(first).values()}) > 6
    assert not torch.equal(first[0].tensors["chance"], first[1].tensors["chance"])


def test_mixing_of_the_same_samples_differs_between_epochs() -> None:
    collate = loader(Numbers(4))._collate
    first, second = (collate([loader(Numbers(4)).samples[epoch, n] for n in range(4)]) for epoch in (0, 1))
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert not torch.equal(first.tensors["chance"], second.tensors["chance"])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_generator_of_the_training_is_left_alone(workers: int) -> None:
    before = torch.get_rng_state()
    flat(loader(Numbers(8), workers).windows(0))
    list(ValLoader(ValSamples(Numbers(8), jittered, 0), batch_size=4, collate=mixed, workers=workers, device=HERE))
    assert torch.equal(before, torch.get_rng_state())


def test_two_ranks_share_the_window_of_one() -> None:
    source = Numbers(50, bad={5})
    alone = list(loader(source, batch_size=8).windows(0))
    ranks = [list(loader(source, batch_size=2, microbatches=2, rank=r, size=2).windows(0)) for r in range(2)]
    assert len(alone) == len(ranks[0]) == len(ranks[1]) == loader(source, batch_size=8).steps_per_epoch == 7
    for step, window in enumerate(alone):
        parts = [batch for rank in ranks for batch in rank[step]]
        assert len(parts) == 4
        together = {n: x for b in parts for n, x in zip(b.ids, b.tensors["x"], strict=True)}
        assert sorted(n for b in parts for n in b.ids) == sorted(window[0].ids)
        for number, x in zip(window[0].ids, window[0].tensors["x"], strict=True):
            assert torch.equal(together[number], x)


def test_a_later_step_is_what_it_would_have_been() -> None:
    source = Numbers(40)
    same(flat(loader(source, 1).windows(2, first=7)), flat(loader(source).windows(2))[7:])


def test_bad_samples_are_replaced_and_reported() -> None:
    source = Numbers(100, bad={4, 40, 41})
    batches = flat(loader(source, batch_size=10, transform=plain).windows(0))
    replaced = [one for b in batches for one in b.replaced]
    assert {one.number for one in replaced} == {4, 40, 41}
    for batch in batches:
        assert batch.tensors["x"].shape == (10, 3, 4, 5)
        assert [int(x.flatten()[0]) for x in batch.tensors["x"]] == batch.ids
        assert not set(batch.ids) & source.bad
        assert all(one.by in batch.ids for one in batch.replaced)
    assert replaced[0].name == f"number {replaced[0].number}"
    assert replaced[0].reason == "is bad"
    other = [one for b in flat(loader(source, batch_size=10).windows(1)) for one in b.replaced]
    assert {(one.number, one.by) for one in other} != {(one.number, one.by) for one in replaced}


def test_a_stand_in_that_is_bad_is_replaced_and_reported_too() -> None:
    source = Numbers(12, bad=set(range(8)))
    batches = flat(loader(source, batch_size=12).windows(0))
    assert set(batches[0].ids) <= {8, 9, 10, 11}
    assert {one.number for one in batches[0].replaced} == set(range(8))
    assert all(one.by >= 8 for one in batches[0].replaced)


@pytest.mark.wording
@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_can_be_read_the_run_ends(workers: int) -> None:
    with pytest.raises(BadData, match="none of 8 others"):
        flat(loader(Numbers(6, bad=set(range(6))), workers).windows(0))


def test_quarantined_samples_are_replaced_from_the_next_call_on() -> None:
    ours = loader(Numbers(20), workers=1)
    assert 13 in {n for b in flat(ours.windows(0)) for n in b.ids}
    ours.samples.quarantined.add(13)
    batches = flat(ours.windows(0))
    assert 13 not in {n for b in batches for n in b.ids}
    assert [(one.number, one.reason) for b in batches for one in b.replaced] == [(13, QUARANTINED)]


@pytest.mark.wording
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", ["train", "val", "collate"])
def test_an_error_in_a_worker_arrives_whole(workers: int, make: str) -> None:
    with pytest.raises(BadData) as caught:
        _failing(make, workers)
    error = caught.value
    assert (error.allowed, error.do, error.exit_code) == ("right ones", "mend it", 65)
    assert str(error).startswith("number 2 is wrong\n  allowed: right ones\n")
    assert "Traceback" not in str(error)


def _failing(make: str, workers: int) -> None:
    if make == "train":
        flat(loader(Numbers(5, wrong={2}), workers).windows(0))
    elif make == "val":
        list(
            ValLoader(
                ValSamples(Numbers(5, wrong={2}), plain, 0), batch_size=2, collate=mixed, workers=workers, device=HERE
            )
        )
    else:
        flat(loader(Numbers(5), workers, collate=_refusing).windows(0))


def _refusing(samples: list[Sample]) -> Sample:
    raise BadData("number 2 is wrong", allowed="right ones", do="mend it")


def _reports_signals(sample: Sample) -> Sample:
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return {"x": torch.tensor([float(ignored), float(torch.get_num_threads())])}


def test_workers_ignore_ctrl_c_and_use_one_thread() -> None:
    batch = flat(loader(Numbers(4), 1, transform=_reports_signals).windows(0))[0]
    assert batch.tensors["x"].tolist() == [[1.0, 1.0]] * 4


def test_an_epoch_that_is_left_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())  # other tests' helpers may live as long as the session
    windows = loader(Numbers(400), 2).windows(0)
    next(windows)
    assert len(set(multiprocessing.active_children()) - before) == 2
    windows.close()  # type: ignore[attr-defined]
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_are_laid_out_as_asked(channels_last: bool) -> None:
    batch = flat(loader(Numbers(8), channels_last=channels_last).windows(0))[0]
    assert batch.tensors["x"].is_contiguous(memory_format=torch.channels_last) is channels_last
    assert batch.tensors["chance"].shape == (4,)


def test_batches_go_to_the_device() -> None:
    batch = flat(loader(Numbers(8), device="meta").windows(0))[0]
    assert {tensor.device.type for tensor in batch.tensors.values()} == {"meta"}


def val(source: Any, workers: int = 0, rank: int = 0, size: int = 1) -> list[Batch]:
    samples = ValSamples(source, plain, 0)
    made = ValLoader(samples, batch_size=3, collate=mixed, workers=workers, device=HERE, rank=rank, size=size)
    return list(made)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_each_sample_once_and_leaves_bad_ones_out(workers: int) -> None:
    source = Numbers(11, bad={1, 9, 10})
    ranks = [val(source, workers, rank, 2) for rank in range(2)]
    batches = [batch for rank in ranks for batch in rank]
    assert sorted(n for b in batches for n in b.ids) == [0, 2, 3, 4, 5, 6, 7, 8]
    assert all(len(b.ids) == len(b.tensors["x"]) for b in batches)
    assert sorted(one for b in batches for one in b.replaced) == [
        ReplacedSample(n, f"number {n}", "is bad", LEFT_OUT) for n in (1, 9, 10)
    ]


@pytest.mark.parametrize("bad", [{0, 1, 2}, {3, 4, 5}, {6, 7}, {0, 1, 2, 6, 7}])
def test_a_batch_of_bad_samples_alone_is_reported_by_its_neighbour(bad: set[int]) -> None:
    batches = val(Numbers(8, bad=bad))
    assert all(batch.ids for batch in batches)
    assert {one.number for b in batches for one in b.replaced} == bad


@pytest.mark.wording
def test_evaluation_of_nothing_but_bad_samples_is_an_error() -> None:
    with pytest.raises(BadData, match="none of 4 validation samples"):
        val(Numbers(4, bad={0, 1, 2, 3}))


def test_more_ranks_than_samples_leave_some_with_nothing() -> None:
    assert [len(val(Numbers(2), rank=rank, size=3)) for rank in range(3)] == [1, 1, 0]


@pytest.mark.wording
@pytest.mark.parametrize("limit", [0, 1, 10])
def test_the_budget_ends_at_the_first_sample_beyond_it(limit: int) -> None:
    budget = BadSampleBudget(limit)
    for n in range(limit):
        budget.spend([ReplacedSample(n, f"f{n}", "cut", 50)] * 3)
    budget.spend([ReplacedSample(99, "q", QUARANTINED, 50)])
    with pytest.raises(BadData, match=rf"{limit + 1} samples .* last: cut") as caught:
        budget.spend([ReplacedSample(77, "last", "cut", 50)])
    assert caught.value.exit_code == 65
    assert f"data.bad_samples={limit}" in caught.value.allowed


def test_tasks_may_be_sent_to_workers_that_are_started_anew() -> None:
    """Where processes are not forked, what goes to a worker is pickled."""
    import pickle

    made = loader(Numbers(3))
    again: Callable[..., Any] = pickle.loads(pickle.dumps(made._collate))
    samples = pickle.loads(pickle.dumps(made.samples))
    assert again([samples[0, 1]]).ids == [1]
