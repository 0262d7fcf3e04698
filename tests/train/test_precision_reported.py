"""The start of a run tells which precision was asked for, which one runs, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.precision import select
from halfstep.precision.select import choose_precision
from halfstep.step import stepper
from halfstep.step.experiment.start_check import StartCheck, check_start
from tests.support.devices import named
from tests.train.test_run_resumed import events, fit, stopped


@pytest.mark.parametrize(
    ("asked", "rungs", "findings"),
    [
        ("bf16", ["bf16"], []),
        ("fp8", ["fp8", "bf16"], ["precision.substituted"]),
        ("fp16", ["fp16"], ["precision.slow"]),
    ],
)
def test_what_runs_is_told_beside_what_was_asked_for(
    asked: str, rungs: list[str], findings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "describe_device", lambda device: named("Xeon with AMX"))
    (start,) = events(fit(tmp_path, precision=asked).dir, "start")
    choice = choose_precision(asked, device=named("Xeon with AMX"), fallback=True)
    told = start["precision"]
    assert (told["asked"], told["took"], told["chosen"]) == (choice.asked, choice.took, rungs[-1])
    assert told["reasons"] == list(choice.reasons)
    assert [reason.split()[0] for reason in told["reasons"]] == rungs
    assert [finding["id"] for finding in start["findings"]] == findings


def test_a_resumed_run_was_asked_for_what_its_recipe_says(tmp_path: Path) -> None:
    stopped(tmp_path, precision="auto")
    fit(tmp_path, precision="auto")
    begun, resumed = events(tmp_path / "run", "start")
    assert begun["precision"]["asked"] == resumed["precision"]["asked"] == "auto"
    assert begun["precision"]["chosen"] == resumed["precision"]["chosen"]


def test_the_start_check_runs_once_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "describe_device", lambda device: named("Xeon with AMX"))
    results: list[StartCheck | None] = []

    def noted(*given: Any, **more: Any) -> StartCheck | None:
        results.append(check_start(*given, **more))
        return results[-1]

    monkeypatch.setattr(stepper, "check_start", noted)
    stopped(tmp_path, precision="bf16")
    fit(tmp_path, precision="bf16")
    assert [result is not None and not result.not_checked for result in results] == [True]
    (tmp_path / "other").mkdir()
    fit(tmp_path / "other", precision="bf16", train__check=False)
    assert len(results) == 1
