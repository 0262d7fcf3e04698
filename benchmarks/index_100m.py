"""Open an index of 100 M samples: time to open, to find a step and its rows, and the private memory of each process.

    python benchmarks/index_100m.py [--samples 100000000] [--folder PLACE] [--record]

The index is synthetic but for a few real shards, whose samples are read; the others are sparse files. 100 M samples
need 2.6 GB at PLACE. `--record` writes index_100m.json next to this script. Prints the law for 1 G samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from shard_index import write_set

RESULT = Path(__file__).with_suffix(".json")
PER_SHARD, REAL, BATCH, RANKS = 10_000, 4, 1024, 8
LIMITS = {"open_seconds": 0.5, "seek_milliseconds": 10.0, "rank_megabytes": 16.0, "worker_megabytes": 16.0}
"""Megabytes are Private_Dirty above those of a set of 1,000 samples."""
PROBE = """
import json, os, sys, time
import torch
from torch.utils.data import default_collate
from halfstep.data.dataset import Samples
from halfstep.data.fingerprint import fingerprint
from halfstep.data.loader import TrainLoader
from halfstep.data.order import SavedOrder
from halfstep.data.shards import Shards
from torch.utils.data import get_worker_info

REAL, BATCH, RANKS = map(int, sys.argv[2:5])

def dirty():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Private_Dirty"))

class Rows:
    def __init__(self, shards): self.shards, self.real = shards, 0
    def __len__(self): return len(self.shards)
    def name(self, index): return self.shards.name(index)
    def read(self, index):
        row = self.shards.index.row(index)
        if row.shard < REAL:
            self.shards.content(index)
            self.real += 1
        there = get_worker_info() is not None
        return {"label": torch.tensor([row.label, self.real, int(1024 * dirty()) if there and index % 16 == 0 else 0])}

wall = time.perf_counter()
source = Shards(sys.argv[1], verify="all")
opened = time.perf_counter() - wall
printed = time.perf_counter()
fingerprint(source)
printed = time.perf_counter() - printed
order = SavedOrder("feistel" if len(source) >= 65536 else "randperm").of(len(source), 0, BATCH)
steps, seeks = -(-len(source) // BATCH), []
for k in range(50):
    wall = time.perf_counter()
    numbers = order.numbers(k)
    first = (k * 7919 % steps) * BATCH + 3 * BATCH // RANKS
    found = numbers[torch.arange(first, first + BATCH // RANKS) % len(source)].tolist()
    rows = [source.index.row(number) for number in found]
    seeks.append(1000 * (time.perf_counter() - wall))
loader = TrainLoader(Samples(Rows(source), dict, 0), order, batch_size=BATCH // RANKS, collate=default_collate,
                     workers=2, device="cpu", rank=3, size=RANKS)
workers, real = 0, 0
for count, [batch] in enumerate(loader.windows(1)):
    workers = max(workers, int(batch.tensors["label"][:, 2].max()) / 1024)
    real = max(real, int(batch.tensors["label"][:, 1].max()))
    if count == 200:
        break
print(json.dumps({"samples": len(source), "open": opened, "fingerprint": printed, "seek_median": sorted(seeks)[25],
                  "seek_most": max(seeks), "rank": dirty(), "worker": workers, "real": real}))
"""


def main() -> None:
    """Build, measure, print and record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=100_000_000)
    options.add_argument("--folder", type=Path)
    options.add_argument("--record", action="store_true")
    given = options.parse_args()
    place = Path(tempfile.mkdtemp(prefix="index-100m-", dir=given.folder))
    try:
        found = measure(place, given.samples)
    finally:
        shutil.rmtree(place)
    missed = [name for name, limit in LIMITS.items() if float(found[name]) > limit]
    print(json.dumps(found, indent=1))
    print(f"law for 1 G samples: {law(found)}")
    if given.record:
        command = " ".join(["python", "benchmarks/index_100m.py", *sys.argv[1:]])
        RESULT.write_text(json.dumps({"command": command, **found, "law_for_1G": law(found)}, indent=1) + "\n")
    print(f"index_100m: {'not reached: ' + ', '.join(missed) if missed else 'ok'}")
    sys.exit(bool(missed))


def law(found: dict[str, float | int]) -> str:
    """Return what 1 G samples would take, from the bytes and the seconds for each shard and sample."""
    times = 1e9 / found["samples"]
    return (
        f"{found['bytes_per_sample']:.1f} GB of index on disk, {found['open_seconds'] * times:.2f} s to open "
        f"({found['shards'] * times:,.0f} shards), {found['seek_milliseconds']:.1f} ms to find a step and its rows"
    )


def measure(place: Path, samples: int) -> dict[str, float | int]:
    """Return the figures of a set, and those above a set of 1,000 samples."""
    small, large = place / "small", place / "large"
    write_set(small, 1000, 2)
    wall = time.perf_counter()
    write_large(large, samples)
    made = time.perf_counter() - wall
    before, after = (
        min((probed(folder, place) for _ in range(3)), key=lambda one: one["open"]) for folder in (small, large)
    )
    size = (large / "halfstep.index").stat().st_size
    return {
        "samples": samples,
        "shards": samples // PER_SHARD,
        "bytes_per_sample": round(size / samples, 3),
        "made_in_seconds": round(made, 1),
        "open_seconds": round(after["open"], 4),
        "fingerprint_seconds": round(after["fingerprint"], 4),
        "seek_milliseconds": round(after["seek_median"], 2),
        "seek_milliseconds_most": round(after["seek_most"], 2),
        "rank_megabytes": round(after["rank"] - before["rank"], 2),
        "worker_megabytes": round(after["worker"] - before["worker"], 2),
        "samples_read_from_real_shards": int(after["real"]),
    }


def write_large(folder: Path, samples: int) -> None:
    """Write some real shards, sparse files for the others, and an index of all."""
    from halfstep.data.shard_index import pack_shard_rows, write_packed_shards
    from halfstep.data.shard_rows import ShardRows
    from halfstep.data.shard_scan import scan_shard

    shards = samples // PER_SHARD
    write_set(folder, REAL * PER_SHARD, REAL)
    random_ = np.random.default_rng(0)
    names = [f"s-{number:06d}.tar" for number in range(shards)]

    def packed() -> object:
        for number, name in enumerate(names):
            if number < REAL:
                yield pack_shard_rows(scan_shard(folder / name))
                continue
            sizes = random_.integers(400, 150_000, PER_SHARD)
            blocks = 2 + -(-sizes // 512) + 2
            image = (np.cumsum(blocks) - blocks + 1) * 512
            label_at = image + -(-sizes // 512) * 512 + 512
            length = int(blocks.sum() + 2) * 512
            none = np.full(PER_SHARD, -1)
            place, digest = (random_.integers(0, 2**32, PER_SHARD, dtype=np.uint64) for _ in range(2))
            yield pack_shard_rows(
                ShardRows(length, image, sizes, np.full(PER_SHARD, number % 1000), place, digest, none, none, label_at)
            )
            with open(folder / name, "wb") as file:
                file.truncate(length)

    write_packed_shards(folder / "halfstep.index", names, packed())
    os.utime(folder / "halfstep.index")


def probed(folder: Path, place: Path) -> dict[str, float]:
    """Return what one process measures of a set."""
    words = [sys.executable, "-c", PROBE, str(folder), str(REAL), str(BATCH), str(RANKS)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    found: dict[str, float] = json.loads(subprocess.run(words, env=environment, check=True, capture_output=True).stdout)
    return found


if __name__ == "__main__":
    main()
