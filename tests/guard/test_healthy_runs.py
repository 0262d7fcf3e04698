"""Healthy runs of every shape are left alone, and the benchmark that says so can say otherwise."""

from __future__ import annotations

import pytest
import torch

from benchmarks import healthy_runs
from benchmarks.odd_shapes import ODD
from halfstep.guard.alarms import spike
from halfstep.guard.alarms.spike import DivergenceThreshold
from halfstep.guard.verdict import GuardEvent


@pytest.mark.full
def test_a_run_of_each_shape_in_both_modes_is_left_alone() -> None:
    assert healthy_runs.run(2 * len(healthy_runs.SHAPES)) == (16, 0)


@pytest.mark.full
def test_a_run_of_each_odd_shape_in_both_modes_is_left_alone() -> None:
    assert healthy_runs.run(2 * len(ODD), ODD) == (28, 0)


def test_a_guard_that_takes_every_level_for_ruin_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spike, "RUIN", DivergenceThreshold(times=0.5, in_a_row=2))
    found = list(healthy_runs.outcomes(80, "level change"))
    assert any(outcome.wrong for outcome in found)
    assert any(outcome.stopped or "rolled back" in str(outcome.wrong) for outcome in found if outcome.mode == "repair")


@pytest.mark.parametrize(
    ("told", "changes", "false"),
    [
        (GuardEvent("alarm", "error", "divergence"), True, True),
        (GuardEvent("alarm", "warning", "a new level"), True, False),
        (GuardEvent("alarm", "warning", "a new level"), False, True),
        (GuardEvent("alarm", "info", "spike"), False, False),
        (GuardEvent("verdict", "warning", "precision", {"cause": "precision"}), True, True),
        (GuardEvent("verdict", "info", "warm-up", {"cause": "warm_up"}), False, False),
        (GuardEvent("remedy", "warning", "rolled back"), True, True),
    ],
)
def test_what_is_false_is_counted(told: GuardEvent, changes: bool, false: bool) -> None:
    assert healthy_runs.is_false(told, changes) == false


def test_a_run_is_the_same_each_time() -> None:
    first, second = healthy_runs.one(3), healthy_runs.one(3)
    assert first == second
    assert torch.initial_seed() == 0
