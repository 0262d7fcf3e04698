"""The order of indexed sets: every sample once, a function of seed, epoch and slot, and mixed as it says."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.data.dataset import Order, RankShare
from halfstep.data.order import FEW, FeistelOrder, Permutation, SavedOrder, WindowOrder

WINDOWS = [(8, 4), (16, 1), (64, 16), (1, 300), (7, 13), (50, 2)]
"""Samples of a chunk, and chunks that are open at once."""


def batches(order: Order, share: RankShare, most: int | None = 60, epoch: int = 1, first: int = 0) -> list[list[int]]:
    return list(islice(share.batches(order.numbers(epoch), first), most))


# -- every sample once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [FEW, FEW + 1, 66_049, 70_001, 99_991, 123_457])
def test_the_network_permutes(size: int) -> None:
    for seed in range(3):
        found = Permutation(size, seed).at(np.arange(size))
        assert (np.bincount(found, minlength=size) == 1).all()


def test_few_samples_are_drawn_as_ever() -> None:
    for size in (1, 5, 1000, FEW - 1):
        drawn, found = Order(size, 3).numbers(2), FeistelOrder(size, 3).numbers(2)
        assert torch.equal(found[torch.arange(size)], drawn[torch.arange(size)])


def sizes() -> list[tuple[int, int]]:
    """200 odd sizes with a batch for each."""
    batches = (1, 2, 3, 4, 6, 8, 12, 24, 64, 96)
    counted = [1, 2, 3, 5, 63, 64, 65, 127, 129, 255, 257, 999, 1001, 2047, 4097, 9999, 10_007, 20_011, 30_011, 70_001]
    return [(size, batch) for size in counted for batch in batches]


def once_and_the_fill(order: Order, batch: int) -> bool:
    numbers, size, repeats = order.numbers(1), order.size, RankShare(batch).repeats(order.size)
    places = torch.arange(-(-size // batch) * batch) % len(numbers)
    counts = np.bincount(numbers[places].numpy(), minlength=size)
    # Lanes with fewer samples than they have to fill take some of them more than twice.
    fits = (counts > 1).sum() == repeats or repeats > size // 64
    return bool(len(counts) == size and counts.min() >= 1 and counts.sum() - size == repeats and fits)


def test_every_sample_once_and_the_fill() -> None:
    for number, (size, batch) in enumerate(sizes()[::7]):
        window = WINDOWS[number % len(WINDOWS)]
        assert once_and_the_fill(WindowOrder(size, 3, batch, *window), batch), (size, batch, window)
        assert once_and_the_fill(FeistelOrder(size, 3), batch), (size, batch)


@pytest.mark.full
@pytest.mark.parametrize("window", WINDOWS)
def test_every_sample_once_with_each_window(window: tuple[int, int]) -> None:
    for size, batch in sizes():
        assert once_and_the_fill(WindowOrder(size, 3, batch, *window), batch), (size, batch, window)
        assert once_and_the_fill(FeistelOrder(size, 3), batch), (size, batch)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_epoch_of_100_million() -> None:
    size, batch, found = 100_000_000, 1024, {}
    for order in (FeistelOrder(size, 0), WindowOrder(size, 0, batch, 64, 16 * batch)):
        numbers, seen = order.numbers(1), np.zeros(size, np.uint8)
        steps = -(-size // batch)
        for first in range(0, steps, 1000):
            places = torch.arange(first * batch, min(steps, first + 1000) * batch)
            np.add.at(seen, numbers[places % len(numbers)].numpy(), 1)
        counts = np.bincount(seen, minlength=3)
        found[type(order).__name__] = counts[:3].tolist()
        assert counts[0] == 0
        assert counts[2:].sum() == steps * batch - size
    path = Path(__file__).parents[2] / "benchmarks" / "order_100m.json"
    command = "pytest --full tests/data/test_indexed_order.py -k 100_million"
    path.write_text(json.dumps({"command": command, "samples": size, "seen_0_1_2_times": found}, indent=1) + "\n")


# -- the same everywhere ----------------------------------------------------------------------------------------------


ORDERS = [FeistelOrder(70_001, 5), WindowOrder(70_001, 5, 48, 16, 100), WindowOrder(3001, 5, 48, 8, 24)]


@pytest.mark.parametrize("order", ORDERS, ids=["feistel", "windows", "small"])
@pytest.mark.parametrize(("size", "micro"), [(2, 1), (4, 1), (1, 3), (2, 2), (4, 3), (16, 1)])
def test_a_step_has_the_same_samples_for_any_division(order: Order, size: int, micro: int) -> None:
    whole = batches(order, RankShare(48, neighboring=order.has_lanes), 50)
    ranks = [RankShare(48 // size // micro, micro, rank, size, order.has_lanes) for rank in range(size)]
    divided = [batches(order, share, 50 * micro) for share in ranks]
    for step, wanted in enumerate(whole):
        parts = [[n for one in rank[step * micro : (step + 1) * micro] for n in one] for rank in divided]
        if order.has_lanes:
            assert [n for part in parts for n in part] == wanted, "ranks have neighboring slots"
        assert sorted(n for part in parts for n in part) == sorted(wanted)


@pytest.mark.parametrize("order", ORDERS, ids=["feistel", "windows", "small"])
def test_a_later_step_needs_none_before_it(order: Order) -> None:
    share = RankShare(24, 1, 1, 2, order.has_lanes)
    assert batches(order, share, 20, first=40) == batches(order, share, 60)[40:]
    assert batches(order, share, 3, epoch=2) != batches(order, share, 3)


def test_orders_are_pinned() -> None:
    """A run that is resumed by a newer version must see the same samples."""
    places = torch.arange(6)
    assert FeistelOrder(100_000, 0).numbers(0)[places].tolist() == PINNED[0]
    assert WindowOrder(100_000, 0, 8, 16, 64).numbers(0)[places].tolist() == PINNED[1]
    assert WindowOrder(3_000_000, 0, 8, 16, 64).numbers(0)[places].tolist() == PINNED[2]


PINNED = [
    [50098, 68591, 23824, 15909, 90183, 9793],
    [61708, 22513, 75599, 27577, 44295, 9498],
    [221324, 358733, 606711, 2881281, 1579527, 265574],
]


def test_a_saved_order_gives_the_same_one() -> None:
    for saved in (SavedOrder(), SavedOrder("feistel"), SavedOrder("windows", 16, 64)):
        order, again = (saved.of(70_001, 1, 8) for _ in range(2))
        assert batches(order, RankShare(8), 9) == batches(again, RankShare(8), 9)
    assert type(SavedOrder().of(70_001, 1, 8)) is Order


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_are_announced_before_their_samples_are_read_and_once(ranks: int) -> None:
    order = WindowOrder(5_000, 2, 16, 16, 64)
    for rank in range(ranks):
        share = RankShare(16 // ranks, 1, rank, ranks, neighboring=True)
        numbers = order.numbers(1)
        opened: set[int] = set()
        outside = used = 0
        most = 0
        for chunks, batch in zip(order.openings(1, share, 0), share.batches(numbers), strict=True):
            for start, stop in chunks:
                assert start not in opened, "a chunk is announced once an epoch"
                assert stop - start == 16
                opened.add(start)
            outside += sum(number // 16 * 16 not in opened for number in batch)
            used += len(batch)
            most = max(most, len(opened) - used // 16)
        assert outside / used < 0.06, "only the ends of lanes, which are no whole chunks, are not announced"
        assert (len(opened) * 16 + outside) / used < 1.05
        assert most <= 2 * 64 / ranks + order.lanes, "no more is open than two windows"


def test_ranks_read_chunks_of_their_own() -> None:
    order = WindowOrder(5_000, 2, 16, 16, 64)
    chunks = []
    for rank in range(4):
        found = batches(order, RankShare(4, 1, rank, 4, neighboring=True), None)
        chunks.append({number // 16 for batch in found for number in batch})
    shared = sum(map(len, chunks)) - len(set.union(*chunks))
    assert shared <= 2 * order.lanes


def z_of(classes: np.ndarray, count: int) -> float:
    expected, freedom = len(classes) / count, count - 1
    chi = ((np.bincount(classes, minlength=count) - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def test_a_sorted_set_is_mixed_as_it_says() -> None:
    size, batch, classes = 2_000_000, 512, 100
    random = np.random.default_rng(0)
    for window in (1, 16):
        order = WindowOrder(size, 1, batch, 16, window * batch)
        numbers, steps = order.numbers(1), random.choice(size // batch - 2, 20, replace=False).tolist()
        each = [numbers[torch.arange(step * batch, (step + 1) * batch)].numpy() for step in steps]
        z = np.mean([z_of(one * classes // size, classes) for one in each])
        assert abs(z - order.mixing(classes)) < 0.6, window
        assert (z < 2) == (window == 16)
