"""Train on several ranks next to busy processes, without any other disturbance: does every rank end with 0?

    python -m benchmarks.busy_ranks [--runs 30] [--busy 2] [--record]

The runs are divided among DDP and FSDP, on two and on four ranks. So many Python processes per core compute meanwhile
that each rank waits for its turn, and its collectives come late. All runs of one mode must have the same losses and the
same weights, to the bit. `--record` keeps the result in benchmarks/busy_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.rank_kills import Launch, Mode, _ending
from halfstep.measure.conditions import collect_conditions, describe_conditions

RECORD = Path(__file__).with_suffix(".json")
LONGEST = 900.0
MODES = (Mode("ddp", 2, 0.25), Mode("fsdp", 2, 0.25), Mode("ddp", 4, 0.25), Mode("fsdp", 4, 0.25))


@dataclass
class Row:
    """What was counted of one mode."""

    mode: str
    ranks: int
    runs: int
    codes: dict[str, int]
    """How many ranks ended with each exit code."""
    endings: int
    """Different ends of runs: 1 where all have the same bits."""
    longest: float
    """Seconds of the slowest run."""

    @property
    def held(self) -> bool:
        """Whether every rank ended with 0, and all runs with the same bits."""
        return self.codes == {"0": self.runs * self.ranks} and self.endings == 1


def _compute() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many Python processes that compute until the end of the context."""
    processes = [multiprocessing.get_context("fork").Process(target=_compute, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_mode(mode: Mode, runs: int, folder: Path) -> Row:
    """Train so many times, and count how the ranks end."""
    codes: Counter[str] = Counter()
    endings, longest = set(), 0.0
    for number in range(runs):
        run, began = folder / f"run-{number}", time.monotonic()
        launch = Launch(mode, run)
        if not launch.ended_within(LONGEST):
            launch.send(launch.running(), signal.SIGKILL)
            launch.ended_within(10.0)
        longest = max(longest, time.monotonic() - began)
        codes.update(str(code) for code in launch.codes.values())
        if set(launch.codes.values()) == {0}:
            endings.add(json.dumps(_ending(run)))
        else:
            print("".join(f"\n{run.name}-{rank}: {_last_lines(run, rank)}" for rank in range(mode.ranks)))
        print(f"{mode.name} on {mode.ranks} ranks: run {number + 1} of {runs}, codes {dict(codes)}", flush=True)
    return Row(mode.name, mode.ranks, runs, dict(codes), len(endings), round(longest, 1))


def _last_lines(run: Path, rank: int) -> str:
    return Path(f"{run}-{rank}.log").read_text(errors="replace")[-600:]


def main() -> None:
    """Train, print one table, and exit with 1 where a rank did not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--busy", type=int, default=2, help="busy processes per core")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, busy_processes(asked.busy * (os.cpu_count() or 1)):
        for number, mode in enumerate(MODES):
            own = Path(folder) / f"{mode.name}-{mode.ranks}"
            own.mkdir()
            runs = asked.runs // len(MODES) + (number < asked.runs % len(MODES))
            rows.append(run_mode(mode, runs, own))
        conditions = collect_conditions()
    print(describe_conditions(conditions))
    failed = sum(count for row in rows for code, count in row.codes.items() if code != "0")
    runs = sum(row.runs for row in rows)
    print(f"busy_ranks runs={runs} failed={failed} longest={max(row.longest for row in rows)}")
    if asked.record:
        command = f"python -m benchmarks.busy_ranks --record --runs {asked.runs} --busy {asked.busy}"
        content = {
            "command": command,
            "conditions": conditions,
            "failed": failed,
            "rows": [asdict(row) for row in rows],
        }
        RECORD.write_text(json.dumps(content, indent=1) + "\n")
    if not all(row.held for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
