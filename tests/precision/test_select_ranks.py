"""Rank 0 decides for all, refusals included; real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.errors import HalfstepError
from halfstep.precision import probe, select
from halfstep.precision.precision import resolve_precision_name
from halfstep.precision.probe import Measurements
from tests.support.devices import named
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def chosen(rank: int) -> tuple[str, int, list[str]]:
    """Each rank has a device and measurements of its own, and would choose differently alone."""
    measured = {"bf16": {"GEMM": 3.0}} if rank == 0 else {"fp16": {"GEMM": 9.0}}
    choice = select.choose_precision(device=named(["A100", "Tesla T4"][rank]), measured=Measurements(measured, {}, 0.0))
    return choice.precision.name, len(choice.rungs), [finding.id for finding in choice.findings]


def test_rank_zero_decides(on_ranks: Ranks) -> None:
    zero, one = on_ranks(chosen)
    assert zero == ("bf16", 3, [])
    assert one == ("bf16", 3, ["precision.uneven"])


def chosen_by_the_caller(rank: int) -> list[str]:
    choice = select.choose_precision(resolve_precision_name("bf16"), device=named("Tesla T4"))
    return [finding.id for finding in choice.findings]


def test_a_precision_object_is_no_decision_of_rank_zero(on_ranks: Ranks) -> None:
    assert on_ranks(chosen_by_the_caller) == [[], []]


def refused(rank: int) -> str:
    try:
        select.choose_precision("fp8", device=named(["A100", "Tesla T4"][rank]))
    except HalfstepError as error:
        return f"{type(error).__name__}: {error.given}"
    return "went on"


@pytest.mark.wording
def test_its_refusal_travels(on_ranks: Ranks) -> None:
    zero, one = on_ranks(refused)
    assert zero == one
    assert "fp8 on A100 is refused" in zero


def with_a_broken_probe(rank: int) -> tuple[str, int]:
    measured_here = []
    right = probe.measure_speedups

    def broken(*_args: Any, **_named: Any) -> Any:
        measured_here.append(rank)
        raise ValueError("the probe broke")

    probe.measure_speedups = broken
    try:
        select.choose_precision("auto", device="cpu")
        said = "went on"
    except HalfstepError as error:
        said = error.given
    finally:
        probe.measure_speedups = right
    return said, len(measured_here)


@pytest.mark.wording
def test_a_probe_that_breaks_on_rank_zero_is_told_to_all(on_ranks: Ranks) -> None:
    zero, one = on_ranks(with_a_broken_probe)
    assert zero[0] == one[0] == "rank 0 could not choose: ValueError('the probe broke')"
    assert (zero[1], one[1]) == (1, 0)
