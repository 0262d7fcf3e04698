"""Runs of a case: which loss belongs to which time, and what was skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest

from halfstep.measure.bench.case_runs import STEPS, CaseCandidate, build_case_result
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import TimedUpdate
from tests.support import cases


def steep() -> tuple[Any, Any, Any]:
    """Its gradients are too large for fp16 with the loss scale that a run begins with."""
    model, loss_fn, batch = cases.linear()
    return model, lambda model, batch: 100 * loss_fn(model, batch), batch


def test_a_loss_has_the_time_of_its_own_update() -> None:
    updates = [
        TimedUpdate(1.0, 9.0, "gradient_overflow"),
        TimedUpdate(1.0, 8.0, "gradient_overflow"),
        *(TimedUpdate(1.0, float(loss), None) for loss in (5, 4, 3, 2, 1)),
    ]
    found = build_case_result(updates, 1, 4, {})
    assert found.curve == ((7.0, 3.0),)  # the mean of five, when the last of them was there
    assert found.metric == 3.0
    assert found.skipped == {"gradient_overflow": 2}
    assert found.samples_per_second == 4.0


def test_a_loss_that_is_no_number_counts_and_nothing_but_skips_is_no_metric() -> None:
    lost = TimedUpdate(1.0, math.nan, "loss_not_finite")
    assert math.isnan(build_case_result([lost], 1, 4, {}).metric)
    assert build_case_result([lost], 1, 4, {}).skipped == {"loss_not_finite": 1}
    skipped = build_case_result([TimedUpdate(1.0, 2.0, "gradient_overflow")], 1, 4, {})
    assert math.isnan(skipped.metric)
    assert skipped.curve == ()


@pytest.mark.usefixtures("forked_python")
def test_a_real_run_tells_all_its_updates() -> None:
    found = CaseCandidate(Subject("tests.measure.bench.test_bench_case:steep", ()), StepSetting("fp16"))(1)
    applied = STEPS - sum(found.skipped.values())
    assert found.skipped
    assert set(found.skipped) == {"gradient_overflow"}
    assert len(found.curve) == applied - 4
    assert found.curve[-1][0] == found.seconds
