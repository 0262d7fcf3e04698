"""Curves: the right panels, every spike, nothing that is not finite, a picture for every run."""

from __future__ import annotations

import io
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from halfstep.draw import curves
from halfstep.draw.curves import Series, draw_curves, thinned


def start(metric: str = "iou", label: str = "a_run") -> dict[str, Any]:
    return {"event": "start", "label": label, "metric": {"name": metric}, "precision": {"chosen": "fp16"}}


def step(attempt: int, loss: Any = 0.5, reason: str | None = None, **changes: Any) -> dict[str, Any]:
    fields = {"event": "step", "attempt": attempt, "loss": loss, "lr": 1e-3, "loss_scale": 1.0}
    return {**fields, "applied": reason is None, "reason": reason, **changes}


def epoch(number: int, train: dict[str, Any], val: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"event": "epoch", "epoch": number, "train": train, "val": val}


def figure_of(events: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that was drawn, and the picture beside it."""
    made: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(curves, "Figure", Kept)
    draw_curves(events, path)
    assert imread(io.BytesIO(path.read_bytes())).shape[:2] == (600, 900)
    return made[0]


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


def lines(figure: Figure, panel: int = 0) -> dict[str, Any]:
    return {str(line.get_label()): line for line in figure.axes[panel].lines}


def test_a_run_with_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [start(), step(1, 0.9, "gradient_overflow", loss_scale=65536.0), step(2, 0.8, loss_scale=32768.0)]
    events += [epoch(1, {"loss": 0.7, "iou": 0.4}, {"loss": 0.75, "iou": 0.35})]
    figure = figure_of(events, tmp_path / "curves.png", monkeypatch)
    assert titles(figure) == ["Loss", "iou", "Learning rate", "Loss scale"]
    drawn = lines(figure)
    assert list(drawn) == ["train, each step", "train, each epoch", "val, each epoch", "skipped: 1 gradient_overflow"]
    assert list(drawn["train, each step"].get_ydata()) == [0.9, 0.8]
    assert list(drawn["val, each epoch"].get_xdata()) == [2.0]
    assert list(drawn["skipped: 1 gradient_overflow"].get_xdata()) == [1.0]
    assert [list(line.get_ydata()) for line in figure.axes[1].lines] == [[0.4], [0.35]]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_panels_are_there_only_for_what_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "curves.png"
    assert titles(figure_of([start("loss"), step(1)], picture, monkeypatch)) == ["Loss", "Learning rate"]
    only_train = [start(), step(1), epoch(1, {"loss": 0.5, "iou": 0.4})]
    figure = figure_of(only_train, picture, monkeypatch)
    assert titles(figure) == ["Loss", "iou", "Learning rate"]
    assert list(lines(figure)) == ["train, each step", "train, each epoch"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, "NaN", "Infinity", 1.7e308, None])
def test_what_is_not_finite_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any) -> None:
    events = [start(), *(step(n, loss, "loss_not_finite") for n in range(1, 20))]
    events.append(epoch(1, {"loss": loss, "iou": loss}, {"loss": loss}))
    figure = figure_of(events, tmp_path / "curves.png", monkeypatch)
    assert titles(figure) == ["Loss", "Learning rate"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["no finite numbers"]
    assert "skipped: 19 loss_not_finite" in lines(figure)


def test_a_run_without_a_step_has_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figure_of([], tmp_path / "curves.png", monkeypatch)
    assert [text.get_text() for text in figure.axes[0].texts] == ["no finite numbers"]


def test_one_point_is_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = figure_of([step(1)], tmp_path / "curves.png", monkeypatch).axes[0].lines
    assert line.get_marker() == "."


def test_a_spike_does_not_flatten_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = [step(n, 0.5 + 0.1 / n) for n in range(1, 50)]
    assert figure_of(calm, tmp_path / "a.png", monkeypatch).axes[0].get_yscale() == "linear"
    assert figure_of([*calm, step(50, 1e20)], tmp_path / "b.png", monkeypatch).axes[0].get_yscale() == "log"
    assert figure_of([*calm, step(50, -1e20)], tmp_path / "c.png", monkeypatch).axes[0].get_yscale() == "linear"


def test_a_million_steps_keep_every_spike_and_few_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1_000_000
    series = Series()
    y = np.linspace(1.0, 0.1, count)
    y[777_777], y[333_333], y[5_000:6_000] = 40.0, 0.001, np.nan
    for column, values in (("attempt", np.arange(1.0, count + 1)), ("loss", y), ("lr", y), ("loss_scale", y * 0 + 1)):
        getattr(series, column).frombytes(values.astype(float).tobytes())
    series.skipped_at.frombytes(np.arange(5001.0, 6001.0).tobytes())
    series.skipped["loss_not_finite"] = 1000
    figure = figure_of(series, tmp_path / "curves.png", monkeypatch)
    line = lines(figure)["train, each step"]
    assert len(line.get_xdata()) < 2000
    assert (np.max(line.get_ydata()), np.min(line.get_ydata())) == (40.0, 0.001)
    assert line.get_xdata()[np.argmax(line.get_ydata())] == 777_778
    assert len(lines(figure)["skipped: 1,000 loss_not_finite"].get_xdata()) < 10


def test_thinning_keeps_the_order_and_short_curves_whole() -> None:
    x, y = np.arange(1000.0), np.sin(np.arange(1000.0))
    assert np.array_equal(thinned(x, y)[1], y)
    short_x, short_y = thinned(x, y, bins=20)
    assert len(short_x) <= 40
    assert np.all(np.diff(short_x) > 0)
    assert np.array_equal(short_y, y[short_x.astype(int)])
    every_other, finite = thinned(x, np.where(x % 2 == 0, np.nan, y))
    assert np.array_equal(every_other, x[1::2])
    assert np.array_equal(finite, y[1::2])


def test_text_from_outside_is_no_formula_and_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = r"$\frac{$" + "x" * 300
    events = [start(metric, "a$b\n" * 50), step(1, reason="guard:$x$"), epoch(1, {metric: 0.5})]
    figure = figure_of(events, tmp_path / "curves.png", monkeypatch)
    assert len(figure.axes[1].get_title()) <= 80


def test_a_picture_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "curves.png"
    draw_curves([step(1)], path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        draw_curves([step(1), step(2, 0.1)], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_the_global_state_of_pyplot_is_left_alone() -> None:
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
