"""The closed list of causes. Each is found from facts alone, says how much of a step it explains, and what to type."""

from __future__ import annotations

import math
from collections.abc import Callable

from halfstep.measure.profiling import typed
from halfstep.measure.profiling.cause import NOTICEABLE, Cause
from halfstep.measure.profiling.facts import HOST, NARROW, WIDE, Facts, Misaligned, Warming
from halfstep.measure.profiling.waiting import restarted_workers, slow_data, too_few_workers
from halfstep.measure.profiling.words import count, duration, layers, listed

CLEARLY_FASTER = 1.2
_HOST_BOUND = 0.4
_OFTEN = 0.5
_UNKNOWN_GAIN = 2.0
"""How much faster than fp32 matrix work is in a narrow format, where there was none to compare."""


def tiny_model(facts: Facts) -> Cause | None:
    """The program takes longer to ask for work than the device to do it."""
    host = facts.kernels.shares.get(HOST, 0.0) if facts.kernels else 0.0
    # A compiled step was profiled as it was written, which says nothing of how it runs.
    if host < _HOST_BOUND or facts.compiles:
        return None
    return Cause(
        "tiny-model",
        f"{host:.0%} of computing a step is Python and dispatch: there is too little arithmetic in it for a precision "
        "to matter",
        f"operations that do real work take {1 - host:.0%} of computing a step",
        "give each step more to do (a larger batch), or compile it, or stay in fp32",
        typed.grown(facts),
        host * (1 - facts.waiting),
    )


def misaligned_channels(facts: Facts) -> Cause | None:
    """Padded layers were measured to be faster."""
    slow = [layer for layer in facts.misaligned if layer.saved > 0]
    if not slow or facts.race is None or facts.race.asked <= 0:
        return None
    share = sum(_padding_saves(facts, layer) for layer in slow) * (1 - facts.waiting)
    worst = max(slow, key=lambda layer: layer.saved)
    evidence = (
        f"{'; '.join(layers(layer.names, layer.kind) for layer in slow)}: {worst.channels} takes "
        f"{duration(worst.seconds)}, {worst.padded} takes "
        f"{duration(worst.padded_seconds)} ({worst.low:.2f}-{worst.high:.2f}x); "
        f"{sum(layer.flops_share for layer in slow):.0%} of the FLOPs are in such layers"
    )
    return Cause(
        "misaligned-channels",
        f"channels that are no multiple of 8 cost {share:.0%} of a step",
        evidence,
        f"give {layers(worst.names, worst.kind)} {worst.padded} channels instead of {worst.channels}",
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
        f"take island() away from {listed(declared)}"
        if declared
        else "take out what casts or switches autocast off there"
    )
    return Cause(
        "fp32-island",
        f"{facts.work.wide_share:.0%} of the matrix work still runs in fp32, in {listed(modules)}",
        f"fp32 products take {facts.shares.get(WIDE, 0.0):.0%} of a step, those in {facts.format} "
        f"{facts.shares.get(NARROW, 0.0):.0%}",
        f"{do}, or make it smaller",
        typed.again(facts),
        share,
    )


def tf32_baseline(facts: Facts) -> Cause | None:
    """What the person compares with is not fp32."""
    race = facts.speed
    if race is None or race.own_fp32 is None or race.fp32 <= 0 or race.own_fp32 <= 0:
        return None
    share = (1 - race.own_fp32 / race.fp32) * (1 - facts.waiting)
    return Cause(
        "tf32-baseline",
        f"the fp32 you compare with is not fp32: torch's switches make it {facts.fp32_means}, "
        f"which is {race.fp32 / race.own_fp32:.2f}x as fast already",
        f"a step takes {duration(race.fp32)} in strict fp32, {duration(race.own_fp32)} in fp32 as this code sets it, "
        f"and {duration(race.asked)} in {facts.asked}: "
        f"{race.speedup:.2f}x of strict fp32, {race.own_fp32 / race.asked:.2f}x of yours",
        "compare with strict fp32, or take the gain that you have",
        typed.benched(facts),
        share,
    )


def reference_kernels(facts: Facts) -> Cause | None:
    """A loop that was written to be right, not fast."""
    race = facts.speed
    if facts.native or facts.kind != "cpu" or race is None or facts.kernels is None:
        return None
    if facts.kernels.convolutions < NOTICEABLE or race.low >= 1:
        return None
    return Cause(
        "reference-kernels",
        f"convolutions in {facts.format} have no fast kernel on this device: a step takes "
        f"{race.asked / race.fp32:.1f} times as long as in fp32",
        f"{facts.kernels.convolutions:.0%} of a step is convolutions in {facts.format}; {facts.why}",
        f"compute in {facts.instead}",
        typed.in_precision(facts, facts.instead),
        (1 - race.fp32 / race.asked) * (1 - facts.waiting),
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
        f"torch compiles again in {often} of {count(len(steps), 'step')}, which takes {share:.0%} of them",
        f"it was compiled again because {worst.reason or 'a guard failed'} no longer held",
        "keep shapes and numbers the same from step to step, mark them dynamic, or do not compile",
        typed.changed(facts, "train.compile=false"),
        share,
    )


def emulated(facts: Facts) -> Cause | None:
    """The device has no such arithmetic."""
    if facts.native or not facts.narrow or reference_kernels(facts) is not None:
        return None
    race = facts.speed
    if not facts.passed_over and (race is None or race.speedup >= CLEARLY_FASTER):
        return None
    share = 1.0 if race is None else max(0.0, 1 - race.fp32 / race.asked) * (1 - facts.waiting)
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
    restarted_workers,
    emulated,
    reference_kernels,
    tf32_baseline,
    fp32_island,
    misaligned_channels,
    tiny_model,
)
"""In the order in which they win where two explain the same."""


def found(facts: Facts) -> list[Cause]:
    """All causes that explain enough to be worth mending, most first; none of steps that did not train."""
    if facts.idle:
        return []
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
