"""The end of a run: what its weights were worth, from its journal, and the command that may fix it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from halfstep.guard.alarms.spike import REFUSED
from halfstep.journal.jsonl import JOURNAL, format_event_line
from halfstep.recipe.sources import read_recipe
from halfstep.train.give_up import (
    ACCEPT,
    LossHistory,
    build_launcher_words,
    build_resume_command,
    format_fit_call,
    read_recipe_lr,
    suggest_lower_lr,
)


@pytest.mark.parametrize(
    ("rate", "rates", "in_recipe", "suggested"),
    [
        (1e6, (4e4, 5e4, 6.5e4), None, "6000"),
        (1e6, (4e4, 5e4, 6.5e4), 2e-3, "0.002"),
        (3e-3, (3e-3, 2e-3, 1e-6), 2e-3, "0.0003"),
        (1e6, (6.7e4,), None, "6000"),
        (1e-2, (), None, "0.001"),
        (1e-2, (0.0,), None, "0.001"),
        (1e-2, (1e-2,), 0.0, "0.001"),
    ],
)
def test_a_rate_that_is_worth_a_try(rate: float, rates: tuple[float, ...], in_recipe: float, suggested: str) -> None:
    assert suggest_lower_lr(rate, rates, in_recipe) == suggested


def test_the_rate_that_the_recipe_has(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: tiny\noptimizer: {lr: 3e-4}\n")
    (tmp_path / "b.yaml").write_text("task: tiny\n")
    assert read_recipe_lr(f"halfstep train {tmp_path}/a.yaml --lr 5") == 3e-4
    assert read_recipe_lr(f"halfstep train {tmp_path}/b.yaml") is None
    assert read_recipe_lr(f"halfstep train {tmp_path}/gone.yaml") is None
    assert read_recipe_lr(format_fit_call(tmp_path / "a.yaml")) == 3e-4
    assert read_recipe_lr(format_fit_call({"task": "tiny"})) is None
    assert read_recipe_lr("halfstep.fit(broken") is None
    assert read_recipe_lr("halfstep train") is None
    assert read_recipe_lr("halfstep train classification_tiny --lr 1e6") == 2e-3


def test_python_and_the_command_line_advise_the_same_rate(tmp_path: Path) -> None:
    typed = "halfstep train segmentation_tiny --learning-rate 1e4 --per_device_train_batch_size 4"
    called = format_fit_call("segmentation_tiny")
    rates = [float(suggest_lower_lr(1e4, (1e4,), read_recipe_lr(command))) for command in (typed, called)]
    assert rates[0] == rates[1] == read_recipe("segmentation_tiny").raw["optimizer"]["lr"]
    changes = {"optimizer.lr": rates[0]}
    assert build_resume_command(tmp_path, typed, changes, None) == (
        f"halfstep train segmentation_tiny --per_device_train_batch_size 4 optimizer.lr={rates[0]:g}"
    )
    advice = build_resume_command(tmp_path, called, changes, ACCEPT)
    assert advice == f"halfstep.fit('segmentation_tiny', settings={changes!r}, accept_recipe_change=True)"


def test_as_many_processes_as_before() -> None:
    assert build_launcher_words(1) == ["halfstep"]
    assert build_launcher_words(2) == ["torchrun", "--nproc-per-node", "2", "-m", "halfstep"]


# -- losses -----------------------------------------------------------------------------------------------------------


NOT_FINITE = "loss_not_finite"


def told(folder: Path, *steps: tuple[Any, str | None]) -> LossHistory:
    lines = [
        format_event_line({"event": "step", "attempt": n, "loss": loss, "applied": reason is None, "reason": reason})
        for n, (loss, reason) in enumerate(steps, start=1)
    ]
    (folder / JOURNAL).write_text("".join(lines))
    return LossHistory(folder)


def ruined(losses: LossHistory, most: int = 9) -> list[int]:
    return [attempt for attempt in range(most) if losses.ruined(attempt)]


def test_weights_have_the_loss_of_the_step_after_them(tmp_path: Path) -> None:
    losses = told(tmp_path, (2.0, None), (3.0, None), (900.0, None), (5000.0, None), (19.0, None))
    assert ruined(losses) == [2, 3]


def test_of_several_steps_with_the_same_weights_the_lowest_counts(tmp_path: Path) -> None:
    losses = told(tmp_path, (2.0, None), (1.0, None), (900.0, REFUSED), (math.nan, NOT_FINITE), (1.5, None))
    assert ruined(losses) == []
    losses = told(tmp_path, (2.0, None), (1.0, None), (900.0, REFUSED), (math.inf, NOT_FINITE), (800.0, REFUSED))
    assert ruined(losses) == [2, 3, 4]


@pytest.mark.parametrize("first", [0.0, math.nan])
def test_without_a_first_loss_nothing_is_known(tmp_path: Path, first: float) -> None:
    assert ruined(told(tmp_path, (first, None))) == []
    assert ruined(told(tmp_path)) == []


def test_a_loss_below_zero(tmp_path: Path) -> None:
    assert ruined(told(tmp_path, (-2.0, None), (-50.0, None), (10.0, None), (30.0, None))) == [3]


def test_no_journal_and_a_damaged_one(tmp_path: Path) -> None:
    assert ruined(LossHistory(tmp_path)) == []
    (tmp_path / JOURNAL).write_text(
        '{"event": "step", "attempt": "x"}\n{"event": "step"}\nno\n{"event":"step","attempt":1}\n'
    )
    assert ruined(LossHistory(tmp_path)) == []
