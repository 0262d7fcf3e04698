"""Memory and cache of a run that reads its samples from an object store.

    python -m benchmarks.store_memory [--steps 2000] [--record]

A set of about 200 MB in 12 shards is put into moto (images of 100 kB, so that a chunk has 8 MiB), and 2 workers read it
with a cache of three chunks. The resident memory of the trainer, of the processes for the store and of the workers is
read five times a second, and the bytes in the cache as often as possible. Flat: the median of the last quarter of the
run is at most 5 % above that of the second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from halfstep.data.shards import CHUNK_BYTES, Shards
from halfstep.files import write_json
from halfstep.store.process import StoreProcess
from tests.support.indexed_task import write_shards
from tests.support.store_servers import BUCKET, moto, variables

RECORD = Path(__file__).with_suffix(".json")
LAUNCH = """
import sys, json
from tests.support.indexed_task import launched
found = launched(0, sys.argv[1], json.loads(sys.argv[2]))
print(found["code"], found["said"], len(found["ids"]), found["order"])
"""
MOST = 0.05
"""The share by which a flat curve may rise."""


def images(count: int) -> dict[int, bytes]:
    """Return pictures of noise: 100 kB each, and no two the same."""
    import io

    import numpy as np
    from PIL import Image

    draw, found = np.random.default_rng(0), {}
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (184, 184, 3), np.uint8)).save(file, "PNG")
        found[number] = file.getvalue()
    return found


def watch(
    pid: int, cache: Path, done: threading.Event, seen: dict[str, list[tuple[float, float]]], used: list[int]
) -> None:
    """Note the memory of each kind of process in MB, and the bytes of the cache."""
    began, last = time.monotonic(), 0.0
    while not done.is_set():
        size = 0
        for path in cache.glob("*") if cache.exists() else ():
            try:
                size += 0 if path.suffix == ".lock" else path.stat().st_size
            except FileNotFoundError:
                continue
        used.append(size)
        now = time.monotonic() - began
        if now - last < 0.2:
            continue
        last, kinds = now, dict[str, list[float]]()
        try:
            trainer = psutil.Process(pid)
            for one in (trainer, *trainer.children()):
                words = " ".join(one.cmdline())
                kind = "trainer" if one.pid == pid else "store process" if "store.process" in words else "worker"
                kinds.setdefault(kind, []).append(one.memory_info().rss / 1e6)
        except psutil.Error:
            continue
        for kind, sizes in kinds.items():
            seen.setdefault(kind, []).append((now, max(sizes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, moto() as port:
        os.environ.update({**variables(port), "XDG_CACHE_HOME": f"{place}/cache"})
        root = write_shards(Path(place) / "set", 12, 166, images(12 * 166))
        address = f"s3://{BUCKET}/memory-{os.getpid()}"
        helper = StoreProcess()
        for path in sorted(root.glob("*.tar")):
            helper.call("tests.store.calls:put_path", {"address": address, "key": path.name, "path": str(path)})
        helper.call("tests.store.calls:index_set", {"address": address, "patience": 300.0})
        helper.close()
        limit = int(3.1 * CHUNK_BYTES)
        settings = {
            "data.path": address,
            "train.steps": given.steps,
            "train.num_workers": 2,
            "store.cache": limit / 1e9,
        }
        settings |= {"checkpoint.every_steps": 500, "checkpoint.keep": 2}
        seen: dict[str, list[tuple[float, float]]] = {}
        used: list[int] = []
        began, done = time.monotonic(), threading.Event()
        import json

        words = [sys.executable, "-c", LAUNCH, f"{place}/run", json.dumps(settings)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
            cache = Path(place) / "cache" / "halfstep" / "chunks"
            watcher = threading.Thread(target=watch, args=(trainer.pid, cache, done, seen, used))
            watcher.start()
            out = trainer.communicate()[0].strip()
            done.set()
            watcher.join()
        chunk = Shards(root).chunk
    took = time.monotonic() - began
    print(f"{out}: exit code, message, steps and order; {took:.0f} s, chunks of {chunk} samples")
    rows = {}
    for kind, points in sorted(seen.items()):
        end = max(at for at, _ in points)
        quarters = [[mb for at, mb in points if n <= at / end * 4 <= n + 1] or [0.0] for n in range(4)]
        medians = [round(statistics.median(one), 1) for one in quarters]
        rows[kind] = {"median_mb_by_quarter": medians, "largest_mb": round(max(mb for _, mb in points), 1)}
        print(f"{kind}: median RSS by quarter {medians} MB, largest {rows[kind]['largest_mb']} MB")
    print(f"cache: at most {max(used):,} of {limit:,} bytes in {len(used):,} looks")
    rises = {kind: row["median_mb_by_quarter"][3] / row["median_mb_by_quarter"][1] - 1 for kind, row in rows.items()}
    is_flat = all(rise <= MOST for rise in rises.values()) and max(used) <= limit and out.startswith("0 ")
    print("flat" if is_flat else f"NOT flat: {rises}")
    if given.record:
        facts = {"steps": given.steps, "workers": 2, "seconds": round(took, 1), "processes": rows}
        facts |= {"cache_limit": limit, "cache_largest": max(used), "looks": len(used), "flat": is_flat}
        write_json(RECORD, {"command": f"python -m benchmarks.store_memory --steps {given.steps}", **facts})
    sys.exit(not is_flat)


if __name__ == "__main__":
    main()
