"""Time as ratios: paired, interleaved, in alternating order, with the noise printed beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How one arm compares with the baseline, pair by pair."""

    median: float
    low: float
    high: float
    pairs: int
    added_seconds: float
    """Median of the paired differences: what one call costs more than the baseline's."""


def seconds(call: Callable[[], object], calls: int) -> float:
    """Wall time of one call, averaged over `calls` of them in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def ratios(
    arms: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    pairs: int = 60,
    calls: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Ratio]:
    """Measure every arm against the baseline; each round times all arms, starting with another one."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(pairs):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 else reversed(order):
            times[name].append(seconds(arms[name], calls))
        if progress is not None:
            progress(turn + 1, pairs)
    return {name: _compare(times[name], times[baseline]) for name in names if name != baseline}


def _compare(arm: list[float], base: list[float]) -> Ratio:
    each = sorted(a / b for a, b in zip(arm, base, strict=True))
    tail = len(each) // 10
    return Ratio(
        median=statistics.median(each),
        low=each[tail],
        high=each[-1 - tail],
        pairs=len(each),
        added_seconds=statistics.median(a - b for a, b in zip(arm, base, strict=True)),
    )
