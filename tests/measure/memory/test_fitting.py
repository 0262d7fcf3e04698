"""The largest batch: exact, whatever shape the peak has as a function of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.devices import device_named
from halfstep.measure.memory.estimate import estimate_device_ledger, estimate_ledger
from halfstep.measure.memory.fitting import MOST, estimate_lever_ledgers, find_largest_batch
from halfstep.measure.memory.ledger import PARTS, Ledger
from halfstep.measure.setting import StepSetting
from tests.support import cases


def convolutions() -> Case:
    return build_case(*cases.convolutions())


def peaks(peak: Callable[[int], int]) -> Any:
    """Ledgers with a peak of this shape, for searches that no model is needed for."""

    def ledger(_make: Any, setting: StepSetting) -> Ledger:
        batch = setting.batch or 4
        parts = dict.fromkeys(PARTS, 0) | {"activations": peak(batch)}
        return Ledger(setting, "", batch, parts, parts, {}, {}, "")

    return ledger


SHAPES: dict[str, Callable[[int], int]] = {
    "a line": lambda b: 1000 + 7 * b,
    "the update hides it": lambda b: max(50_000, 9 * b),
    "steps": lambda b: 64 * (b // 16 + 1),
    "a square": lambda b: b * b + 3,
    "slow, then fast": lambda b: b if b < 3000 else 3000 + 1000 * (b - 3000),
    "fast, then slow": lambda b: 100 * b if b < 50 else 5000 + b,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [64, 4_003, 50_000, 99_999])
@pytest.mark.parametrize("start", [None, 1, 7, 4096])
def test_the_next_size_is_always_over(shape: str, limit: int, start: int | None) -> None:
    peak = SHAPES[shape]
    fit = find_largest_batch(convolutions, StepSetting(batch=start), limit, peaks(peak))
    if peak(1) > limit:
        assert (fit.batch, fit.missing, fit.ledger.samples) == (0, peak(1) - limit, 1)
        return
    assert peak(fit.batch) <= limit < peak(fit.batch + 1)
    assert fit.ledger.samples == fit.batch
    assert fit.batch - 8 < fit.preferred <= fit.batch
    assert fit.preferred % 8 == 0
    assert len(fit.searched) <= 30
    assert all(taken == peak(batch) for batch, taken in fit.searched)


def test_a_line_is_closed_in_few_ledgers() -> None:
    assert (
        len(find_largest_batch(convolutions, StepSetting(batch=8), 10**9, peaks(lambda b: 10**6 + 12_345 * b)).searched)
        <= 6
    )


def test_a_search_ends_where_nothing_grows() -> None:
    fit = find_largest_batch(convolutions, StepSetting(), 10, peaks(lambda b: 5))
    assert fit.batch == MOST
    assert fit.as_dict()["at_least"]


@pytest.mark.wording
def test_a_size_that_cannot_run_is_stepped_over() -> None:
    def peak(batch: int) -> int:
        if batch == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return 10 * batch

    assert find_largest_batch(convolutions, StepSetting(), 55, peaks(peak)).batch == 5
    with pytest.raises(HalfstepError, match="told"):
        find_largest_batch(convolutions, StepSetting(), 55, peaks(lambda b: _raise(WrongUse("told"))))


def test_what_fails_at_every_size_is_told_as_it_was_first() -> None:
    def peak(batch: int) -> int:
        raise ValueError(f"no batch of {batch}")

    with pytest.raises(ValueError, match="no batch of 1"):
        find_largest_batch(convolutions, StepSetting(), 55, peaks(peak))


@pytest.mark.parametrize("shape", SHAPES)
def test_where_ledgers_are_dear_what_fits_is_near_the_end(shape: str) -> None:
    peak = SHAPES[shape]
    fit = find_largest_batch(convolutions, StepSetting(batch=4), 99_999, peaks(peak), tolerance=0.1)
    assert peak(fit.batch) <= 99_999
    assert fit.ledger.samples == fit.batch
    assert fit.as_dict()["about"] is (fit.batch + 1 not in dict(fit.searched))


def test_a_peak_that_hides_under_the_update_takes_four_ledgers() -> None:
    """As of a large model: activations grow from the first sample, the peak only when they outgrow the gradients."""

    def ledger(_make: Any, setting: StepSetting) -> Ledger:
        batch = setting.batch or 1
        fixed = {"weights": 40_000, "optimizer": 80_000}
        backward, update = {"activations": 900 * batch, "temporary": 300 * batch}, {"gradients": 40_000}
        at_peak = backward if sum(backward.values()) > 40_000 else update
        empty = dict.fromkeys(PARTS, 0)
        whole = empty | fixed | backward | update
        return Ledger(setting, "", batch, empty | fixed | at_peak, whole, {}, {}, "")

    fit = find_largest_batch(convolutions, StepSetting(batch=1), 360_000, ledger, tolerance=0.1)
    assert len(fit.searched) <= 4
    assert 180 <= fit.batch <= 200
    exact = find_largest_batch(convolutions, StepSetting(batch=1), 360_000, ledger)
    assert (exact.batch, exact.as_dict()["about"]) == (200, False)
    assert len(exact.searched) <= 6


def _raise(error: Exception) -> int:
    raise error


@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("fp32", (1, 5, 8, 9, 10, 13)),
        ("bf16", (8, 9, 10)),
        *(pytest.param(precision, range(1, 14), marks=pytest.mark.full) for precision in ("fp32", "bf16")),
    ],
)
def test_every_smaller_batch_of_a_real_model_fits_and_no_larger_one(precision: str, sizes: Sequence[int]) -> None:
    """With the ledgers of a GPU, at both sides of the limit; all sizes, one by one, with --full."""
    target = device_named("4GB")

    def on(make: Callable[[], Case], setting: StepSetting) -> Ledger:
        return estimate_device_ledger(make, setting, target)

    setting = StepSetting(precision=precision)
    limit = on(convolutions, replace(setting, batch=9)).peak + 100
    fit = find_largest_batch(convolutions, setting, limit, on)
    within = [batch for batch in sizes if on(convolutions, replace(setting, batch=batch)).peak <= limit]
    assert within == [batch for batch in sizes if batch <= fit.batch]
    assert fit.batch == 9
    assert fit.preferred == 8


def test_a_device_s_own_memory_is_filled_to_the_last_sample() -> None:
    def wide() -> Case:
        return build_case(
            nn.Sequential(nn.Linear(1 << 20, 4), nn.Tanh()), lambda m, b: m(b).sum(), torch.ones(2, 1 << 20)
        )

    target = device_named("4GB")
    fit = find_largest_batch(
        wide, StepSetting(), target.usable, lambda make, setting: estimate_device_ledger(make, setting, target)
    )
    assert fit.ledger.peak <= target.usable < fit.ledger.peak + 2 * (4 << 20)
    assert 500 < fit.batch < 1000


def test_levers_are_measured_and_not_promised() -> None:
    def deep() -> Case:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
        return build_case(nn.Sequential(*layers), lambda model, batch: model(batch).sum(), torch.randn(4096, 64))

    def whole_batch(make: Callable[[], Case], setting: StepSetting) -> Ledger:
        return estimate_ledger(make, replace(setting, batch=4096))

    fit = find_largest_batch(deep, StepSetting(), 10 << 20, whole_batch)
    assert fit.batch == 0
    assert fit.missing == whole_batch(deep, StepSetting()).peak - (10 << 20)
    ways = estimate_lever_ledgers(fit, deep, "bf16", whole_batch)
    assert [(way.setting.precision, way.setting.recompute) for way in ways] == [
        ("bf16", False),
        ("fp32", True),
        ("bf16", True),
    ]
    assert all(way.peak < fit.ledger.peak for way in ways)
