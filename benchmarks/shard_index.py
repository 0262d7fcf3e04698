"""Index a set of 1 M samples in 2,000 shards: processor time, bytes, start, and kills. Writes shard_index.json.

    python benchmarks/shard_index.py [--samples 1000000] [--shards 2000] [--kills 10] [--folder PLACE]

It needs about 3 GB at PLACE. Processor seconds count all threads; the machine need not be idle.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).with_suffix(".json")
LIMITS = {"index_processor_seconds": 40.0, "bytes_per_sample": 25.0, "open_and_fingerprint_seconds": 0.3}
START = """
import json, sys, time
opened = []
def note(event, given):
    if event == "open" and str(given[0]).endswith(".tar"):
        opened.append(given[0])
sys.addaudithook(note)
from halfstep.data.fingerprint import fingerprint
from halfstep.data.shards import Shards
wall, busy = time.perf_counter(), time.process_time()
source = Shards(sys.argv[1])
found = fingerprint(source)
print(json.dumps({"wall": time.perf_counter() - wall, "busy": time.process_time() - busy, "opened": len(opened),
                  "samples": len(source), "digest": found.parts[0].digest}))
"""


def header(name: bytes, size: int) -> bytes:
    """Return a ustar header."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[108:124] = b"0000644\0", b"0000000\0" * 2
    block[124:136], block[136:148] = b"%011o\0" % size, b"00000000000\0"
    block[148:157], block[257:265] = b" " * 8 + b"0", b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def write_set(folder: Path, samples: int, shards: int, size: int = 600) -> None:
    """Write shards of random bytes in the place of images: nothing here is decoded."""
    random_ = random.Random(0)
    pictures = [random_.randbytes(size + random_.randrange(-size // 4, size // 4)) for _ in range(64)]
    padded = [one + bytes(-len(one) % 512) for one in pictures]
    folder.mkdir(parents=True)
    per = -(-samples // shards)
    for shard in range(shards):
        parts = []
        for number in range(shard * per, min(samples, (shard + 1) * per)):
            which, label = number % len(pictures), b"%d" % (number % 1000)
            parts += [header(b"%09d.jpg" % number, len(pictures[which])), padded[which]]
            parts += [header(b"%09d.cls" % number, len(label)), label.ljust(512, b"\0")]
        (folder / f"s-{shard:06d}.tar").write_bytes(b"".join([*parts, bytes(1024)]))


def index(folder: Path, cache: Path, kill_after: float | None = None) -> tuple[float, int]:
    """Run `halfstep data index`, killed after so many seconds; return its processor seconds and its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "halfstep", "data", "index", str(folder)]
    command = subprocess.Popen(words, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.DEVNULL)
    if kill_after is not None:
        time.sleep(kill_after)
        command.send_signal(signal.SIGKILL)
    code = command.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, code


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Measure, print and record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=1_000_000)
    options.add_argument("--shards", type=int, default=2_000)
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--folder", type=Path)
    given = options.parse_args()
    place = Path(tempfile.mkdtemp(prefix="shard-index-", dir=given.folder))
    try:
        found = measure(place, given.samples, given.shards, given.kills)
    finally:
        shutil.rmtree(place)
    missed = [name for name, limit in LIMITS.items() if found[name] > limit]
    failed = bool(missed or found["shards_opened_at_start"] or not found["identical_after_kills"])
    if (given.samples, given.shards) == (1_000_000, 2_000):
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print(f"shard_index: {'not reached: ' + ', '.join(missed) if missed else 'FAILED' if failed else 'ok'}")
    sys.exit(failed)


def measure(place: Path, samples: int, shards: int, kills: int) -> dict[str, float | int | bool | list[int]]:
    """Return the figures."""
    folder, cache = place / "set", place / "cache"
    write_set(folder, samples, shards)
    wall = time.perf_counter()
    seconds, code = index(folder, cache)
    wall = time.perf_counter() - wall
    assert code == 0, code
    path = folder / "halfstep.index"
    size, whole = path.stat().st_size, digest_of(path)
    starts = []
    for _ in range(3):
        words = [sys.executable, "-c", START, str(folder)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        starts.append(json.loads(subprocess.run(words, env=environment, check=True, capture_output=True).stdout))
    path.unlink()
    again = []
    parts = cache / "halfstep" / "shards" / "parts"
    for kill in range(kills):
        _, code = index(folder, cache, kill_after=wall * (kill + 1) / (kills + 1))
        again.append(len(list(parts.glob("*.part"))) if parts.is_dir() else 0)
        _, code = index(folder, cache)
        assert code == 0, code
        identical = digest_of(path) == whole
        path.unlink()
        if not identical:
            break
    best = min(starts, key=lambda one: one["wall"])
    return {
        "samples": samples,
        "shards": shards,
        "index_processor_seconds": round(seconds, 2),
        "bytes_per_sample": round(size / samples, 3),
        "open_and_fingerprint_seconds": round(best["wall"], 4),
        "open_and_fingerprint_processor_seconds": round(min(one["busy"] for one in starts), 4),
        "shards_opened_at_start": max(one["opened"] for one in starts),
        "kills": kills,
        "shards_done_when_killed": again,
        "identical_after_kills": identical,
    }


if __name__ == "__main__":
    main()
