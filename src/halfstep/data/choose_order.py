"""Choose the order of the samples of a run from `data.window`, and say what it reads and how well it mixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.data.dataset import Source, find_seal, resolve_index_number
from halfstep.data.order import FEW, RANDPERM, WELL_MIXED, SavedOrder, WindowOrder
from halfstep.data.shards import Shards
from halfstep.errors import BadRecipe
from halfstep.numbers import format_bytes, format_counted_noun

Window = int | Literal["auto", "all"] | None
CLASSES = 1000
"""Classes of the sorted set for which a mixing is given."""
_CHUNKS, _SAMPLES = 64, 1024
"""Chunks, or samples, over which reads are measured."""


def choose_order(source: Source, window: Window, batch: int, nodes: int = 1, ranks: int = 1) -> SavedOrder:
    """Return the order of a new run, with `batch` samples per step; raise BadRecipe for a window without an index."""
    seal = find_seal(source)
    if seal is None:
        if window not in (None, "all"):
            raise BadRecipe(
                f"data.window={window} for data without an index",
                allowed="data.window for shards, which have chunks",
                do="omit data.window: the whole set is shuffled",
            )
        return RANDPERM
    shards = seal.shards
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
    if isinstance(window, int):
        return SavedOrder("windows", chunk, window)
    fitting = shards.most_open(nodes, ranks) // (chunk * shards.bytes_per_sample)
    return SavedOrder("windows", chunk, max(1, min(WELL_MIXED * batch, fitting)))


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

    def __str__(self) -> str:
        reads = f"reads {self.read_ratio:.3f} bytes for each byte of a sample"
        mixed = f"z {self.mixing:.1f} of a step's classes in a set sorted by {CLASSES:,} classes (0 is perfect)"
        if self.order.name != "windows":
            return f"order: the whole set, sample by sample; {reads}; {mixed}"
        each = f"of {format_counted_noun(self.order.chunk, 'sample')}"
        chunks = (
            f"{format_counted_noun(self.open_chunks, 'chunk')} {each} open at once, {format_bytes(self.open_bytes)}"
        )
        return f"order: {chunks}; {reads}; {mixed}"


def measure_order(order: SavedOrder, source: Source, shards: Shards, batch: int) -> OrderFacts:
    """Return what an order reads, measured over some chunks, and how well it mixes."""
    if order.name != "windows":
        numbers = range(0, len(source), max(1, len(source) // _SAMPLES))
        ratio = _measure_read_ratio(source, shards, [range(number, number + 1) for number in numbers])
        return OrderFacts(order, len(source), 0, ratio, 0.0)
    made, chunk = WindowOrder(len(source), 0, batch, order.chunk, order.window), order.chunk
    chunks = len(source) // chunk
    some = range(0, chunks, max(1, chunks // _CHUNKS))
    ratio = _measure_read_ratio(source, shards, [range(one * chunk, (one + 1) * chunk) for one in some])
    # Chunks at the ends of lanes belong to two of them.
    ratio *= 1 + (made.lanes - 1) / max(1, chunks)
    opened = min(chunks, made.open * made.lanes)
    return OrderFacts(order, opened, opened * chunk * shards.bytes_per_sample, ratio, made.mixing(CLASSES))


def _measure_read_ratio(source: Source, shards: Shards, chunks: list[range]) -> float:
    read = used = 0
    for chunk in chunks:
        numbers = [resolve_index_number(source, number) for number in chunk]
        read += sum(part for parts in shards.parts_of(numbers).values() for _, part in parts)
        used += sum(shards.bytes_of(number) for number in numbers)
    return read / max(1, used)
