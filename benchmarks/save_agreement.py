"""What the agreement of a save costs: through the store to rank 0, and through a gloo group of all ranks.

    python benchmarks/save_agreement.py [--ranks 4 32 64 128] [--bytes 300] [--times 5] [--record]

Forked ranks on one machine, each with a client of one store. `store` is what a save does now: two decisions, in each of
which every rank sends a text to rank 0, and one answer comes back (`halfstep.distributed.RankGroup`). `gloo` is what it
did before: four times, every rank got the texts of all, in two all-reduces. Seconds are from the first rank's call to
the last rank's return, the median of `--times`, behind a barrier of its own. The ranks share the cores of this machine,
so a real cluster is faster in both; what grows with the ranks is the point. `--record` keeps it next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from halfstep import distributed

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the rig of forked ranks can be imported by name

from tests.support.ranks import Ranks

RECORD = Path(__file__).with_suffix(".json")
LONGEST = 240.0


def through_store(text: str, party: distributed.RankGroup) -> None:
    for _ in range(2):
        party.decide(text, lambda texts: str(len(texts)))


def through_gloo(text: str, group: Any) -> None:
    with distributed.use_process_group(group):
        for _ in range(4):
            distributed.gather_texts(text)


def spans(work: Callable[[], None], times: int) -> list[tuple[float, float]]:
    """Return begin and end of each call on this rank; CLOCK_MONOTONIC is one for all processes of a machine."""
    work()
    found = []
    for _ in range(times):
        dist.barrier()
        began = time.monotonic()
        work()
        found.append((began, time.monotonic()))
    return found


def on_rank(rank: int, bytes_each: int, times: int) -> dict[str, Any]:
    began = time.monotonic()
    group = dist.new_group(backend="gloo")
    opened = time.monotonic() - began
    text, party = "x" * bytes_each, distributed.RankGroup()
    store = spans(lambda: through_store(text, party), times)
    return {"store": store, "gloo": spans(lambda: through_gloo(text, group), times), "opened": opened}


def measured(size: int, given: argparse.Namespace) -> dict[str, float]:
    ranks = Ranks(size, deadline=LONGEST)
    try:
        told = ranks(on_rank, given.bytes, given.times)
    finally:
        ranks.stop()
    return {"store": longest(told, "store"), "gloo": longest(told, "gloo"), "open": max(one["opened"] for one in told)}


def longest(told: list[dict[str, Any]], name: str) -> float:
    calls = zip(*(one[name] for one in told), strict=True)
    return statistics.median(max(end for _, end in call) - min(begin for begin, _ in call) for call in calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 32, 64, 128])
    parser.add_argument("--bytes", type=int, default=300, help="of each rank's text: two files with their digests")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    found = {}
    for size in given.ranks:
        found[size] = {name: round(seconds, 4) for name, seconds in measured(size, given).items()}
        print(f"{size:>4} ranks: {found[size]}", file=sys.stderr)
    if given.record:
        content = {"command": " ".join(["python", *sys.argv]), "bytes": given.bytes, "seconds": found}
        RECORD.write_text(json.dumps({**content, "cores": os.cpu_count()}, indent=1) + "\n")
    most = found[max(given.ranks)]
    print(f"save_agreement ranks={max(given.ranks)} store={most['store']:.3f}s gloo={most['gloo']:.3f}s")


if __name__ == "__main__":
    main()
