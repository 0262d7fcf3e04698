"""Damaged and hostile shards: each is refused by name, in bounded time and memory. Writes hostile_shards.json.

    python -m benchmarks.hostile_shards [--record]

Each shard is scanned in a new process; seconds are those of the processor, megabytes its most resident memory. A
flipped byte in a row page, the table or the footer of an index and in a shard, and a shard that was replaced by one of
the same size, are found while samples are read with `verify: all`: none is trained on. (Those processes load torch.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.data.test_hostile_shards import HOSTILE, MOST_MEGABYTES, MOST_SECONDS, many, member

RESULT = Path(__file__).with_suffix(".json")
MOST_SECONDS_OF_MANY = 90.0
SCAN = """
import json, sys, time
from pathlib import Path
from halfstep.data.shard_scan import scan_shard
from halfstep.errors import BadData
began = time.process_time()
try:
    scan_shard(Path(sys.argv[1]))
    said = ""
except BadData as error:
    said = str(error)
seconds = time.process_time() - began
memory = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([said, seconds, memory]))
"""
READ = """
import json, sys, time
from pathlib import Path
from halfstep.data.dataset import BadSample
from halfstep.data.shards import Shards
from halfstep.errors import BadData
began, said, used = time.process_time(), [], 0
try:
    source = Shards(sys.argv[1], verify="all")
    if source.index.path != Path(sys.argv[2]):
        said.append(f"{Path(sys.argv[1]).name}: its index was rejected, and made anew")
    for number in range(len(source)):
        try:
            content = source.content(number)
            used += content.image != b"image %d" % number
        except BadSample as error:
            said.append(f"{error.name}: {error.reason}")
except BadData as error:
    said.append(str(error))
seconds = time.process_time() - began
memory = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps(["USED" if used else said[0] if said else "", seconds, memory]))
"""


class Row(NamedTuple):
    """A shard, what was said of it, and what that took."""

    shard: str
    named: bool
    seconds: float
    megabytes: float
    said: str


def run(shard: Path, name: str, code: str, *given: str) -> Row:
    """Return what a new process says of a shard."""
    words = [sys.executable, "-c", code, str(shard), *given]
    said, seconds, memory = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return Row(
        name,
        shard.name in said,
        round(seconds, 3),
        round(memory, 1),
        said.splitlines()[0].replace(str(shard.parent), "")[:160] if said else "",
    )


def hostile(folder: Path) -> Iterator[Row]:
    """Scan each hostile shard."""
    for name, make in HOSTILE.items():
        (folder / f"{name}.tar").write_bytes(make())
        yield run(folder / f"{name}.tar", name, SCAN)
    yield run(many(folder / "many.tar", 2_000_001), "more members than allowed", SCAN)


def flipped(folder: Path) -> Iterator[Row]:
    """Index a shard, change a byte of the index or of the shard, and read every sample."""
    from halfstep.data.shard_index import write_index
    from halfstep.data.shards import build_shard_set

    samples = b"".join(member(b"%06d.jpg" % n, b"image %d" % n) + member(b"%06d.cls" % n, b"1") for n in range(1536))
    for name, change in CHANGES.items():
        root = folder / name.replace(" ", "-") / "a.tar"
        root.parent.mkdir()
        root.write_bytes(samples + bytes(1024))
        path = Path(f"{root}.index")
        write_index(root, build_shard_set(root), lambda done, of: None)
        change(path, root)
        os.utime(path)  # not older than the shard: as if the shard had been written by a system without times
        yield run(root, name, READ, str(path))


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, Callable[[Path, Path], None]] = {
    "a flipped byte in a row page": lambda index, shard: flip(index, 16 + 4 * 600),
    "a flipped byte in the table": lambda index, shard: flip(index, index.stat().st_size - 130),
    "a flipped byte in the footer": lambda index, shard: flip(index, index.stat().st_size - 60),
    "a flipped byte in a shard": lambda index, shard: flip(shard, 2048 * 700 + 514),
    "a shard replaced by one of its size": lambda index, shard: shard.write_bytes(
        shard.read_bytes().replace(b"image 7", b"IMAGE 7")
    ),
}


def main() -> None:
    """Scan, print and record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", action="store_true")
    given = options.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hostile-shards-") as place:
        os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
        for scan in (hostile, flipped):
            (folder := Path(place) / scan.__name__).mkdir()
            for row in scan(folder):
                rows.append(row)
                print(f"{row.shard:38} {row.seconds:7.3f} s {row.megabytes:6.1f} MB  {row.said[-90:]}", flush=True)
    usual = [row for row in rows if "members than" not in row.shard]
    slowest = max(row.seconds for row in usual)
    longest = max(row.seconds for row in rows)
    memory = max(row.megabytes for row in rows[: len(HOSTILE) + 1])
    named = sum(row.named for row in rows)
    ok = named == len(rows) and slowest < MOST_SECONDS and longest < MOST_SECONDS_OF_MANY and memory < MOST_MEGABYTES
    found = {"shards": len(rows), "named": named, "slowest": slowest, "too_many_members": longest, "megabytes": memory}
    if given.record:
        listed = [row._asdict() for row in rows]
        command = "python -m benchmarks.hostile_shards --record"
        RESULT.write_text(json.dumps({"command": command, **found, "rows": listed}, indent=1) + "\n")
    print(
        f"hostile_shards: {'ok' if ok else 'FAILED'} named={named}/{len(rows)} slowest={slowest:.2f} s "
        f"too_many_members={longest:.1f} s memory={memory:.0f} MB"
    )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
