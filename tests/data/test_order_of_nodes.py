"""Windows over a store on many nodes: each chunk is fetched once, and a node keeps what its cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.window_downloads import CHUNK_BYTES, Stored
from halfstep.data.choose_order import choose_lanes, choose_order, count_node_lanes, measure_nodes
from halfstep.data.dataset import RankShare
from halfstep.data.order import SavedOrder, WindowOrder, choose_usual_lanes
from halfstep.errors import StateMismatch
from halfstep.train.environment import AutoChoices

CACHE = 20.0


@pytest.mark.parametrize(
    ("nodes", "batch"),
    [
        (1, 256),
        (8, 2048),
        (64, 8192),
        (128, 8192),
        (512, 16384),
        (5, 1000),
        (7, 1008),
        (3, 360),
        (96, 6144),
        (125, 8000),
    ],
)
def test_nodes_fetch_each_chunk_once_and_hold_two_windows(nodes: int, batch: int) -> None:
    source: Any = Stored(CACHE)
    saved = choose_order(source, None, batch, nodes, 8 * nodes)
    facts = measure_nodes(saved, source, source, batch, nodes)
    assert (facts.downloads, facts.warning, saved.lanes % nodes) == (1.0, "", 0)
    assert 0 < facts.node_bytes <= CACHE * 1e9
    order = saved.of(len(source), 0, batch)
    assert isinstance(order, WindowOrder)
    # The chunks that a node fetches first where a run is resumed in the middle of a window: it, and half of the next.
    per, opened = batch // (8 * nodes), set[tuple[int, int]]()
    middle = order.open * order.chunk // 2 // (batch // order.lanes)
    for rank in range(8):
        share = RankShare(per, 1, rank, 8 * nodes, neighboring=True)
        opened |= set(next(order.openings(0, share, middle)))
    assert len(opened) * CHUNK_BYTES <= CACHE * 1e9


@pytest.mark.parametrize(("nodes", "batch"), [(2, 32), (3, 48), (5, 40)])
def test_downloads_are_those_of_the_samples_that_nodes_use(nodes: int, batch: int) -> None:
    size, chunk = 24_000, 40  # of a small chunk, a node may use no sample
    for lanes in (1, 4, 8, choose_lanes(size, batch, chunk, 64, nodes)):
        order = WindowOrder(size, 3, batch, chunk, 64, lanes)
        assert order.lanes == lanes
        numbers = order.numbers(0)
        used = numbers[torch.arange(size // batch * batch)].numpy().reshape(-1, batch) // chunk
        pairs = np.unique(used * nodes + np.arange(batch) * nodes // batch)
        assert len(pairs) / (size / chunk) == pytest.approx(count_node_lanes(lanes, batch, nodes).downloads, abs=0.05)


def test_a_set_with_fewer_chunks_than_nodes_is_warned_of() -> None:
    assert choose_lanes(100, 64, 16, 1024, 8) < 8
    source: Any = Stored(CACHE)
    facts = measure_nodes(SavedOrder("windows", 16, 64, 2), source, source, 64, 8)
    assert facts.downloads == 4.0
    assert "8 nodes download the set 4.00 times" in facts.warning
    assert facts.warning in str(facts)


@pytest.mark.parametrize("batch", [1, 6, 64, 1000, 8192])
def test_an_order_without_lanes_is_that_of_earlier_versions(batch: int) -> None:
    for size, chunk, window in ((50, 16, 3), (9000, 16, 100), (200_000, 80, 5000)):
        old, usual = WindowOrder(size, 5, batch, chunk, window), choose_usual_lanes(size, batch, chunk, window)
        new = SavedOrder("windows", chunk, window, usual).of(size, 5, batch)
        places = torch.arange(0, len(old.numbers(1)), 7)
        assert torch.equal(old.numbers(1)[places], new.numbers(1)[places])
        assert choose_lanes(size, batch, chunk, window, 1) == usual, "one node keeps the order that it had"


def choices(order: Mapping[str, object]) -> dict[str, Any]:
    return {"precision": "fp32", "reasons": [], "num_workers": 0, "plan": None, "order": order}


def test_a_checkpoint_without_lanes_keeps_its_order() -> None:
    old = {"name": "windows", "chunk": 16, "window": 100}
    assert AutoChoices.from_dict(choices(old)).order == SavedOrder("windows", 16, 100, 0)
    new = SavedOrder("windows", 16, 100, 96)
    assert AutoChoices.from_dict(choices(asdict(new))).order == new
    with pytest.raises(StateMismatch):
        AutoChoices.from_dict(choices({**old, "lane": 3}))


def test_every_sample_once_with_any_lanes() -> None:
    for lanes in (1, 3, 5, 12, 60):
        order = WindowOrder(5003, 1, 60, 16, 120, lanes)
        found = order.numbers(2)
        counts = np.bincount(found[torch.arange(len(found))].numpy(), minlength=5003)
        assert (order.lanes, counts.min(), counts.sum()) == (lanes, 1, len(found))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_an_evaluation_of_neighbors_has_every_sample_once(size: int) -> None:
    for samples in (1, 7, 63, 64, 1000):
        every = [list(RankShare(4, 1, rank, size, neighboring=True).once(samples)) for rank in range(size)]
        flat = [[number for batch in batches for number in batch] for batches in every]
        assert [number for one in flat for number in one] == list(range(samples))
        assert max(map(len, flat)) - min(map(len, flat)) <= 1


def test_nodes_fetch_the_chunks_of_validation_once() -> None:
    samples, chunk, nodes = 50_000, 80, 16
    fetched = 0
    for node in range(nodes):
        ranks = range(8 * node, 8 * node + 8)
        shares = (RankShare(32, 1, rank, 8 * nodes, neighboring=True) for rank in ranks)
        fetched += len({number // chunk for share in shares for batch in share.once(samples) for number in batch})
    assert fetched / (samples / chunk) < 1.03
