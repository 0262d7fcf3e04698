"""Saves by time: rank 0's clock decides for all, and the interval follows from what saves cost and how runs fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from halfstep import distributed
from halfstep.checkpoint.paths import list_generations
from halfstep.errors import BadRecipe
from halfstep.save_interval import PUBLISHED, STATED, SaveClock, compute_save_interval, estimate_failure_interval
from tests.support.ranks import Ranks
from tests.train.test_loop import RECIPE, events, fit
from tests.train.test_sharded_runs import fit as fit_on_ranks


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_save_is_due_when_the_minutes_have_passed_since_the_last_one() -> None:
    hands = Hands()
    clock = SaveClock(2.0, 4, hands)
    hands.now += 119.0
    assert not clock.is_due
    hands.now += 2.0
    assert clock.is_due
    clock.saved()
    assert not clock.is_due
    assert not SaveClock(None, 4, lambda: hands.now * 1e9).is_due


def test_auto_takes_the_interval_that_loses_the_least_once_a_save_was_timed() -> None:
    hands = Hands()
    clock = SaveClock("auto", 992, hands)
    hands.now += 600.0
    assert clock.is_due, "before any save was timed"
    for blocked in (30.0, 2.0, 2.0):  # the first allocates
        clock.saved()
        clock.timed(blocked)
    # 40 stops in 14 days of 992 GPUs: 8.4 h; sqrt(2 * 2 s * 8.4 h) is 348 s.
    assert clock.interval == pytest.approx(math.sqrt(2 * 2.0 * 8.4 * 3600))
    hands.now += 347.0
    assert not clock.is_due
    hands.now += 2.0
    assert clock.is_due


def test_no_other_interval_loses_less() -> None:
    stall, between = 2.0, estimate_failure_interval(PUBLISHED[0], 1024)

    def lost(interval: float) -> float:
        return stall / interval + interval / 2 / between

    best = compute_save_interval(stall, between)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_a_run_longer_than_the_interval_is_told_of_it() -> None:
    hands = Hands()
    clock = SaveClock(None, 992, hands)
    hands.now += 3600.0
    assert clock.proposal() is None, "nothing was saved"
    clock.timed(2.0)
    told = clock.proposal()
    assert told is not None
    assert "2 s each" in told
    assert f"8 h, the rate of {STATED.name} on 992 ranks" in told
    assert "checkpoint.every_minutes=5.8 " in told
    hands.now -= 3500.0
    assert clock.proposal() is None, "shorter than the interval"
    assert SaveClock("auto", 992, hands).proposal() is None


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def attempts(folder: Path) -> list[int]:
    return sorted(one.attempt for one in list_generations(folder / "checkpoints"))


def test_a_run_saves_by_time(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps an epoch; every answer of the clock is two seconds later."""
    seconds = iter(range(0, 10**6, 2))
    monkeypatch.setattr(SaveClock.__init__, "__defaults__", (lambda: float(next(seconds)),))
    run = fit(recipe, train__epochs=2, checkpoint__every_minutes=0.1, checkpoint__keep=10)
    assert attempts(run.dir) == [3, 4, 7, 8]
    notes = [event["text"] for event in events(run, "note")]
    assert not any("every_minutes" in text for text in notes)


@pytest.mark.wording
def test_minutes_that_are_none_are_refused(recipe: Path) -> None:
    with pytest.raises(BadRecipe, match="every_minutes"):
        fit(recipe, checkpoint__every_minutes=0.0)


def timed_by_rank(rank: int, folder: str) -> dict[str, Any]:
    """On rank 0 a save is due before the second step, on rank 1 always."""
    asked = []

    def is_due(clock: SaveClock) -> bool:
        asked.append(1)
        return distributed.rank() == 1 or len(asked) == 2

    before, SaveClock.is_due = SaveClock.is_due, property(is_due)  # type: ignore[assignment,method-assign]
    try:
        return fit_on_ranks(rank, folder, "ddp", {"train.epochs": 1, "checkpoint.every_minutes": 1.0})
    finally:
        SaveClock.is_due = before  # type: ignore[method-assign]


@pytest.mark.ranks
def test_all_ranks_save_after_the_step_that_rank_zeros_clock_names(on_ranks: Ranks, tmp_path: Path) -> None:
    found = on_ranks(timed_by_rank, str(tmp_path))
    assert [one["steps"] for one in found] == [3, 3], found
    assert attempts(tmp_path / "run") == [2, 3]
