"""The first steps, one by one: how long each takes, and whether torch compiles anew in each of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from halfstep.measure.profiling.facts import Warming
from halfstep.measure.stopwatch import Stopwatch
from halfstep.measure.timing import STABLE

_MOST, _LEAST = 8, 3
_LONGEST_REASON = 160


class Compilations:
    """What torch has compiled so far. Asking costs nothing where nothing was compiled: Dynamo is not loaded then."""

    def __init__(self) -> None:
        self._last = _last(_records())

    def since(self) -> tuple[int, float, str]:
        """Graphs compiled since this was last asked, seconds spent on it, and why it was done again."""
        records = _records()
        # torch keeps the last few only: a place in the list means nothing, the record itself does.
        known = [place for place, record in enumerate(records) if record is self._last]
        new = records[known[0] + 1 :] if known else records
        self._last = _last(records)
        reasons = [record.recompile_reason for record in new if record.recompile_reason]
        return len(new), sum(record.duration_us or 0 for record in new) / 1e6, _short(reasons[-1]) if reasons else ""


def first_steps(step: Callable[[], object], stopwatch: Stopwatch, seconds: float) -> Warming:
    """Step until times agree and nothing is compiled any more, or until the time is up."""
    deadline = time.perf_counter() + seconds
    compilations = Compilations()
    rows: list[tuple[float, int, float]] = []
    reason = ""
    while len(rows) < _MOST:
        took = stopwatch.seconds(step)
        count, compiling, why = compilations.since()
        rows.append((took, count, min(compiling, took)))
        reason = why or reason
        if len(rows) >= _LEAST and (_settled(rows[-_LEAST:]) or time.perf_counter() >= deadline):
            break
    times, counts, compiling_times = zip(*rows, strict=True)
    return Warming(times, counts, compiling_times, reason)


def _settled(rows: list[tuple[float, int, float]]) -> bool:
    times = [took for took, _, _ in rows]
    return not any(count for _, count, _ in rows) and max(times) - min(times) <= STABLE * max(times)


def _records() -> list[Any]:
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _last(records: list[Any]) -> Any:
    return records[-1] if records else None


def _short(reason: str) -> str:
    """The condition that failed, without the advice that torch puts behind it."""
    return reason.split("#")[0].split("(HINT")[0].strip()[:_LONGEST_REASON]
