"""Time as ratios: paired, interleaved, in alternating order, with the noise printed beside them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

FEWEST_FOR_INTERVAL = 6
"""Values: the range of six holds the median with 97 %, that of five with 94 %."""


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


def interleaved(timers: Mapping[str, Callable[[], float]], turns: int) -> Iterator[dict[str, float]]:
    """Ask every timer once a turn, in an order that is turned round each time, and give each turn's times."""
    for turn in range(turns):
        yield {name: timers[name]() for name in order(list(timers), turn)}


def order(names: Sequence[str], turn: int) -> list[str]:
    """In which they are asked in this turn: another one begins after every two, and the second goes backwards."""
    shift = turn // 2 % len(names)
    shifted = [*names[shift:], *names[:shift]]
    return shifted[::-1] if turn % 2 else shifted


def ratios(
    arms: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    pairs: int = 60,
    calls: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Ratio]:
    """Measure every arm against the baseline; each round times all arms, starting with another one."""
    timers = {name: partial(seconds, arm, calls) for name, arm in arms.items()}
    rounds = []
    for times in interleaved(timers, pairs):
        rounds.append(times)
        if progress is not None:
            progress(len(rounds), pairs)
    base = [times[baseline] for times in rounds]
    return {name: _compare([times[name] for times in rounds], base) for name in arms if name != baseline}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, by order alone.

    Of fewer values than `FEWEST_FOR_INTERVAL` it is all of their range, which holds the median less surely.
    """
    each = sorted(values)
    cut = max(0, math.floor(len(each) / 2 - 0.98 * math.sqrt(len(each))))
    return each[cut], each[-1 - cut]


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
