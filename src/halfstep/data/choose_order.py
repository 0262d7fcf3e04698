"""Choose the order of the samples of a run from `data.window`, and say what it reads and how well it mixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from halfstep.data.dataset import Source
from halfstep.data.indexed import find_shards
from halfstep.data.order import FEW, RANDPERM, WELL_MIXED, SavedOrder, WindowOrder, choose_usual_lanes
from halfstep.errors import BadRecipe
from halfstep.numbers import format_bytes, format_counted_noun

if TYPE_CHECKING:
    from halfstep.data.shards import Shards

Window = int | Literal["auto", "all"] | None
FEW_DOWNLOADS, MANY_DOWNLOADS = 1.05, 1.2
"""Downloads of a set by all nodes in an epoch: the most that counts as one, and the number that gets a warning."""
CLASSES = 1000
"""Classes of the sorted set for which a mixing is given."""
_CHUNKS, _SAMPLES = 64, 1024
"""Chunks, or samples, over which reads are measured."""


def choose_order(source: Source, window: Window, batch: int, nodes: int = 1, ranks: int = 1) -> SavedOrder:
    """Return the order of a new run, with `batch` samples per step; raise BadRecipe for a window without an index."""
    if (shards := find_shards(source)) is None:
        if window not in (None, "all"):
            raise BadRecipe(
                f"data.window={window} for data without an index",
                allowed="data.window for shards, which have chunks",
                do="omit data.window: the whole set is shuffled",
            )
        return RANDPERM
    window = window or shards.usual_window
    if window == "all":
        if not shards.is_local and shards.bytes_per_sample * len(shards) > 2 * shards.most_open(1, ranks):
            raise BadRecipe(
                "data.window=all for a set in an object store, larger than store.cache or the free disk space",
                allowed="data.window=auto or a number of chunks; all with a cache as large as the set",
                do="leave data.window out",
            )
        return SavedOrder("feistel") if len(source) >= FEW else RANDPERM
    chunk = min(shards.chunk, len(source))
    fitting = shards.most_open(nodes, ranks) // (chunk * shards.bytes_per_sample)
    # Nodes that share a lane of a local set read it twice, and download nothing.
    nodes = 1 if shards.is_local else nodes
    if isinstance(window, int):
        return SavedOrder("windows", chunk, window, choose_lanes(len(source), batch, chunk, window, nodes))
    window = max(1, min(WELL_MIXED * batch, fitting))
    lanes = choose_lanes(len(source), batch, chunk, window, nodes)
    # A node has whole lanes open, also where its slots take a part of one.
    each = fitting // nodes // count_node_lanes(lanes, batch, nodes).most
    return SavedOrder("windows", chunk, max(1, min(window, lanes * each)), lanes)


class NodeLanes(NamedTuple):
    """The lanes that the nodes of a run read."""

    most: int
    """The lanes of the node that reads most of them."""
    downloads: float
    """How often all nodes together fetch the set in an epoch."""


def count_node_lanes(lanes: int, batch: int, nodes: int) -> NodeLanes:
    """Return the lanes that each node reads: its slots are neighbors, and it reads the lanes of each of them."""
    per_lane = batch // lanes
    bounds = [batch * node // nodes for node in range(nodes + 1)]
    touched = [-(-stop // per_lane) - start // per_lane for start, stop in pairwise(bounds) if stop > start]
    return NodeLanes(max(touched), sum(touched) / lanes)


def choose_lanes(size: int, batch: int, chunk: int, window: int, nodes: int) -> int:
    """Return the lanes of an order: the usual number, or where nodes would share lanes, one that they divide.

    Of the numbers that divide the samples per step, with a chunk for each lane, the one with the fewest downloads, and
    of those with `FEW_DOWNLOADS` the one that is nearest to the usual one.
    """
    usual = choose_usual_lanes(size, batch, chunk, window)
    most = min(window, size // chunk)
    possible = [lanes for one in range(1, math.isqrt(batch) + 1) if batch % one == 0 for lanes in (one, batch // one)]
    candidates = [usual, *(lanes for lanes in possible if lanes <= most)]
    downloads = {lanes: count_node_lanes(lanes, batch, nodes).downloads for lanes in candidates}

    def judge(lanes: int) -> tuple[float, float]:
        return max(downloads[lanes], FEW_DOWNLOADS), abs(math.log(lanes / usual))

    return min(candidates, key=judge)


@dataclass(frozen=True)
class NodeFacts:
    """What the nodes of a run read in an order."""

    nodes: int
    lanes: int
    node_bytes: int
    """Bytes of the chunks of the window and of the next one, on the node with the most of them."""
    downloads: float
    """How often all nodes together fetch the set in an epoch."""

    @property
    def warning(self) -> str:
        """A line where the nodes fetch the set several times; empty otherwise."""
        if self.downloads <= MANY_DOWNLOADS:
            return ""
        return (
            f"{self.nodes:,} nodes download the set {self.downloads:.2f} times in an epoch: they share lanes; add "
            "shards, or increase train.global_batch or store.cache"
        )

    def __str__(self) -> str:
        nodes, lanes = format_counted_noun(self.nodes, "node"), format_counted_noun(self.lanes, "lane")
        held = f"{format_bytes(self.node_bytes)} on each node, {self.downloads:.2f} downloads per epoch"
        return f"{nodes}: {lanes}, {held}" + (f"; warning: {self.warning}" if self.warning else "")


@dataclass(frozen=True)
class OrderFacts:
    """What an order means for a set."""

    order: SavedOrder
    open_chunks: int
    """Chunks that are open at once; for a shuffle of the whole set, its samples."""
    open_bytes: int
    read_ratio: float
    """Bytes that are read for each byte of a sample: tar headers lie between image and label."""
    mixing: float
    """z of chi-square of the classes of a step, for a set that is sorted by class; 0 is perfect."""
    nodes: tuple[NodeFacts, ...] = ()
    """What runs on one node and on more of them would read; none for a shuffle of the whole set."""

    def __str__(self) -> str:
        reads = f"reads {self.read_ratio:.3f} bytes for each byte of a sample"
        mixed = f"z {self.mixing:.1f} of a step's classes in a set sorted by {CLASSES:,} classes (0 is perfect)"
        if self.order.name != "windows":
            return f"order: the whole set, sample by sample; {reads}; {mixed}"
        each = f"of {format_counted_noun(self.order.chunk, 'sample')}"
        chunks = (
            f"{format_counted_noun(self.open_chunks, 'chunk')} {each} open at once, {format_bytes(self.open_bytes)}"
        )
        return "\n".join([f"order: {chunks}; {reads}; {mixed}", *map(str, self.nodes)])


def measure_order(order: SavedOrder, source: Source, shards: Shards, batch: int) -> OrderFacts:
    """Return what an order reads, measured over some chunks, and how well it mixes."""
    if order.name != "windows":
        numbers = range(0, len(source), max(1, len(source) // _SAMPLES))
        ratio = _measure_read_ratio(source, shards, [range(number, number + 1) for number in numbers])
        return OrderFacts(order, len(source), 0, ratio, 0.0)
    made, chunk = order.of(len(source), 0, batch), order.chunk
    assert isinstance(made, WindowOrder)
    chunks = len(source) // chunk
    some = range(0, chunks, max(1, chunks // _CHUNKS))
    ratio = _measure_read_ratio(source, shards, [range(one * chunk, (one + 1) * chunk) for one in some])
    # Chunks at the ends of lanes belong to two of them.
    ratio *= 1 + (made.lanes - 1) / max(1, chunks)
    opened = min(chunks, made.open * made.lanes)
    return OrderFacts(order, opened, opened * chunk * shards.bytes_per_sample, ratio, made.mixing(CLASSES))


def measure_nodes(order: SavedOrder, source: Source, shards: Shards, batch: int, nodes: int) -> NodeFacts:
    """Return what a run on so many nodes reads in this order."""
    made = order.of(len(source), 0, batch)
    if not isinstance(made, WindowOrder):
        return NodeFacts(nodes, 1, 0, float(nodes))
    node = count_node_lanes(made.lanes, batch, nodes)
    kept = min(len(source) // order.chunk, 2 * node.most * made.open) * order.chunk * shards.bytes_per_sample
    return NodeFacts(nodes, made.lanes, kept, node.downloads)


def _measure_read_ratio(source: Source, shards: Shards, chunks: list[range]) -> float:
    read = used = 0
    for chunk in chunks:
        numbers = [source.index_in_base(number) for number in chunk]
        read += sum(part for parts in shards.parts_of(numbers).values() for _, part in parts)
        used += sum(shards.bytes_of(number) for number in numbers)
    return read / max(1, used)
