"""Windows over a store at 8 to 512 nodes: what a node keeps, and how often all nodes together download the set.

    python benchmarks/window_downloads.py [--cache 20] [--record]

Lanes and window are those that a run chooses for 100 M samples in chunks of 8 MiB, 80 samples each. The downloads are
counted on a set of 50,000 samples with the same lanes: each chunk that the slots of a node use in an epoch counts once
for the node. `--record` writes window_downloads.json. Ends with 1 if a row downloads the set
more than 1.05 times, or keeps more than the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.data.choose_order import FEW_DOWNLOADS, choose_order, measure_nodes
from halfstep.data.order import WindowOrder
from halfstep.data.shards import Shards

RESULT = Path(__file__).with_suffix(".json")
CHUNK, CHUNK_BYTES, RANKS = 80, 8 * 2**20, 8
SAMPLES, COUNTED, COUNTED_CHUNK = 100_000_000, 50_003, 4
CASES = [
    *((8, 2048), (16, 4096), (32, 8192), (64, 8192), (128, 8192), (128, 16384), (256, 16384), (512, 16384)),
    *((5, 1000), (7, 1008), (12, 768), (3, 360), (96, 6144), (125, 8000)),
]
"""Nodes and samples per step."""


class Stored(Shards):
    """A set in a store, without its bytes."""

    usual_window, is_local, chunk, bytes_per_sample = "auto", False, CHUNK, CHUNK_BYTES // CHUNK

    def __init__(self, cache: float) -> None:
        self._cache = int(cache * 1e9)

    def __len__(self) -> int:
        return SAMPLES

    def most_open(self, nodes: int, ranks: int) -> int:
        """Return the bytes of a window over all nodes, as `StoreShards` does."""
        return self._cache * 49 // 100 * nodes


def measure(nodes: int, batch: int, cache: float) -> dict[str, float | int]:
    """Return the row of a run with so many nodes."""
    source: Any = Stored(cache)
    saved = choose_order(source, None, batch, nodes, nodes * RANKS)
    order = WindowOrder(COUNTED, 1, batch, COUNTED_CHUNK, saved.window, saved.lanes)
    facts = measure_nodes(saved, source, source, batch, nodes)
    numbers = order.numbers(0)
    used = numbers[torch.arange(len(numbers))].numpy().reshape(-1, batch) // COUNTED_CHUNK
    slots = np.arange(batch) * nodes // batch
    # The last step is filled from the beginning of each lane.
    pairs = np.unique(used[: COUNTED // batch].astype(np.int64) * nodes + slots)
    downloads = len(pairs) / -(-COUNTED // COUNTED_CHUNK)
    return {
        "nodes": nodes,
        "batch": batch,
        "lanes": order.lanes,
        "open_chunks": saved.window,
        "gigabytes_per_node": round(facts.node_bytes / 1e9, 2),
        "downloads": round(downloads, 3),
        "claimed_downloads": round(facts.downloads, 3),
    }


def main() -> None:
    """Measure, print and record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cache", type=float, default=20.0)
    options.add_argument("--record", action="store_true")
    given = options.parse_args()
    rows = [measure(nodes, batch, given.cache) for nodes, batch in CASES]
    print("| nodes x 8 ranks | samples per step | lanes | open chunks | GB per node | downloads per epoch |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = ("nodes", "batch", "lanes", "open_chunks", "gigabytes_per_node", "downloads")
        print("| " + " | ".join(f"{row[cell]:,}" for cell in cells) + " |")
    bad = [row for row in rows if row["downloads"] > FEW_DOWNLOADS or row["gigabytes_per_node"] > given.cache]
    if given.record:
        RESULT.write_text(
            json.dumps({"cache": given.cache, "samples": SAMPLES, "counted": COUNTED, "rows": rows}, indent=1) + "\n"
        )
    print(f"window_downloads: {f'{len(bad)} rows are over the limits: {bad}' if bad else 'ok'}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
