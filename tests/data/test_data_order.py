"""Order is a function of (seed, epoch, position): not of devices, micro-batches, workers, or where a run began."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.data.dataset import Order, RankShare, derive_seed


def steps(
    order: Order, batch_size: int, microbatches: int, size: int, epoch: int = 0, first: int = 0
) -> list[set[int]]:
    """The samples of each step, over all ranks."""
    found: list[set[int]] = []
    for rank in range(size):
        share = RankShare(batch_size, microbatches, rank, size)
        batches = list(share.batches(order.numbers(epoch), first))
        assert len(batches) == (share.steps_per_epoch(order.size) - first) * microbatches
        assert all(len(batch) == batch_size for batch in batches)
        for place, batch in enumerate(batches):
            step = place // microbatches
            found += [set()] * (step + 1 - len(found))
            found[step] = found[step] | set(batch)
    return found


def test_an_epoch_has_each_number_once_and_another_epoch_another_order() -> None:
    order = Order(1000, seed=3)
    first, second = order.numbers(0), order.numbers(1)
    assert sorted(first.tolist()) == list(range(1000))
    assert not torch.equal(first, second)
    assert torch.equal(first, Order(1000, seed=3).numbers(0))
    assert not torch.equal(first, Order(1000, seed=4).numbers(0))
    assert Order(5, seed=3, shuffle=False).numbers(7).tolist() == [0, 1, 2, 3, 4]


def test_drawing_an_order_leaves_the_generator_of_the_training_alone() -> None:
    before = torch.get_rng_state()
    Order(100, seed=0).numbers(0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_order_is_pinned() -> None:
    """A run that is resumed by a newer version must see the same samples."""
    assert derive_seed(0, "order", 0) == 516879229434908400
    assert Order(8, seed=0).numbers(0).tolist() == [4, 0, 3, 6, 7, 2, 5, 1]


@pytest.mark.parametrize("shape", [(12, 1, 1), (6, 1, 2), (3, 2, 2), (2, 2, 3), (1, 12, 1), (1, 1, 12)])
def test_a_step_has_the_same_samples_for_any_division(shape: tuple[int, int, int]) -> None:
    order = Order(101, seed=5)
    assert steps(order, *shape) == steps(order, 12, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_every_sample_is_seen_and_repeats_are_counted(size: int, batch: int, micro: int, ranks: int, seed: int) -> None:
    order = Order(size, seed)
    seen = [n for r in range(ranks) for b in RankShare(batch, micro, r, ranks).batches(order.numbers(2)) for n in b]
    assert set(seen) == set(range(size))
    assert len(seen) - size == RankShare(batch, micro, 0, ranks).repeats(size)


def test_the_last_window_is_filled_from_the_beginning_of_the_same_order() -> None:
    order = Order(10, seed=1)
    numbers = order.numbers(0).tolist()
    assert list(RankShare(4).batches(order.numbers(0)))[-1] == [*numbers[8:], *numbers[:2]]


def test_starting_at_a_later_step_gives_the_rest() -> None:
    share, numbers = RankShare(3, 2, 1, 2), Order(100, seed=0).numbers(4)
    assert list(share.batches(numbers, first=5)) == list(share.batches(numbers))[10:]
    assert list(share.batches(numbers, first=share.steps_per_epoch(100))) == []


@pytest.mark.parametrize(("samples", "ranks"), [(10, 1), (10, 3), (2, 4), (1, 1)])
def test_evaluation_takes_every_sample_once(samples: int, ranks: int) -> None:
    taken = [n for rank in range(ranks) for batch in RankShare(4, 1, rank, ranks).once(samples) for n in batch]
    assert sorted(taken) == list(range(samples))


def test_derived_seeds_differ() -> None:
    many = {derive_seed(seed, word, n) for seed in range(20) for word in ("a", "b") for n in range(50)}
    assert len(many) == 2000
    assert all(0 <= one < 2**63 for one in many)
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert derive_seed(1, "2") != derive_seed(1, 2)
