"""Comparing arms that are plain functions: pairing, intervals, failures, interruptions, and how it is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halfstep.errors import WrongUse
from halfstep.measure.bench.comparing import compare
from halfstep.measure.bench.figures import Gain
from halfstep.measure.bench.report import Bench
from halfstep.measure.bench.results import Memory, Metric, RunFailed, RunResult

TOP1 = Metric("top1", higher_is_better=True)
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
    return compare(arms, seeds=range(1, seeds + 1), **told)


def test_speed_memory_and_accuracy_in_one_sentence() -> None:
    memories = {"fp32": lambda: Memory(1000), "bf16": lambda: Memory(690)}
    found = benched({"fp32": arm(), "bf16": arm(0.899, 170.0)}, memories=memories)
    row = found.rows[1]
    assert row.gain is not None
    assert row.gain.verdict == "faster"
    assert row.gain.times == pytest.approx(1.7, rel=1e-3)
    assert row.less_memory == pytest.approx(0.31)
    assert found.verdicts == (
        "bf16: 1.70x as fast (1.70 to 1.70), 31 % less memory, "
        "same accuracy (difference -0.10 ± 0.00 points, margin 1.2)",
    )


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


def test_an_arm_that_fails_is_a_row_with_its_reason() -> None:
    runs = 0

    def failing(seed: int) -> RunResult:
        nonlocal runs
        runs += 1
        if seed == 2:
            raise RunFailed("there is no room")
        return arm()(seed)

    def refused() -> Memory:
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
    assert "Cost of a run" in found.markdown()
    assert benched({"fp32": arm()}).as_dict()["rows"][0]["cost"] is None


def test_markdown_has_every_column_and_as_many_cells_in_every_row() -> None:
    skipping = arm(skipped={"gradient_overflow": 2}, peak_bytes=2**30, joules_per_epoch=7200.0)
    text = benched({"fp32": arm(), "fp16": skipping}, price_per_hour=1.0).markdown()
    head, line, *rows = [row for row in text.splitlines() if row.startswith("|")]
    titles = (
        "Hardware", "Precision", "Speed", "Time per epoch", "Memory usage", "Final top1", "Accuracy", "Samples/s",
        "Skipped", "Time to fp32's loss", "Whole run's peak", "Energy per epoch", "Cost of a run",
    )  # fmt: skip
    assert [cell.strip() for cell in head.strip("|").split("|")] == list(titles)
    assert line == "|" + "---|" * len(titles)
    for row in rows:
        assert row.replace("\\|", "").count("|") == len(titles) + 1
    assert "6 gradient_overflow" in rows[1]
    assert "1.0 GiB" in rows[1]
    assert "2 Wh" in rows[1]
    assert "not measured" in rows[0]


def test_losses_are_told_in_their_own_unit() -> None:
    loss = Metric("loss", higher_is_better=False)
    found = benched({"fp32": arm(2.0), "bf16": arm(2.2)}, metric=loss)
    assert found.verdicts[0].endswith("worse loss (difference +0.20 ± 0.00, margin 0.012)")


def test_a_bench_needs_an_arm() -> None:
    with pytest.raises(WrongUse, match="without arms"):
        benched({})


def test_a_race_is_of_those_that_did_not_fail_and_decides_the_speed() -> None:
    def failing(seed: int) -> RunResult:
        raise RunFailed("broken")

    def race(names: Sequence[str]) -> dict[str, Gain]:
        return {name: Gain(3.0, 2.9, 3.1, 60) for name in names}

    found = benched({"fp32": arm(), "broken": failing, "bf16": arm()}, race=race)
    assert [row.gain and row.gain.times for row in found.rows] == [3.0, None, 3.0]
    lost = benched({"fp32": failing, "bf16": arm()}, race=race)
    assert [row.gain for row in lost.rows] == [None, None]
