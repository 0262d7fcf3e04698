"""Causes that lie in the data: it is slow to read, read by too few workers, or by workers that begin anew each time."""

from __future__ import annotations

from halfstep.measure.profiling import typed
from halfstep.measure.profiling.cause import NOTICEABLE, Cause
from halfstep.measure.profiling.facts import Facts, Feeding
from halfstep.measure.profiling.words import count, duration


def slow_data(facts: Facts) -> Cause | None:
    """Even at best reading takes clearly longer than computing."""
    feeding = facts.feeding
    if feeding is None or not feeding.outlasts_computing:
        return None
    evidence = (
        f"a step waits {duration(feeding.wait)} of {duration(feeding.step)} for its batch; {_reading(feeding)}; "
        f"at best {count(feeding.most_workers, 'worker')} on {count(feeding.cores, 'core')} would need "
        f"{duration(feeding.at_best)} a step, and computing takes {duration(feeding.computing)}"
    )
    return Cause(
        "slow-data",
        f"waiting for data takes {feeding.wait_share:.0%} of a step, and no number of workers can hide it",
        evidence,
        "make a sample cheaper to read: see where reading spends its time",
        typed.reading(facts),
        feeding.wait_share,
    )


def too_few_workers(facts: Facts) -> Cause | None:
    """More of them would feed it."""
    feeding = facts.feeding
    if feeding is None or feeding.step <= 0 or feeding.outlasts_computing or feeding.workers_needed <= feeding.workers:
        return None
    workers = count(feeding.workers_needed, "worker")
    evidence = (
        f"a step waits {duration(feeding.wait)} of {duration(feeding.step)} for its batch with "
        f"{count(feeding.workers, 'worker')}; {_reading(feeding)}, and computing on it {duration(feeding.computing)}"
    )
    return Cause(
        "too-few-workers",
        f"waiting for data takes {feeding.wait_share:.0%} of a step: {workers} would hide most of it",
        evidence,
        f"read with {workers}" + (f": DataLoader(..., num_workers={feeding.workers_needed})" if facts.own_code else ""),
        typed.changed(facts, f"train.num_workers={feeding.workers_needed}"),
        min(feeding.wait_share, (feeding.step - feeding.at_best) / feeding.step),
    )


def restarted_workers(facts: Facts) -> Cause | None:
    """Each pass over the data begins with processes that have to start first."""
    feeding = facts.feeding
    if feeding is None or feeding.restarting <= 0:
        return None
    share = feeding.restarting / (feeding.step + feeding.restarting)
    return Cause(
        "restarted-workers",
        f"starting workers anew for each pass over the data takes {share:.0%} of the time",
        f"the first batch of a pass comes late: that is {duration(feeding.restarting)} for each step, "
        f"and a step itself takes {duration(feeding.step)}",
        "keep them: DataLoader(..., persistent_workers=True)" if facts.own_code else "read with fewer workers",
        typed.again(facts) if facts.own_code else typed.changed(facts, f"train.num_workers={feeding.workers // 2}"),
        share,
    )


def unexplained(facts: Facts) -> Cause | None:
    """Steps wait although there are workers enough."""
    feeding = facts.feeding
    if feeding is None or not feeding.wait_share >= NOTICEABLE:
        return None
    return Cause(
        "no-cause",
        f"waiting for data takes {feeding.wait_share:.0%} of a step, though {count(feeding.workers, 'worker')} "
        "should be enough",
        _reading(feeding),
        "see where reading spends its time",
        typed.reading(facts),
        feeding.wait_share,
    )


def _reading(feeding: Feeding) -> str:
    return (
        f"reading a batch takes {duration(feeding.read)} in one process, {duration(feeding.read_cpu)} of it computing"
    )
