"""The closed list of causes. Each is found from facts alone, says how much of a step it explains, and what to type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.measure.profiling import typed
from halfstep.measure.profiling.facts import HOST, NARROW, WIDE, Facts, Misaligned, Warming

NOTICEABLE = 0.10
"""The least share of a step that a cause must explain to be named."""
CLEARLY_FASTER = 1.2
_HOST_BOUND = 0.4
_OFTEN = 0.5
_HIDDEN = 0.2
"""The most of a step that may go on waiting if the data is said to be hidden behind it."""
_UNKNOWN_GAIN = 2.0
"""How much faster than fp32 matrix work is in a narrow format, where there was none to compare."""
_NAMED = 4


@dataclass(frozen=True)
class Cause:
    """Why there is no speed-up, or that nothing is wrong."""

    id: str
    sentence: str
    evidence: str
    do: str
    """What to change."""
    command: str
    """What to type, now or after the change."""
    share: float
    """Of a step's time, what it explains."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def slow_data(facts: Facts) -> Cause | None:
    """Even all cores could not feed it."""
    feeding = facts.feeding
    if feeding is None or too_few_workers(facts) is not None:
        return None
    evidence = (
        f"a step waits {_ms(feeding.wait)} of {_ms(feeding.step)} for its batch; reading one takes {_ms(feeding.read)} "
        f"in one process, and {feeding.cores} cores together would still need {_ms(feeding.at_best)} a step"
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
    if feeding is None or feeding.step <= 0 or feeding.workers_needed <= feeding.workers:
        return None
    computing = feeding.step - feeding.wait
    if computing < (1 - _HIDDEN) * feeding.at_best:
        return None
    gained = (feeding.step - feeding.at_best) / feeding.step
    needed = feeding.workers_needed
    evidence = (
        f"a step waits {_ms(feeding.wait)} of {_ms(feeding.step)} for its batch with "
        f"{_count(feeding.workers, 'worker')}; reading one takes {_ms(feeding.read)} in one process "
        f"and computing on it {_ms(feeding.step - feeding.wait)}"
    )
    return Cause(
        "too-few-workers",
        f"waiting for data takes {feeding.wait_share:.0%} of a step: {_count(needed, 'worker')} would hide most of it",
        evidence,
        f"read with {_count(needed, 'worker')}"
        + ("" if not facts.own_code else f": DataLoader(..., num_workers={needed})"),
        typed.changed(facts, f"train.num_workers={needed}"),
        gained,
    )


def tiny_model(facts: Facts) -> Cause | None:
    """The program takes longer to ask for work than the device to do it."""
    share = facts.shares.get(HOST, 0.0)
    # A compiled step was profiled as it was written, which says nothing of how it runs.
    if share < _HOST_BOUND * (1 - facts.waiting) or facts.compiles:
        return None
    return Cause(
        "tiny-model",
        f"{share:.0%} of a step is Python and dispatch: there is too little arithmetic in it for a precision to matter",
        f"operations that do real work take {1 - share - facts.waiting:.0%} of a step",
        "give each step more to do (a larger batch), or compile it, or stay in fp32",
        typed.planned(facts),
        share,
    )


def misaligned_channels(facts: Facts) -> Cause | None:
    """Padded layers were measured to be faster."""
    slow = [layer for layer in facts.misaligned if layer.saved > 0]
    if not slow or facts.race is None or facts.race.asked <= 0:
        return None
    share = sum(_padding_saves(facts, layer) for layer in slow) * (1 - facts.waiting)
    names = [name for layer in slow for name in layer.names]
    worst = max(slow, key=lambda layer: layer.saved)
    evidence = (
        f"layers {_listed(names)}: {worst.channels} takes {_ms(worst.seconds)}, {worst.padded} takes "
        f"{_ms(worst.padded_seconds)} ({worst.low:.2f}-{worst.high:.2f}x); "
        f"{sum(layer.flops_share for layer in slow):.0%} of the FLOPs are in such layers"
    )
    return Cause(
        "misaligned-channels",
        f"channels that are no multiple of 8 cost {share:.0%} of a step",
        evidence,
        f"give {_listed(list(worst.names))} {worst.padded} channels instead of {worst.channels}",
        typed.again(facts),
        share,
    )


def fp32_island(facts: Facts) -> Cause | None:
    """A large part of the work was not done in the format that was asked for."""
    if not facts.narrow or facts.work is None or facts.kernels is None or facts.work.wide_share < NOTICEABLE:
        return None
    # All of fp32's matrix time would become this much shorter.
    share = facts.shares.get(WIDE, 0.0) * (1 - 1 / _narrow_gain(facts))
    modules = list(facts.work.wide)
    declared = [name for name in modules if name in facts.work.islands]
    do = (
        f"take island() away from {_listed(declared)}"
        if declared
        else "take out what casts or switches autocast off there"
    )
    return Cause(
        "fp32-island",
        f"{facts.work.wide_share:.0%} of the matrix work still runs in fp32, in {_listed(modules)}",
        f"fp32 products take {facts.shares.get(WIDE, 0.0):.0%} of a step, those in {facts.format} "
        f"{facts.shares.get(NARROW, 0.0):.0%}",
        f"{do}, or make it smaller",
        typed.again(facts),
        share,
    )


def tf32_baseline(facts: Facts) -> Cause | None:
    """What the person compares with is not fp32."""
    race = facts.race
    if race is None or race.own_fp32 is None or race.fp32 <= 0:
        return None
    share = (1 - race.own_fp32 / race.fp32) * (1 - facts.waiting)
    return Cause(
        "tf32-baseline",
        f"the fp32 you compare with is not fp32: torch's switches make it {facts.fp32_means}, "
        f"which is {race.fp32 / race.own_fp32:.2f}x as fast already",
        f"a step takes {_ms(race.fp32)} in strict fp32, {_ms(race.own_fp32)} in fp32 as this code sets it, and "
        f"{_ms(race.asked)} in {facts.asked}: "
        f"{race.speedup:.2f}x of strict fp32, {race.own_fp32 / race.asked:.2f}x of yours",
        "compare with strict fp32, or take the gain that you have",
        typed.benched(facts),
        share,
    )


def reference_kernels(facts: Facts) -> Cause | None:
    """A loop that was written to be right, not fast."""
    if facts.native or facts.kind != "cpu" or facts.race is None or facts.kernels is None:
        return None
    if facts.kernels.convolutions < NOTICEABLE or facts.race.low >= 1:
        return None
    return Cause(
        "reference-kernels",
        f"convolutions in {facts.format} have no fast kernel on this device: a step takes "
        f"{facts.race.asked / facts.race.fp32:.1f} times as long as in fp32",
        f"{facts.kernels.convolutions:.0%} of a step is convolutions in {facts.format}; {facts.why}",
        f"compute in {facts.instead}",
        typed.in_precision(facts, facts.instead),
        (1 - facts.race.fp32 / facts.race.asked) * (1 - facts.waiting),
    )


def recompiling(facts: Facts) -> Cause | None:
    """torch compiles in every step what it compiled in the one before."""
    found = [one for one in (facts.warming, facts.feeding.warming if facts.feeding else None) if one is not None]
    worst = max(found, key=_compiling_share, default=None)
    if worst is None or _compiling_share(worst) == 0:
        return None
    share = _compiling_share(worst)
    steps = worst.compiled[2:]
    often = sum(1 for count in steps if count)
    return Cause(
        "recompiling",
        f"torch compiles again in {often} of {len(steps)} steps, which takes {share:.0%} of them",
        f"it was compiled again because {worst.reason or 'a guard failed'} no longer held",
        "keep shapes and numbers the same from step to step, mark them dynamic, or do not compile",
        typed.changed(facts, "train.compile=false"),
        share,
    )


def emulated(facts: Facts) -> Cause | None:
    """The device has no such arithmetic."""
    if facts.native or not facts.narrow or reference_kernels(facts) is not None:
        return None
    if not facts.passed_over and (facts.race is None or facts.race.speedup >= CLEARLY_FASTER):
        return None
    share = 1.0 if facts.race is None else max(0.0, 1 - facts.race.fp32 / facts.race.asked) * (1 - facts.waiting)
    return Cause(
        "emulated",
        f"this device does not compute in {facts.format}: it is emulated, and cannot be faster than fp32",
        facts.why,
        f"compute in {facts.instead}",
        typed.in_precision(facts, facts.instead),
        share,
    )


CAUSES: tuple[Callable[[Facts], Cause | None], ...] = (
    recompiling,
    too_few_workers,
    slow_data,
    emulated,
    reference_kernels,
    tf32_baseline,
    fp32_island,
    misaligned_channels,
    tiny_model,
)
"""In the order in which they win where two explain the same."""


def found(facts: Facts) -> list[Cause]:
    """All causes that explain enough to be worth mending, most first."""
    named = [cause for one in CAUSES if (cause := one(facts)) is not None and cause.share >= NOTICEABLE]
    return sorted(named, key=lambda cause: -cause.share)


def _padding_saves(facts: Facts, layer: Misaligned) -> float:
    """Share of a step on a fixed batch. Never more than what matrix work takes in it at all."""
    assert facts.race is not None
    alone = layer.saved / facts.race.asked
    if facts.kernels is None or layer.seconds <= 0:
        return min(1.0, alone)
    return facts.kernels.matrix * layer.flops_share * (1 - layer.padded_seconds / layer.seconds)


def _narrow_gain(facts: Facts) -> float:
    """How many times faster a FLOP is in the narrow format, as far as the two steps tell."""
    work, race = facts.work, facts.race
    if work is None or race is None or facts.kernels is None or facts.fp32_kernels is None:
        return _UNKNOWN_GAIN
    narrow = work.total - sum(work.wide.values())
    seconds = facts.kernels.shares.get(NARROW, 0.0) * race.asked
    strict = facts.fp32_kernels.matrix * race.fp32
    if narrow < NOTICEABLE * work.total or seconds <= 0 or strict <= 0:
        return _UNKNOWN_GAIN
    gain = (narrow / seconds) / (work.total / strict)
    return gain if math.isfinite(gain) and gain > 1 else _UNKNOWN_GAIN


def _compiling_share(warming: Warming) -> float:
    """Of the steps after the second; 0 where torch has done compiling by then."""
    counts, seconds, compiling = warming.compiled[2:], warming.seconds[2:], warming.compiling[2:]
    if not counts or sum(1 for count in counts if count) < _OFTEN * len(counts):
        return 0.0
    return sum(compiling) / sum(seconds) if sum(seconds) > 0 else 0.0


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
