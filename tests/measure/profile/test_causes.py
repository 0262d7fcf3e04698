"""Causes, found from facts alone: each where it should be, none where it should not, and the largest one wins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from halfstep.measure.profile.causes import CAUSES, choose_cause, find_causes
from halfstep.measure.profile.facts import (
    ANOMALY,
    DATA,
    PARTS,
    THREADS,
    Feeding,
    FlopsByFormat,
    KernelTimes,
    MisalignedLayer,
    ProfileFacts,
    SlowSwitch,
    StepTimes,
    Warming,
    build_profile_facts,
    compute_amdahl_speedup,
)

SHARES = {"host": 0.05, "narrow": 0.6, "fp32": 0.0, "copies": 0.1, "update": 0.1, "other": 0.15}
FP32_SHARES = {"host": 0.02, "narrow": 0.0, "fp32": 0.78, "copies": 0.05, "update": 0.05, "other": 0.1}
HEALTHY = ProfileFacts(
    asked="bf16",
    format="bf16",
    kind="cpu",
    subject=("mine:case",),
    race=StepTimes(fp32=0.1, asked=0.035, speedup=2.86, low=2.7, high=3.0, pairs=60),
    kernels=KernelTimes(SHARES),
    fp32_kernels=KernelTimes(FP32_SHARES),
    work=FlopsByFormat({"bf16": 1000}, {}),
)


def fed(**changes: Any) -> Feeding:
    usual = {"step": 0.1, "wait": 0.06, "read": 0.06, "read_cpu": 0.0, "workers": 0, "cores": 8, "threads": 0}
    return Feeding(**{**usual, **changes})


def padded(now: float, then: float, low: float, share: float = 0.9) -> MisalignedLayer:
    return MisalignedLayer(("body.0", "body.2"), "127->127", "128->128", share, now, then, low, low + 0.1, "Conv2d")


def test_nothing_is_wrong_with_what_is_fast() -> None:
    end = choose_cause(HEALTHY)
    assert end.id == "already-fast"
    assert end.sentence == "nothing is wrong: 2.86x of a possible 4.55x"
    assert end.command == "halfstep plan mine:case"
    recipe = replace(HEALTHY, own_code=False, subject=("cifar10", "train.batch_size=4"))
    assert choose_cause(recipe).command == "halfstep train cifar10 train.batch_size=4 precision=bf16"


def test_more_speed_than_amdahl_allows_is_not_held_against_it() -> None:
    fast = replace(HEALTHY, race=replace(HEALTHY.race, speedup=6.0))  # type: ignore[type-var]
    assert choose_cause(fast).sentence == "nothing is wrong: 6.00x"


def test_workers_are_too_few_where_more_would_hide_the_reading() -> None:
    cause = choose_cause(replace(HEALTHY, feeding=fed()))
    assert cause.id == "too-few-workers"
    assert "2 workers would hide most of it" in cause.sentence  # 60 ms to read, 40 ms to compute
    assert cause.share == pytest.approx(0.6)
    recipe = replace(HEALTHY, feeding=fed(), own_code=False, subject=("mine.yaml",))
    assert choose_cause(recipe).command == "halfstep train mine.yaml train.num_workers=2"


@pytest.mark.parametrize(
    "feeding",
    [
        fed(read=0.6, read_cpu=0.6, cores=8),  # all cores together are too slow
        fed(read_cpu=0.06, cores=2, threads=2),  # the step itself needs the cores that would read
        fed(read=6.0, wait=0.06, cores=2),  # so far away that no sensible number of workers is enough
    ],
)
def test_data_is_slow_where_no_number_of_workers_helps(feeding: Feeding) -> None:
    cause = choose_cause(replace(HEALTHY, feeding=feeding))
    assert cause.id == "slow-data"
    assert cause.share == pytest.approx(feeding.wait_share)
    assert cause.command.endswith("halfstep.measure.profile.reading mine:case")


def test_reading_that_only_waits_needs_workers_and_no_cores() -> None:
    asleep = fed(read=0.16, read_cpu=0.0, cores=2, threads=2)
    assert asleep.workers_needed == 4  # 160 ms to come, 40 ms to compute
    assert choose_cause(replace(HEALTHY, feeding=asleep)).id == "too-few-workers"
    busy = fed(read=0.16, read_cpu=0.16, cores=2, threads=2)
    assert busy.at_best == pytest.approx((0.16 + 0.08) / 2)
    assert choose_cause(replace(HEALTHY, feeding=busy)).id == "slow-data"


def test_waiting_with_workers_enough_is_neither_slow_data_nor_nothing() -> None:
    end = choose_cause(replace(HEALTHY, feeding=fed(workers=8)))
    assert end.id == "unexplained"
    assert "waiting for data takes 60% of a step, though 8 workers should be enough" in end.sentence


def test_workers_that_start_anew_for_each_pass_are_told_from_slow_data() -> None:
    feeding = fed(step=0.04, wait=0.0, read=0.04, workers=2, restarting=0.12)
    cause = choose_cause(replace(HEALTHY, feeding=feeding))
    assert cause.id == "restarted-workers"
    assert cause.share == pytest.approx(0.75)
    assert "persistent_workers=True" in cause.do
    assert find_causes(replace(HEALTHY, feeding=replace(feeding, restarting=0.004))) == []


def test_beside_workers_a_step_takes_the_longer_of_computing_and_reading() -> None:
    alone, beside = fed(wait=0.06, read=0.06), fed(step=0.06, wait=0.025, read=0.12, workers=2)
    assert alone.fed(0.1) == pytest.approx(0.16)
    assert beside.fed(0.1) == pytest.approx(0.1)
    assert beside.fed(0.035) == pytest.approx(0.06)
    assert replace(HEALTHY, feeding=beside).with_data == pytest.approx(0.1 / 0.06)
    assert replace(HEALTHY, feeding=beside).ceiling_with_data == pytest.approx(0.1 / 0.06)


def test_few_pairs_are_no_speed() -> None:
    for speedup in (1.82, 0.5):
        race = StepTimes(0.1, 0.1 / speedup, speedup, speedup, speedup, pairs=1)
        end = choose_cause(replace(HEALTHY, race=race, native=False, instead="fp16"))
        assert end.id == "not-measured"
        assert "not measured well enough: 1 pair of steps" in end.sentence
        assert "x" not in end.sentence.replace("needs 6", "")
        assert end.command == "halfstep profile mine:case --precision bf16 --seconds 240"
        assert replace(HEALTHY, race=race, feeding=fed()).with_data is None


def test_with_a_stage_skipped_nothing_is_said_to_be_right() -> None:
    for facts in (HEALTHY, replace(HEALTHY, asked="fp32", format="fp32")):
        end = choose_cause(replace(facts, skipped=("feeding",)))
        assert end.id == "not-measured"
        assert end.sentence.startswith("not measured: feeding.")
        assert "nothing is wrong" not in end.sentence
    # What was found is still named.
    assert choose_cause(replace(HEALTHY, feeding=fed(), skipped=("padding",))).id == "too-few-workers"


def test_steps_that_do_not_train_come_before_everything() -> None:
    facts = replace(HEALTHY, idle="the loss is not finite: times say nothing", feeding=fed())
    assert choose_cause(facts).id == "no-updates"
    assert choose_cause(facts).sentence == facts.idle
    assert find_causes(facts) == []


def test_slower_is_called_slower() -> None:
    slow = StepTimes(fp32=0.1, asked=0.112, speedup=0.89, low=0.87, high=0.92, pairs=60)
    end = choose_cause(replace(HEALTHY, race=slow))
    assert end.id == "unexplained"
    assert end.sentence.startswith("bf16 is slower: 0.89x")


def test_a_short_wait_is_no_cause() -> None:
    assert find_causes(replace(HEALTHY, feeding=fed(step=0.1, wait=0.009, read=0.009))) == []
    assert find_causes(replace(HEALTHY, feeding=fed(step=0.0, wait=0.0, read=0.0))) == []


def test_a_tiny_model_is_bound_by_its_program() -> None:
    tiny = replace(
        HEALTHY, kernels=KernelTimes({**SHARES, "host": 0.9, "narrow": 0.0, "copies": 0.0, "update": 0.0, "other": 0.1})
    )
    assert choose_cause(tiny).id == "tiny-model"
    assert choose_cause(tiny).share == pytest.approx(0.9)
    # The share that is printed is the one that decides: of computing, whatever the wait.
    waiting = [cause for cause in find_causes(replace(tiny, feeding=fed())) if cause.id == "tiny-model"]
    assert waiting[0].sentence.startswith("90% of a step's compute time is Python")
    assert waiting[0].share == pytest.approx(0.9 * 0.4)
    assert choose_cause(tiny).command.endswith("--grow-batch")
    # A compiled step was looked at as it was written; how much of it is dispatch is not known.
    assert choose_cause(replace(tiny, compiles=True)).id != "tiny-model"


def test_padding_counts_only_where_it_was_measured_to_gain() -> None:
    cause = choose_cause(replace(HEALTHY, misaligned=(padded(0.010, 0.005, low=1.8),)))
    assert cause.id == "misaligned-channels"
    assert cause.share == pytest.approx(0.6 * 0.9 * 0.5)
    assert 'layers "body.0", "body.2" (Conv2d)' in cause.evidence
    assert "128->128 channels instead of 127->127" in cause.do
    for layer in (padded(0.010, 0.005, low=0.99), padded(0.010, 0.0099, low=1.01), padded(0.010, 0.012, low=0.8)):
        assert find_causes(replace(HEALTHY, misaligned=(layer,))) == []


def test_an_island_is_named_by_its_modules() -> None:
    kernels = KernelTimes({**SHARES, "narrow": 0.1, "fp32": 0.5})
    work = FlopsByFormat({"bf16": 500, "fp32": 500}, {"body": 400, "head": 100}, islands=("body",))
    cause = choose_cause(replace(HEALTHY, kernels=kernels, work=work))
    assert cause.id == "fp32-island"
    assert '50% of the matrix work still runs in fp32, in "body", "head"' in cause.sentence
    assert 'remove island() from "body"' in cause.do
    # bf16 did 500 FLOPs in 3.5 ms where fp32 does 1000 in 78 ms: 11 times as fast
    assert cause.share == pytest.approx(0.5 * (1 - 1 / (500 / 0.0035 / (1000 / 0.078))))
    assert (
        find_causes(replace(HEALTHY, kernels=kernels, work=FlopsByFormat({"bf16": 950, "fp32": 50}, {"head": 50})))
        == []
    )


def test_a_baseline_that_is_not_fp32_is_told() -> None:
    race = StepTimes(fp32=0.1, asked=0.05, speedup=2.0, low=1.9, high=2.1, pairs=60, own_fp32=0.052)
    cause = choose_cause(replace(HEALTHY, race=race, fp32_means="tf32"))
    assert cause.id == "tf32-baseline"
    assert "torch's switches make it tf32, which is 1.92x as fast already" in cause.sentence
    assert cause.command == "halfstep bench mine:case --precisions fp32,bf16"
    # Switches that change nothing on this device are nobody's fault.
    assert find_causes(replace(HEALTHY, race=replace(race, own_fp32=0.098), fp32_means="tf32")) == []


def test_kernels_that_are_only_right_and_formats_that_are_not_there() -> None:
    slow = StepTimes(fp32=0.01, asked=0.2, speedup=0.05, low=0.04, high=0.06, pairs=20)
    half = replace(HEALTHY, asked="fp16", format="fp16", native=False, why="no fast kernel", instead="bf16", race=slow)
    cause = choose_cause(replace(half, kernels=KernelTimes(SHARES, convolutions=0.6)))
    assert cause.id == "reference-kernels"
    assert cause.command == "halfstep profile mine:case --precision bf16"
    assert cause.share == pytest.approx(0.95)
    assert choose_cause(replace(half, kernels=KernelTimes(SHARES, convolutions=0.0))).id == "emulated"
    assert find_causes(replace(half, race=HEALTHY.race)) == []  # products in fp16 may be fast all the same
    old = ProfileFacts(
        "bf16", "bf16", "cuda", native=False, why="compute capability 7.5", instead="fp16", passed_over=True
    )
    assert (choose_cause(old).id, choose_cause(old).share) == ("refused", 0.0), "nothing was timed"
    unraced = replace(half, race=None, kernels=KernelTimes(SHARES))
    assert find_causes(unraced) == [], "a share needs a race"
    assert choose_cause(old).command == 'profile(model, loss_fn, batch, precision="fp16")'


def test_code_between_operations_is_named_by_its_line() -> None:
    shares = {**SHARES, "host": 0.7, "narrow": 0.2, "copies": 0.0, "update": 0.05, "other": 0.05}
    cause = choose_cause(replace(HEALTHY, kernels=KernelTimes(shares, code={"mine.py:3": 0.5, "mine.py:9": 0.1})))
    assert (cause.id, cause.share) == ("slow-code", pytest.approx(0.6))
    assert "mine.py:3" in cause.sentence
    # What is left of the host's time is too little to call the model tiny.
    assert [one.id for one in find_causes(replace(HEALTHY, kernels=KernelTimes(shares, code={"mine.py:3": 0.6})))] == [
        "slow-code"
    ]
    assert choose_cause(replace(HEALTHY, kernels=KernelTimes(shares))).id == "tiny-model"


@pytest.mark.parametrize(("name", "value", "id_"), [(ANOMALY, "on", "anomaly-mode"), (THREADS, "1", "few-threads")])
def test_a_switch_that_costs_time_is_named_only_where_the_step_is_faster_without(
    name: str, value: str, id_: str
) -> None:
    slow = SlowSwitch(name, value, seconds=0.02, without=0.01, low=1.8, high=2.2)
    cause = choose_cause(replace(HEALTHY, switches=(slow,)))
    assert (cause.id, cause.share) == (id_, pytest.approx(0.5))
    assert find_causes(replace(HEALTHY, switches=(replace(slow, low=0.97),))) == []


def test_parts_that_dominate_a_step_are_causes() -> None:
    update = KernelTimes({**SHARES, "narrow": 0.2, "update": 0.5})
    assert [cause.id for cause in find_causes(replace(HEALTHY, kernels=update))] == ["optimizer-update"]
    dense = {"fill_": 0.4, "embedding_dense_backward": 0.01}
    table = KernelTimes({**SHARES, "narrow": 0.2, "other": 0.42, "update": 0.2}, other=dense)
    cause = choose_cause(replace(HEALTHY, kernels=table))
    assert (cause.id, cause.share) == ("optimizer-update", pytest.approx(0.61)), "zeros of a table are its gradient"
    assert "embeddings" in cause.sentence
    softmax = KernelTimes(
        {**SHARES, "narrow": 0.2, "other": 0.55}, other={"_log_softmax": 0.2, "_log_softmax_backward_data": 0.2}
    )
    cause = choose_cause(replace(HEALTHY, kernels=softmax))
    assert (cause.id, cause.share) == ("heavy-operation", pytest.approx(0.4))
    assert cause.sentence.startswith("log_softmax takes 40%")
    copying = KernelTimes({**SHARES, "narrow": 0.2, "copies": 0.5})
    assert choose_cause(replace(HEALTHY, kernels=copying)).id == "copies"
    double = FlopsByFormat({"fp64": 30, "fp32": 70}, {"b": 30, "a": 70})
    in_fp32 = replace(HEALTHY, asked="fp32", format="fp32", work=double, kernels=KernelTimes(FP32_SHARES))
    assert [cause.id for cause in find_causes(in_fp32)] == ["fp64-work"]


def test_compiling_in_every_step_is_told_from_compiling_at_the_start() -> None:
    always = Warming((1.0,) * 6, (2,) * 6, (0.9,) * 6, "self.calls == 5")
    cause = choose_cause(replace(HEALTHY, warming=always, compiles=True))
    assert cause.id == "recompiling"
    assert cause.share == pytest.approx(0.9)
    assert "self.calls == 5 no longer held" in cause.evidence
    at_the_start = Warming((9.0, 3.0, 0.1), (3, 1, 0), (8.0, 2.9, 0.0))
    assert find_causes(replace(HEALTHY, warming=at_the_start, compiles=True)) == []
    with_data = replace(fed(wait=0.0), warming=always)
    assert choose_cause(replace(HEALTHY, warming=at_the_start, feeding=with_data)).id == "recompiling"


def test_what_explains_most_wins() -> None:
    both = replace(HEALTHY, feeding=fed(), misaligned=(padded(0.010, 0.005, low=1.8),))
    assert [cause.id for cause in find_causes(both)] == ["too-few-workers", "misaligned-channels"]
    assert find_causes(both)[1].share == pytest.approx(0.6 * 0.9 * 0.5 * 0.4)  # of the 40 % that are not waiting
    brief = fed(wait=0.012, read=0.012)
    assert choose_cause(replace(both, feeding=brief)).id == "misaligned-channels"


def test_little_matrix_work_is_an_end_too() -> None:
    slow = StepTimes(fp32=0.1, asked=0.1, speedup=1.0, low=0.98, high=1.02, pairs=60)
    little = KernelTimes({**FP32_SHARES, "fp32": 0.15, "other": 0.73})
    end = choose_cause(replace(HEALTHY, race=slow, fp32_kernels=little))
    assert end.id == "little-matrix-work"
    assert "even with infinitely fast matrix work this model gains 1.18x" in end.sentence
    assert choose_cause(replace(HEALTHY, race=slow)).id == "unexplained"
    copying = KernelTimes({**SHARES, "narrow": 0.2, "copies": 0.5})
    assert choose_cause(replace(HEALTHY, race=slow, kernels=copying)).id == "copies"


def test_facts_that_are_empty_huge_or_not_finite_still_end() -> None:
    nothing = ProfileFacts("bf16", "bf16", "cpu")
    assert choose_cause(nothing).id == "not-measured"
    for number in (0.0, 1e300, math.inf, math.nan):
        race = StepTimes(number, number, 1.0, 1.0, 1.0, 1, number)
        odd = replace(HEALTHY, race=race, feeding=fed(step=number, wait=number, read=number))
        assert choose_cause(odd).command
    for one in CAUSES:
        assert one(nothing) is None


def test_shares_add_up_to_one_with_and_without_data() -> None:
    for facts in (HEALTHY, replace(HEALTHY, feeding=fed())):
        assert sum(facts.shares.values()) == pytest.approx(1.0)
        assert set(facts.shares) == set(PARTS)
    assert replace(HEALTHY, feeding=fed()).shares[DATA] == pytest.approx(0.6)


def test_amdahl() -> None:
    assert compute_amdahl_speedup(0.0) == 1.0
    assert compute_amdahl_speedup(0.5) == 2.0
    assert compute_amdahl_speedup(1.0) == math.inf
    assert HEALTHY.ceiling == pytest.approx(1 / 0.22)
    waiting = replace(HEALTHY, feeding=fed(step=0.135, wait=0.1, read=0.1))
    assert waiting.ceiling_with_data == pytest.approx(1 / (1 - 0.78 * 0.1 / 0.2))
    assert waiting.with_data == pytest.approx(0.2 / 0.135)


def test_facts_survive_the_way_between_processes() -> None:
    import json

    whole = replace(
        HEALTHY,
        warming=Warming((1.0, 2.0), (0, 1), (0.0, 0.5), "why"),
        feeding=replace(fed(), warming=Warming((1.0,), (0,), (0.0,))),
        misaligned=(padded(2.0, 1.0, 1.5),),
    )
    assert build_profile_facts(json.loads(json.dumps(whole.as_dict()))) == whole
