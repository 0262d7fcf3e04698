"""Intervals of medians, and time without a core."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from halfstep import clock


@pytest.mark.parametrize("count", range(clock.FEWEST_FOR_INTERVAL, 120))
def test_the_interval_of_a_median_contains_it_in_95_percent_of_cases(count: int) -> None:
    low, high = clock.compute_median_interval([float(value) for value in range(count)])
    below = int(low)
    assert high == count - 1 - below
    # The median is outside if at most `below` of the values lie on one side of it.
    outside = 2 * sum(math.comb(count, values) for values in range(below + 1)) / 2**count
    assert outside <= 0.05


def _compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not count it")
def test_time_without_a_core_is_told_from_time_without_work() -> None:
    before = clock.read_queued_seconds()
    time.sleep(0.1)
    asleep = clock.read_queued_seconds() - before
    core = min(os.sched_getaffinity(0))
    others = [multiprocessing.get_context("fork").Process(target=_compute, args=(0.3,)) for _ in range(2)]
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        for other in others:
            other.start()
        before = clock.read_queued_seconds()
        _compute(0.1)
        crowded = clock.read_queued_seconds() - before
    finally:
        os.sched_setaffinity(0, mine)
        for other in others:
            other.join()
    assert crowded > 0.05, "three processes shared a core"
    assert crowded > asleep
