"""Time the same steps with the code of two checkouts, call by call in turns, each checkout in a process of its own.

Both run the benchmark of this checkout; only `halfstep` differs, whose `src` comes first on the path. A third process
runs the other checkout once more: `aa` is that checkout against itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from halfstep import clock

PAIRS, SLOW, SLOW_PAIRS = 120, 5.0, 24
"""Pairs of a comparison, and those of steps that take more seconds than `SLOW`."""
WARM_UP = 3
OWN = Path(__file__).parents[1]
WORKER = "--timed-by-another-process"

Make = Callable[[], Callable[[], object]]


class Comparison(NamedTuple):
    """The time of a step in this checkout relative to the other, and that of the other relative to itself."""

    new: clock.TimeRatio
    aa: clock.TimeRatio


class Worker:
    """A process that runs a benchmark's steps with the code of one checkout, and times them when asked."""

    def __init__(self, script: str, checkout: Path, options: list[str]) -> None:
        source = checkout / "src"
        if not (source / "halfstep" / "__init__.py").is_file():
            raise SystemExit(f"--against {checkout}: no src/halfstep in it")
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, script, WORKER, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        found = Path(self._answer())
        if not found.is_relative_to(source.resolve()):
            raise SystemExit(f"halfstep came from {found}, not from {source}")

    def seconds(self, arm: str, calls: int) -> float:
        """Return the seconds of a call of an arm, averaged over some."""
        print(json.dumps([arm, calls]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}; its error is above")
        return line.strip()


def answer(arms: Mapping[str, Make]) -> None:
    """Time arms as the other process asks, until it has no more questions; an arm is built when it is first named."""
    import halfstep

    # What a step prints must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    print(Path(halfstep.__file__ or "").resolve(), file=answers, flush=True)
    built: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        arm, calls = json.loads(line)
        if arm not in built:
            built.clear()  # one model at a time
            built[arm] = arms[arm]()
        print(clock.measure_call_seconds(built[arm], calls), file=answers, flush=True)


def compare(
    script: str, other: Path, arms: Mapping[str, int], pairs: int | None, options: list[str]
) -> dict[str, Comparison]:
    """Return the comparison of each arm, whose calls are averaged for one time; stderr has it at once."""
    places = {"old": other, "new": OWN, "aa": other}
    workers = {name: Worker(script, place, options) for name, place in places.items()}
    found = {}
    for arm, calls in arms.items():
        timers = {name: partial(worker.seconds, arm, calls) for name, worker in workers.items()}
        # The first calls build the arm and allocate.
        step = min(timer() for timer in timers.values() for _ in range(WARM_UP))
        turns = pairs or (SLOW_PAIRS if step > SLOW else PAIRS)
        rounds = list(clock.iterate_interleaved_times(timers, turns))
        times = {name: [each[name] for each in rounds] for name in timers}
        new, aa = (clock.compare_paired_times(times[name], times["old"]) for name in ("new", "aa"))
        found[arm] = Comparison(new, aa)
        print(_line(arm, found[arm]), file=sys.stderr, flush=True)
    for worker in workers.values():
        worker.close()
    return found


def as_dict(found: Mapping[str, Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """Return a comparison as plain data."""
    return {arm: {"new": asdict(one.new), "aa": asdict(one.aa)} for arm, one in found.items()}


def _line(arm: str, one: Comparison) -> str:
    new, aa = (f"{each.median:.4f} (10-90 %: {each.low:.4f}-{each.high:.4f})" for each in one)
    return f"{arm:17s} new/old {new} aa {aa} {one.new.pairs} pairs, {one.new.added_seconds * 1e6:+.1f} us a step"


def in_one_line(found: Mapping[str, Comparison]) -> str:
    """Return all ratios of a comparison on one line."""
    words = (f"{arm}: new/old={one.new.median:.4f} aa={one.aa.median:.4f}" for arm, one in found.items())
    return "; ".join(words)
