"""Curves of a run: the right charts, every spike, nothing that is not finite, a file for every run."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from halfstep.draw.curves import draw_curves
from halfstep.draw.series import RunSeries
from halfstep.draw.thinning import thin_curve_points

SVG = "{http://www.w3.org/2000/svg}"


def start(metric: str = "iou", label: str = "a_run") -> dict[str, Any]:
    return {"event": "start", "label": label, "metric": {"name": metric}, "precision": {"chosen": "fp16"}}


def step(attempt: int, loss: Any = 0.5, reason: str | None = None, **changes: Any) -> dict[str, Any]:
    fields = {"event": "step", "attempt": attempt, "loss": loss, "lr": 1e-3, "loss_scale": 1.0}
    return {**fields, "applied": reason is None, "reason": reason, **changes}


def epoch(number: int, train: dict[str, Any], val: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"event": "epoch", "epoch": number, "train": train, "val": val}


def texts(events: Any, path: Path, tag: str = "text") -> list[str]:
    """The texts of the drawing; with `title`, those shown on hover."""
    draw_curves(events, path)
    return ["".join(found.itertext()) for found in ElementTree.parse(path).iter(f"{SVG}{tag}")]


def test_a_run_with_everything(tmp_path: Path) -> None:
    events = [start(), step(1, 0.9, "gradient_overflow", loss_scale=65536.0), step(2, 0.8, loss_scale=32768.0)]
    events += [epoch(1, {"loss": 0.7, "iou": 0.4}, {"loss": 0.75, "iou": 0.35})]
    shown = texts(events, tmp_path / "curves.svg")
    assert {"a_run, fp16", "Loss", "IoU", "Learning rate", "Loss scale", "train", "val", "skipped step"} <= set(shown)
    assert shown.count("attempted steps") == 4
    hovers = texts(events, tmp_path / "curves.svg", "title")
    assert {"step 1: train 0.9", "step 2: train 0.8; val 0.75", "step 2: train 0.4; val 0.35"} <= set(hovers)
    assert hovers.count("step 1 skipped: gradient overflow") == 2


def test_charts_are_there_only_for_recorded_numbers(tmp_path: Path) -> None:
    shown = texts([start("loss"), step(1)], tmp_path / "curves.svg")
    assert "Learning rate" in shown
    assert not {"iou", "Loss scale", "val"} & set(shown)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, "NaN", "Infinity", 1.7e308, None])
def test_what_is_not_finite_is_left_out_and_said(tmp_path: Path, loss: Any) -> None:
    events = [start(), *(step(n, loss, "loss_not_finite") for n in range(1, 20))]
    events.append(epoch(1, {"loss": loss, "iou": loss}, {"loss": loss}))
    shown = texts(events, tmp_path / "curves.svg")
    assert "a_run, fp16, no finite loss" in shown
    assert "Learning rate" in shown
    assert not {"Loss", "iou"} & set(shown)


def test_a_run_without_a_step_has_a_file(tmp_path: Path) -> None:
    assert "no finite numbers" in texts([], tmp_path / "curves.svg")


def test_a_million_steps_keep_every_spike_and_few_points(tmp_path: Path) -> None:
    count = 1_000_000
    series = RunSeries()
    losses = [1.0 - 0.9 * n / count for n in range(count)]
    losses[777_777], losses[333_333], losses[5_000:6_000] = 40.0, 0.001, [math.nan] * 1000
    for column, values in (("attempt", range(1, count + 1)), ("loss", losses), ("lr", losses), ("loss_scale", [])):
        getattr(series, column).extend(values)
    series.skips += [(float(n), "loss_not_finite") for n in range(5001, 6001)]
    hovers = texts(series, tmp_path / "curves.svg", "title")
    assert (tmp_path / "curves.svg").stat().st_size < 60_000
    assert "steps 5,001 to 6,000: 1,000 × loss not finite" in hovers
    x, y = thin_curve_points(series.attempt, series.loss, 150)
    assert (max(y), min(y), x[y.index(40.0)]) == (40.0, 0.001, 777_778)


def test_thinning_keeps_the_order_and_short_curves_whole() -> None:
    x, y = [float(n) for n in range(1000)], [math.sin(n) for n in range(1000)]
    assert thin_curve_points(x, y, 600) == (x, y)
    short_x, short_y = thin_curve_points(x, y, 20)
    assert len(short_x) <= 42
    assert short_x == sorted(set(short_x))
    assert (short_x[0], short_x[-1], short_y) == (0.0, 999.0, [y[int(at)] for at in short_x])
    assert thin_curve_points(x, [math.nan if n % 2 == 0 else y[n] for n in range(1000)], 600) == (x[1::2], y[1::2])


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "curves.svg"
    draw_curves([step(1)], path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        draw_curves([step(1), step(2, 0.1)], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["curves.svg"]
