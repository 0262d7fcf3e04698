"""The closed list of causes. Each is found from facts alone and has a share of a step and a command."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.profile import next_command
from halfstep.measure.profile.facts import (
    ANOMALY,
    COPIES,
    HOST,
    NARROW,
    PARTS,
    THREADS,
    UPDATE,
    WIDE,
    Feeding,
    MisalignedLayer,
    ProfileFacts,
    StepTimes,
    Warming,
)
from halfstep.measure.profile.next_command import format_layer_names, format_module_names
from halfstep.numbers import format_counted_noun, format_duration

NOTICEABLE = 0.10
"""The smallest share of a step that a cause must explain to be named."""


@dataclass(frozen=True)
class Cause:
    """Why there is no speed-up, or that nothing is wrong."""

    id: str
    sentence: str
    evidence: str
    do: str
    """The change to make."""
    command: str
    """The command to type, now or after the change."""
    share: float
    """Share of a step's time that it explains."""


def find_slow_data(facts: ProfileFacts) -> Cause | None:
    """Return the cause if reading takes clearly longer than computing even at best."""
    feeding = facts.feeding
    if feeding is None or not feeding.outlasts_computing:
        return None
    evidence = (
        f"a step waits {format_duration(feeding.wait)} of {format_duration(feeding.step)} for its batch; "
        f"{_describe_reading(feeding)}; "
        f"at best {format_counted_noun(feeding.most_workers, 'worker')} on "
        f"{format_counted_noun(feeding.cores, 'core')} would need "
        f"{format_duration(feeding.at_best)} a step, and computing takes {format_duration(feeding.computing)}"
    )
    return Cause(
        "slow-data",
        f"waiting for data takes {feeding.wait_share:.0%} of a step, and no number of workers can hide it",
        evidence,
        "make a sample cheaper to read: profile the reading of a sample",
        next_command.suggest_reading_profile(facts),
        feeding.wait_share,
    )


def find_too_few_workers(facts: ProfileFacts) -> Cause | None:
    """Return the cause if more workers would remove the wait."""
    feeding = facts.feeding
    if feeding is None or feeding.step <= 0 or feeding.outlasts_computing or feeding.workers_needed <= feeding.workers:
        return None
    workers = format_counted_noun(feeding.workers_needed, "worker")
    evidence = (
        f"a step waits {format_duration(feeding.wait)} of {format_duration(feeding.step)} for its batch with "
        f"{format_counted_noun(feeding.workers, 'worker')}; {_describe_reading(feeding)}, and computing on it "
        f"{format_duration(feeding.computing)}"
    )
    return Cause(
        "too-few-workers",
        f"waiting for data takes {feeding.wait_share:.0%} of a step: {workers} would hide most of it",
        evidence,
        f"read with {workers}" + (f": DataLoader(..., num_workers={feeding.workers_needed})" if facts.own_code else ""),
        next_command.suggest_train_setting(facts, f"train.num_workers={feeding.workers_needed}"),
        # At most what the workers would save, which may be less than the wait.
        min(feeding.wait_share, (feeding.step - feeding.at_best) / feeding.step),
    )


def find_restarted_workers(facts: ProfileFacts) -> Cause | None:
    """Return the cause if each pass over the data waits for worker processes to start."""
    feeding = facts.feeding
    if feeding is None or feeding.restarting <= 0:
        return None
    share = feeding.restarting / (feeding.step + feeding.restarting)
    return Cause(
        "restarted-workers",
        f"restarting workers for each pass over the data takes {share:.0%} of the time",
        f"the first batch of a pass comes late: that is {format_duration(feeding.restarting)} for each step, "
        f"and a step itself takes {format_duration(feeding.step)}",
        "keep them: DataLoader(..., persistent_workers=True)" if facts.own_code else "read with fewer workers",
        next_command.suggest_profile_again(facts)
        if facts.own_code
        else next_command.suggest_train_setting(facts, f"train.num_workers={feeding.workers // 2}"),
        share,
    )


def find_unexplained_wait(facts: ProfileFacts) -> Cause | None:
    """Return the cause if steps wait although there are enough workers."""
    feeding = facts.feeding
    if feeding is None or not feeding.wait_share >= NOTICEABLE:
        return None
    return Cause(
        "unexplained",
        f"waiting for data takes {feeding.wait_share:.0%} of a step, though "
        f"{format_counted_noun(feeding.workers, 'worker')} "
        "should be enough",
        _describe_reading(feeding),
        "profile the reading of a sample",
        next_command.suggest_reading_profile(facts),
        feeding.wait_share,
    )


def _describe_reading(feeding: Feeding) -> str:
    return (
        f"reading a batch takes {format_duration(feeding.read)} in one process, {format_duration(feeding.read_cpu)} "
        "of it computing"
    )


CLEARLY_FASTER = 1.2
_HOST_BOUND = 0.4
_DOMINANT = 0.3
"""The share of a step from which on one part of it is a cause by itself."""
_OFTEN = 0.5
_UNKNOWN_GAIN = 2.0
"""Assumed speed-up of matrix work in a narrow format, where there was none to compare."""


def find_tiny_model(facts: ProfileFacts) -> Cause | None:
    """Return the cause if the host takes longer to issue work than the device to do it."""
    host = facts.kernels.shares.get(HOST, 0.0) - sum(facts.kernels.code.values()) if facts.kernels else 0.0
    # A compiled step was profiled eagerly, which says nothing about how it runs.
    if host < _HOST_BOUND or facts.compiles:
        return None
    return Cause(
        "tiny-model",
        f"{host:.0%} of a step's compute time is Python and dispatch: the model does too little arithmetic for "
        "precision to matter",
        f"kernels take only {1 - host:.0%} of a step's compute time",
        "increase the batch size, compile the model, or stay in fp32",
        next_command.suggest_growing_plan(facts),
        host * (1 - facts.waiting),
    )


def find_misaligned_channels(facts: ProfileFacts) -> Cause | None:
    """Return the cause if padded layers were measured to be faster."""
    slow = [layer for layer in facts.misaligned if layer.saved > 0]
    if not slow or facts.race is None or facts.race.asked <= 0:
        return None
    share = sum(_estimate_padding_saving(facts, layer) for layer in slow) * (1 - facts.waiting)
    worst = max(slow, key=lambda layer: layer.saved)
    evidence = (
        f"{'; '.join(format_layer_names(layer.names, layer.kind) for layer in slow)}: {worst.channels} takes "
        f"{format_duration(worst.seconds)}, {worst.padded} takes "
        f"{format_duration(worst.padded_seconds)} ({worst.low:.2f}-{worst.high:.2f}x); "
        f"{sum(layer.flops_share for layer in slow):.0%} of the FLOPs are in such layers"
    )
    return Cause(
        "misaligned-channels",
        f"channels that are no multiple of 8 cost {share:.0%} of a step",
        evidence,
        f"give {format_layer_names(worst.names, worst.kind)} {worst.padded} channels instead of {worst.channels}",
        next_command.suggest_profile_again(facts),
        share,
    )


def find_fp32_island(facts: ProfileFacts) -> Cause | None:
    """Return the cause if much of the work was not done in the requested format."""
    if not facts.narrow or facts.work is None or facts.kernels is None or facts.work.wide_share < NOTICEABLE:
        return None
    # All of fp32's matrix time would shrink by this factor.
    share = facts.shares.get(WIDE, 0.0) * (1 - 1 / _estimate_narrow_gain(facts))
    modules = list(facts.work.wide)
    declared = [name for name in modules if name in facts.work.islands]
    do = (
        f"remove island() from {format_module_names(declared)}"
        if declared
        else "remove casts and autocast(enabled=False) there"
    )
    return Cause(
        "fp32-island",
        f"{facts.work.wide_share:.0%} of the matrix work still runs in fp32, in {format_module_names(modules)}",
        f"fp32 products take {facts.shares.get(WIDE, 0.0):.0%} of a step, those in {facts.format} "
        f"{facts.shares.get(NARROW, 0.0):.0%}",
        f"{do}, or make it smaller",
        next_command.suggest_profile_again(facts),
        share,
    )


def find_tf32_baseline(facts: ProfileFacts) -> Cause | None:
    """Return the cause if the user's fp32 baseline is not strict fp32."""
    race = facts.speed
    if race is None or race.own_fp32 is None or race.fp32 <= 0 or race.own_fp32 <= 0:
        return None
    share = (1 - race.own_fp32 / race.fp32) * (1 - facts.waiting)
    return Cause(
        "tf32-baseline",
        f"the fp32 you compare with is not fp32: torch's switches make it {facts.fp32_means}, "
        f"which is {race.fp32 / race.own_fp32:.2f}x as fast already",
        f"a step takes {format_duration(race.fp32)} in strict fp32, {format_duration(race.own_fp32)} in fp32 as this "
        "code sets it, "
        f"and {format_duration(race.asked)} in {facts.asked}: "
        f"{race.speedup:.2f}x of strict fp32, {race.own_fp32 / race.asked:.2f}x of yours",
        "compare with strict fp32, or keep the gain that you have",
        next_command.suggest_bench(facts),
        share,
    )


def find_reference_kernels(facts: ProfileFacts) -> Cause | None:
    """Return the cause if convolutions run in reference kernels, which are written for correctness, not speed."""
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
        next_command.suggest_other_precision(facts, facts.instead),
        (1 - race.fp32 / race.asked) * (1 - facts.waiting),
    )


def find_recompilation(facts: ProfileFacts) -> Cause | None:
    """Return the cause if torch recompiles in step after step."""
    found = [one for one in (facts.warming, facts.feeding.warming if facts.feeding else None) if one is not None]
    worst = max(found, key=_compute_compiling_share, default=None)
    if worst is None or _compute_compiling_share(worst) == 0:
        return None
    share = _compute_compiling_share(worst)
    steps = worst.compiled[2:]
    often = sum(1 for count in steps if count)
    return Cause(
        "recompiling",
        f"torch compiles again in {often} of {format_counted_noun(len(steps), 'step')}, which takes {share:.0%} of "
        "them",
        f"it was compiled again because {worst.reason or 'a guard failed'} no longer held",
        "keep shapes and numbers the same from step to step, mark them dynamic, or do not compile",
        next_command.suggest_train_setting(facts, "train.compile=false"),
        share,
    )


def find_emulated_format(facts: ProfileFacts) -> Cause | None:
    """Return the cause if the device does not compute in the format natively."""
    if facts.native or not facts.narrow or find_reference_kernels(facts) is not None:
        return None
    race = facts.speed
    if race is None or race.speedup >= CLEARLY_FASTER:
        return None
    return Cause(
        "emulated",
        f"this device does not compute in {facts.format}: it is emulated, and cannot be faster than fp32",
        facts.why,
        f"compute in {facts.instead}",
        next_command.suggest_other_precision(facts, facts.instead),
        max(0.0, 1 - race.fp32 / race.asked) * (1 - facts.waiting),
    )


def find_slow_code(facts: ProfileFacts) -> Cause | None:
    """Return the cause if lines of the user's own code keep the host busy or waiting between operations."""
    code = facts.kernels.code if facts.kernels else {}
    if not code or facts.compiles:
        return None
    worst, share = max(code.items(), key=lambda item: item[1])
    file, _, line = worst.rpartition(":")
    text = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return Cause(
        "slow-code",
        f"code between operations takes {sum(code.values()):.0%} of computing a step, most of it in {worst}",
        f"{worst} takes {share:.0%}" + (f": `{text}`" if text else ""),
        "move it out of the loss function and the model, run it in one step of many, or write it in torch operations",
        next_command.suggest_profile_again(facts),
        sum(code.values()) * (1 - facts.waiting),
    )


def find_slow_switch(facts: ProfileFacts) -> Cause | None:
    """Return the cause if a step is measured to be faster without a setting that the user's code has left on."""
    slow = [one for one in facts.switches if one.low > 1 and one.seconds > 0]
    worst = max(slow, key=lambda one: 1 - one.without / one.seconds, default=None)
    if worst is None:
        return None
    identifier, is_now, do = _SWITCHES[worst.name]
    return Cause(
        identifier,
        f"{is_now.format(worst.value)}: a step takes {format_duration(worst.seconds)}, and without that "
        f"{format_duration(worst.without)}",
        f"{worst.low:.2f}-{worst.high:.2f}x as fast without it",
        do,
        next_command.suggest_profile_again(facts),
        (1 - worst.without / worst.seconds) * (1 - facts.waiting),
    )


_SWITCHES = {
    ANOMALY: (
        "anomaly-mode",
        "torch.autograd.set_detect_anomaly is {}",
        "remove set_detect_anomaly(True), which is for debugging: halfstep names the operation of a NaN without it",
    ),
    THREADS: (
        "few-threads",
        "torch uses {} of this machine's cores",
        "remove torch.set_num_threads() and OMP_NUM_THREADS, or set them to the number of cores",
    ),
}


_WHOLE_TABLE = ("fill_", "zero_", "embedding_dense_backward", "linalg_vector_norm", "_foreach_norm")
"""Operations over all rows of an embedding's gradient."""


def find_heavy_update(facts: ProfileFacts) -> Cause | None:
    """Return the cause if much of a step is the optimizer's update, which no precision shortens."""
    share, update = facts.shares.get(UPDATE, 0.0), "the optimizer's update takes"
    others = facts.kernels.other if facts.kernels else {}
    if "embedding_dense_backward" in others:
        # The gradient of an embedding is as large as its table: zeros, then a few rows.
        share += sum(others.get(name, 0.0) for name in _WHOLE_TABLE) * (1 - facts.waiting)
        update = "the optimizer's update and the dense gradients of embeddings take"
    if share < _DOMINANT:
        return None
    return Cause(
        "optimizer-update",
        f"{update} {share:.0%} of a step, and no precision shortens it",
        _describe_largest_parts(facts),
        "update less often (a larger batch, or more micro-batches per update), use fused=True, and for a large "
        "embedding of which a batch needs few rows sparse=True with an optimizer for sparse gradients",
        next_command.suggest_growing_plan(facts),
        share,
    )


def find_heavy_operation(facts: ProfileFacts) -> Cause | None:
    """Return the cause if one kind of operation other than products dominates a step."""
    others = facts.kernels.other if facts.kernels else {}
    # Forward and backward of one operation have two names.
    both: dict[str, float] = {}
    for name, share in others.items():
        both[_strip_operation_name(name)] = both.get(_strip_operation_name(name), 0.0) + share * (1 - facts.waiting)
    name, share = max(both.items(), key=lambda item: item[1], default=("", 0.0))
    if share < _DOMINANT:
        return None
    return Cause(
        "heavy-operation",
        f"{name} takes {share:.0%} of a step, forward and backward, and no precision of products shortens it",
        _describe_largest_parts(facts),
        "make its input smaller (for a loss over a large vocabulary: in chunks, or with a fused kernel), or compile",
        next_command.suggest_plan(facts),
        share,
    )


def _strip_operation_name(operation: str) -> str:
    return re.sub(r"_backward\w*$|_data$|_out$", "", operation.strip("_")).strip("_")


def find_heavy_copies(facts: ProfileFacts) -> Cause | None:
    """Return the cause if casts and layout copies dominate a step."""
    share = facts.shares.get(COPIES, 0.0)
    if share < _DOMINANT:
        return None
    return Cause(
        "copies",
        f"casts and layout copies take {share:.0%} of a step",
        _describe_largest_parts(facts),
        "keep one layout (channels last for images) and one format from layer to layer, or compile",
        next_command.suggest_plan(facts),
        share,
    )


def find_fp64_work(facts: ProfileFacts) -> Cause | None:
    """Return the cause if products run in fp64 although less was requested."""
    if facts.work is None or facts.kernels is None or facts.format == "fp64" or facts.work.fp64_share < NOTICEABLE:
        return None
    # fp64 takes at least twice as long for a FLOP, on most accelerators many times as long.
    share = facts.shares.get(WIDE, 0.0) * (1 - 1 / _UNKNOWN_GAIN)
    return Cause(
        "fp64-work",
        f"{facts.work.fp64_share:.0%} of the matrix work runs in fp64, in {format_module_names(list(facts.work.wide))}",
        f"products in fp32 and fp64 take {facts.shares.get(WIDE, 0.0):.0%} of a step",
        "remove .double() there, or keep it to the few operations that need it",
        next_command.suggest_profile_again(facts),
        share,
    )


CAUSES: tuple[Callable[[ProfileFacts], Cause | None], ...] = (
    find_recompilation,
    find_too_few_workers,
    find_slow_data,
    find_restarted_workers,
    find_emulated_format,
    find_reference_kernels,
    find_tf32_baseline,
    find_fp64_work,
    find_fp32_island,
    find_misaligned_channels,
    find_slow_switch,
    find_slow_code,
    find_heavy_update,
    find_heavy_operation,
    find_heavy_copies,
    find_tiny_model,
)
"""The order in which they win where two explain the same share."""


def find_causes(facts: ProfileFacts) -> list[Cause]:
    """Return all causes that explain enough to be fixed, largest first; none for steps that did not train."""
    if facts.idle:
        return []
    named = [cause for one in CAUSES if (cause := one(facts)) is not None and cause.share >= NOTICEABLE]
    # The sort is stable: equal shares keep the order of CAUSES.
    return sorted(named, key=lambda cause: -cause.share)


def _estimate_padding_saving(facts: ProfileFacts, layer: MisalignedLayer) -> float:
    """Return the share of a step on a fixed batch that padding saves, at most that of its matrix work."""
    assert facts.race is not None
    alone = layer.saved / facts.race.asked
    if facts.kernels is None or layer.seconds <= 0:
        return min(1.0, alone)
    return facts.kernels.matrix * layer.flops_share * (1 - layer.padded_seconds / layer.seconds)


def _estimate_narrow_gain(facts: ProfileFacts) -> float:
    """Return how many times faster a FLOP is in the narrow format, judged by the two steps."""
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


def _compute_compiling_share(warming: Warming) -> float:
    """Return the share of compilation in the steps after the second; 0 if torch has finished compiling by then."""
    # The first two steps are left out: torch compiles in the first, and once more when a shape first changes.
    counts, seconds, compiling = warming.compiled[2:], warming.seconds[2:], warming.compiling[2:]
    if not counts or sum(1 for count in counts if count) < _OFTEN * len(counts):
        return 0.0
    return sum(compiling) / sum(seconds) if sum(seconds) > 0 else 0.0


_GOOD = 1.5
_MOST_OF_IT = 0.6
"""A speed-up below `_GOOD` also counts as good if it reaches this share of Amdahl's ceiling."""
_LITTLE = 1.3
"""With a ceiling below this, no precision can gain much."""


def choose_cause(facts: ProfileFacts) -> Cause:
    """Return exactly one result: the cause that explains most, or why there is none."""
    if facts.idle:
        do = "fix the data or the loss, until a step trains"
        return Cause("no-updates", facts.idle, "", do, next_command.suggest_profile_again(facts), 0.0)
    if facts.passed_over:
        do = f"compute in {facts.instead}"
        command = next_command.suggest_other_precision(facts, facts.instead)
        return Cause("refused", f"{facts.asked} does not run on this device", facts.why, do, command, 0.0)
    causes = find_causes(facts)
    return causes[0] if causes else find_unexplained_wait(facts) or _conclude_without_cause(facts)


def _conclude_without_cause(facts: ProfileFacts) -> Cause:
    if facts.speed is None:
        return Cause(
            "not-measured",
            _explain_missing_speed(facts),
            "",
            "give it longer",
            next_command.suggest_longer_profile(facts),
            0.0,
        )
    # A cause may be in a stage that was not measured, so nothing is called healthy.
    if facts.skipped:
        sentence = (
            f"not measured: {', '.join(facts.skipped)}. The other parts show no cause: "
            f"{_describe_gain(facts, facts.speed)}"
        )
        return Cause(
            "not-measured",
            sentence,
            _describe_largest_parts(facts),
            "give it longer",
            next_command.suggest_longer_profile(facts),
            0.0,
        )
    if not facts.narrow:
        return Cause(
            "already-fast",
            f"nothing is wrong, and nothing narrower than {facts.asked} was requested",
            _describe_largest_parts(facts),
            "try another precision",
            next_command.suggest_other_precision(facts, facts.instead)
            if facts.instead != facts.asked
            else next_command.suggest_plan(facts),
            0.0,
        )
    most = facts.ceiling if facts.ceiling is not None else 0.0
    if facts.speed.low > 1 and facts.speed.speedup >= min(_GOOD, max(CLEARLY_FASTER, _MOST_OF_IT * most)):
        return _build_fast_cause(facts, facts.speed)
    return _build_slow_cause(facts, facts.speed)


def _explain_missing_speed(facts: ProfileFacts) -> str:
    if facts.race is None:
        return "there was no time to find a cause"
    return (
        f"the speed was not measured well enough: {format_counted_noun(facts.race.pairs, 'pair')} of steps, and a "
        "verdict needs "
        f"{FEWEST_FOR_INTERVAL}"
    )


def _describe_gain(facts: ProfileFacts, race: StepTimes) -> str:
    if race.high < 1:
        return f"{facts.asked} is slower: {race.speedup:.2f}x"
    return (
        f"{facts.asked} gains {race.speedup:.2f}x" if race.low > 1 else f"{facts.asked} is no faster than strict fp32"
    )


def _build_slow_cause(facts: ProfileFacts, race: StepTimes) -> Cause:
    ceiling = facts.ceiling_with_data
    bound = f"even with infinitely fast matrix work this model gains {ceiling:.2f}x" if ceiling else ""
    if ceiling is not None and ceiling < _LITTLE:
        sentence = f"there is little matrix work here for {facts.asked} to speed up: {bound}"
        return Cause(
            "little-matrix-work",
            sentence,
            _describe_largest_parts(facts),
            "try other settings",
            next_command.suggest_plan(facts),
            0.0,
        )
    if facts.shares.get(COPIES, 0.0) >= facts.shares.get(NARROW, 0.0):
        sentence = f"casts and layout copies take {facts.shares.get(COPIES, 0.0):.0%} of a step, more than products do"
        do = "lay images out with channels last, or compile"
        return Cause(
            "copies",
            sentence,
            _describe_largest_parts(facts),
            do,
            next_command.suggest_plan(facts),
            facts.shares.get(COPIES, 0.0),
        )
    sentence = f"{_describe_gain(facts, race)}, and no single cause stands out"
    return Cause(
        "unexplained",
        sentence,
        "; ".join(filter(None, (_describe_largest_parts(facts), bound))),
        "compare settings",
        next_command.suggest_plan(facts),
        0.0,
    )


def _build_fast_cause(facts: ProfileFacts, race: StepTimes) -> Cause:
    possible = facts.ceiling
    of = f" of a possible {possible:.2f}x" if possible is not None and possible > race.speedup else ""
    return Cause(
        "already-fast",
        f"nothing is wrong: {race.speedup:.2f}x{of}",
        f"{facts.asked} against strict fp32, {race.low:.2f}-{race.high:.2f}x over "
        f"{format_counted_noun(race.pairs, 'pair')}",
        "see whether other settings are faster still" if facts.own_code else "train",
        next_command.suggest_training(facts),
        0.0,
    )


def _describe_largest_parts(facts: ProfileFacts) -> str:
    """Return the largest parts that no precision shortens."""
    shares = sorted(((share, part) for part, share in facts.shares.items() if part not in (NARROW, WIDE)), reverse=True)
    return ", ".join(f"{PARTS[part]} {share:.0%}" for share, part in shares[:3] if share > 0)
