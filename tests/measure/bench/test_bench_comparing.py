"""Comparing arms that are plain functions: pairing, intervals, failures, interruptions, and how it is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halfstep.errors import WrongUse
from halfstep.measure.bench.bench import run_bench_arms
from halfstep.measure.bench.comparison import BenchMetric, BenchTimes, Gain, RunFailed, RunResult, UpdateMemory
from halfstep.measure.bench.page import Bench
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow

TOP1 = BenchMetric("top1", higher_is_better=True)
NOISE = {1: 0.000, 2: 0.004, 3: -0.004, 4: 0.002, 5: -0.002}


def arm(metric: float = 0.9, speed: float = 100.0, **more: Any) -> Callable[[int], RunResult]:
    """Trains nothing: a metric and a speed with the same noise for each seed."""

    def run(seed: int) -> RunResult:
        return RunResult(
            seed, metric + NOISE[seed], seconds=10.0, seconds_per_epoch=500 / speed, epochs=4,
            samples_per_second=speed * (1 + NOISE[seed] * (1 + speed / 1000)), **more,
        )  # fmt: skip

    return run


def benched(arms: dict[str, Callable[[int], RunResult]], seeds: int = 3, **more: Any) -> Bench:
    told: dict[str, Any] = {"name": "a bench", "metric": TOP1, "conditions": {"device": "a | device"}, **more}
    return run_bench_arms(arms, seeds=range(1, seeds + 1), **told)


def rows_of_table(found: Bench) -> list[str]:
    """The rows of the Markdown table, without its head."""
    return [line for line in found.markdown().splitlines() if line.startswith("|")][2:]


def test_speed_memory_and_accuracy_in_one_sentence() -> None:
    memories = {"fp32": lambda: UpdateMemory(1000), "bf16": lambda: UpdateMemory(690)}
    found = benched({"fp32": arm(), "bf16": arm(0.899, 170.0)}, memories=memories)
    row = found.rows[1]
    assert row.gain is not None
    assert row.gain.verdict == "faster"
    assert row.gain.times == pytest.approx(1.7, rel=1e-3)
    assert row.less_memory == pytest.approx(0.31)
    assert found.verdicts == (
        "bf16: 1.70x as fast (1.70 to 1.70), 31 % less memory, same accuracy (difference -0.10 ± 0.00 points; "
        "a wide margin, as fp32 itself differs that much from seed to seed)",
    )
    assert found.asides == (
        "margin 1.2 points for every precision: three standard deviations of fp32 over its 3 seeds",
    )
    assert found.markdown().count("margin 1.2 points") == 1


def test_a_speed_that_may_be_equal_has_no_verdict() -> None:
    def restless(seed: int) -> RunResult:
        return RunResult(seed, 0.9, samples_per_second={1: 90.0, 2: 120.0, 3: 105.0}[seed])

    found = benched({"fp32": arm(), "noisy": restless}).rows[1].gain
    assert found is not None
    # Logs of 0.9, 1.2 / 1.0044 and 1.05 / 0.9956: mean 0.0419, sd 0.1447, t(2) at 95 % 4.3027, so ± 0.3594.
    assert found.times == pytest.approx(math.exp(0.0419), rel=1e-3)
    assert found.low == pytest.approx(math.exp(0.0419 - 0.3594), rel=1e-2)
    assert found.verdict == "can't tell"
    alone = benched({"fp32": arm(), "bf16": arm(speed=500.0)}, seeds=1)
    assert alone.rows[1].gain is not None
    assert alone.rows[1].gain.verdict == "can't tell"
    assert "can't tell whether it is faster (5.00x)" in alone.verdicts[0]
    assert "fewer than 3 seeds" in alone.verdicts[0]


def test_all_arms_of_a_seed_come_before_the_next_seed_and_each_is_once_first() -> None:
    order: list[tuple[int, str]] = []

    def noted(name: str) -> Callable[[int], RunResult]:
        return lambda seed: order.append((seed, name)) or arm()(seed)  # type: ignore[func-returns-value]

    benched({name: noted(name) for name in "abc"})
    assert [seed for seed, _ in order] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [order[n][1] for n in (0, 3, 6)] == ["a", "b", "c"]


@pytest.mark.wording
def test_an_arm_that_fails_is_a_row_with_its_reason() -> None:
    runs = 0

    def failing(seed: int) -> RunResult:
        nonlocal runs
        runs += 1
        if seed == 2:
            raise RunFailed("there is no room")
        return arm()(seed)

    def refused() -> UpdateMemory:
        raise WrongUse("this device | cannot")

    found = benched({"fp32": arm(), "half": failing, "never": arm(), "fine": arm()}, memories={"never": refused})
    assert runs == 2
    assert [len(row.runs) for row in found.rows] == [3, 1, 0, 3]
    assert found.verdicts[0].endswith("1 of 3 seeds; then it failed: there is no room")
    assert found.verdicts[1] == "never: failed: this device | cannot"
    assert "this device \\| cannot" in found.markdown()
    assert "same accuracy" in found.verdicts[2]


def test_a_baseline_that_fails_leaves_the_others_without_verdicts() -> None:
    def failing(seed: int) -> RunResult:
        raise RunFailed("broken")

    found = benched({"fp32": failing, "bf16": arm()})
    assert found.verdicts == ("fp32: failed: broken", "bf16: speed not measured, accuracy not measured")
    json.dumps(found.as_dict(), allow_nan=False)


def test_ctrl_c_keeps_what_is_finished() -> None:
    def stopping(seed: int) -> RunResult:
        if seed == 2:
            raise KeyboardInterrupt
        return arm()(seed)

    found = benched({"fp32": arm(), "bf16": stopping})
    assert found.interrupted
    assert [len(row.runs) for row in found.rows] == [1, 1]
    assert found.rows[1].parity is not None
    assert found.rows[1].parity.verdict == "can't tell"
    assert "Interrupted" in found.markdown()
    assert found.as_dict()["interrupted"] is True


def test_ctrl_c_before_anything_is_a_report_of_nothing() -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    found = benched({"fp32": arm(), "bf16": arm()}, progress=stop)
    assert found.interrupted
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.markdown().count("\n| a") == 2


def test_numbers_that_are_none_are_worse_and_strict_json() -> None:
    found = benched({"fp32": arm(), "broken": arm(math.nan, curve=((1.0, math.inf),))})
    assert found.rows[1].parity is not None
    assert found.rows[1].parity.verdict == "worse"
    content = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert content["rows"][1]["runs"][0]["metric"] == "NaN"
    assert content["rows"][1]["runs"][0]["curve"] == [[1.0, "Infinity"]]
    kept = RunResult.from_dict(content["rows"][1]["runs"][0])
    assert math.isnan(kept.metric)
    assert kept.curve == ((1.0, math.inf),)
    assert "not finite" in found.markdown()


def test_time_until_the_loss_of_fp32() -> None:
    base = arm(curve=((1.0, 3.0), (2.0, 2.0), (3.0, 1.0)))
    quick = arm(curve=((0.5, 2.5), (1.0, 1.0), (1.5, 0.5)))
    never = arm(curve=((0.5, 2.5), (1.0, 1.5)))
    found = benched({"fp32": base, "quick": quick, "never": never})
    times = [row.time_to_loss for row in found.rows]
    assert [(t.seconds, t.reached, t.runs) for t in times if t] == [(3.0, 3, 3), (1.0, 3, 3), (None, 0, 3)]
    assert "not reached" in found.markdown()


def test_cost_is_the_time_of_all_epochs_at_a_price() -> None:
    found = benched({"fp32": arm(), "bf16": arm(speed=200.0)}, price_per_hour=36.0)
    assert [row.cost(36.0) for row in found.rows] == [pytest.approx(0.2), pytest.approx(0.1)]
    assert "Cost of training" in found.markdown()
    assert benched({"fp32": arm()}).as_dict()["rows"][0]["cost"] is None


def test_markdown_has_every_column_and_as_many_cells_in_every_row() -> None:
    skipping = arm(skipped={"gradient_overflow": 2}, peak_bytes=2**30, joules_per_epoch=7200.0)
    text = benched({"fp32": arm(), "fp16": skipping}, price_per_hour=1.0).markdown()
    head, line, *rows = [row for row in text.splitlines() if row.startswith("|")]
    titles = (
        "Hardware", "Precision", "Speed", "Time per epoch", "Memory usage", "Final top1", "Accuracy", "Samples/s",
        "Skipped", "Time to fp32's final loss", "Peak memory of the process", "Energy per epoch", "Cost of training",
    )  # fmt: skip
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(titles)
    assert line == "|" + "---|" * len(titles)
    for row in rows:
        assert row.replace("\\|", "").count("|") == len(titles) + 1
    assert r"6 gradient\_overflow" in rows[1]
    assert "1.00 GiB" in rows[1]
    assert "2 Wh" in rows[1]
    assert "not measured" in rows[0]


def test_losses_are_told_in_their_own_unit() -> None:
    loss = BenchMetric("loss", higher_is_better=False)
    found = benched({"fp32": arm(2.0), "bf16": arm(2.2)}, metric=loss)
    assert found.verdicts[0].endswith("worse loss (difference +0.20 ± 0.00)")
    text = found.markdown()
    assert "margin 0.012 for every precision" in text
    assert "the larger of 0.5 % of fp32's loss" in text
    assert "| Loss |" in text
    assert "ccuracy" not in text
    assert "point" not in text


@pytest.mark.wording
def test_a_bench_needs_an_arm() -> None:
    with pytest.raises(WrongUse, match="without arms"):
        benched({})


def test_a_race_is_of_those_that_did_not_fail_and_decides_the_speed() -> None:
    def failing(seed: int) -> RunResult:
        raise RunFailed("broken")

    def race(names: Sequence[str]) -> BenchTimes:
        return BenchTimes({name: Gain(3.0, 2.9, 3.1, 60) for name in names})

    found = benched({"fp32": arm(), "broken": failing, "bf16": arm()}, race=race)
    assert [row.gain and row.gain.times for row in found.rows] == [3.0, None, 3.0]
    assert "from a race of all arms in turns, and samples/s from the runs" in found.markdown()
    assert "race" not in benched({"fp32": arm(), "bf16": arm()}).markdown()
    lost = benched({"fp32": failing, "bf16": arm()}, race=race)
    assert [row.gain for row in lost.rows] == [None, None]


@pytest.mark.parametrize("error", [CandidateFailed("no room"), CandidateTooSlow("no room"), WrongUse("no room")])
@pytest.mark.wording
def test_a_race_that_fails_takes_no_finished_run_away(error: Exception) -> None:
    def race(names: Sequence[str]) -> BenchTimes:
        raise error

    found = benched({"fp32": arm(), "bf16": arm(speed=170.0)}, race=race)
    assert [len(row.runs) for row in found.rows] == [3, 3]
    assert found.rows[1].gain is not None
    assert found.rows[1].gain.times == pytest.approx(1.7, rel=1e-3)  # that of the runs
    assert found.notes == ("speed is from the runs, as the race failed: no room",)
    assert found.notes[0] in found.markdown()
    assert not found.interrupted


def test_an_arm_that_fails_in_the_race_has_the_speed_of_its_runs() -> None:
    def race(names: Sequence[str]) -> BenchTimes:
        return BenchTimes({name: Gain(3.0, 2.9, 3.1, 2) for name in names}, failed={"bf16": "no room"})

    found = benched({"fp32": arm(), "bf16": arm(speed=170.0), "fp16": arm()}, race=race)
    assert [row.gain and round(row.gain.times, 2) for row in found.rows] == [3.0, 1.7, 3.0]
    assert found.notes == ("bf16: speed is from its runs, as it failed in the race: no room",)


def test_ctrl_c_during_the_race_is_an_interrupted_bench_with_its_rows() -> None:
    def race(names: Sequence[str]) -> BenchTimes:
        return BenchTimes({name: Gain(3.0, 2.9, 3.1, 2) for name in names}, interrupted=True)

    found = benched({"fp32": arm(), "bf16": arm()}, race=race)
    assert found.interrupted
    assert found.rows[1].gain == Gain(3.0, 2.9, 3.1, 2)


def test_one_margin_of_all_seeds_of_fp32_for_every_arm() -> None:
    def failing(seed: int) -> RunResult:
        if seed == 4:
            raise RunFailed("no room")
        return arm()(seed)

    found = benched({"fp32": arm(), "bf16": arm(), "half": failing}, seeds=5)
    margins = [row.parity.margin for row in found.rows if row.parity]
    # 0, 4, -4, 2 and -2 thousandths: a sum of squares of 40, over four.
    assert margins == [pytest.approx(3 * math.sqrt(40 / 4) / 1000)] * 2
    assert found.as_dict()["margin"]["size"] == margins[0]
    assert found.as_dict()["margin"]["seeds"] == 5


def test_a_mean_says_how_many_of_its_runs_were_finite() -> None:
    def once_lost(seed: int) -> RunResult:
        return RunResult(seed, math.nan if seed == 2 else 0.9)

    found = benched({"fp32": arm(), "bf16": once_lost})
    assert "(2 of 3 finite)" in rows_of_table(found)[1]
    assert [row["finite"] for row in found.as_dict()["rows"]] == [3, 2]
    assert found.markdown().count("finite)") == 1


def test_what_was_not_measured_is_called_so() -> None:
    (line,) = rows_of_table(benched({"fp32": arm()}))
    assert line.count("not measured") == 3  # memory, peak and energy


def test_other_work_on_the_machine_is_told() -> None:
    found = benched({"fp32": arm()}, conditions={"load": 7.5, "cores": 2})
    assert "load 7.5 on 2 cores" in found.markdown()
    assert benched({"fp32": arm()}, conditions={"load": 0.0, "cores": 2}).asides == ()
