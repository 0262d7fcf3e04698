"""Draw a run as curves: loss, metric, learning rate, loss scale and skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from halfstep.draw.series import Points, RunSeries, collect_series
from halfstep.draw.svg import write_svg
from halfstep.metric_names import format_metric_name, is_share
from halfstep.page import Curve, Curves, format_short_number, is_drawable

Skips = Sequence[tuple[float, str]]
Form = Callable[[float], str]


def draw_curves(run: RunSeries | Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the curves of a run as SVG, atomically. Curves of a run without steps say so."""
    series = run if isinstance(run, RunSeries) else collect_series(run)
    charts = build_series_charts(series)
    lost = "no finite loss" if charts[0].is_empty and series.attempt else ""
    write_svg(charts, path, ", ".join(filter(None, [series.title, lost])))


def build_series_charts(series: RunSeries) -> list[Curves]:
    """Return the charts of a run: its loss, its metric, its learning rate, and its loss scale if it has one."""
    of_steps = series.attempt
    charts = [build_loss_chart((of_steps, series.loss), series.of_epochs("loss")[1], series.skips)]
    if series.metric not in ("", "loss"):
        charts.append(build_metric_chart(series.metric, *series.of_epochs(series.metric)))
    charts.append(build_learning_rate_chart((of_steps, series.lr)))
    if has_loss_scale(series.loss_scale):
        charts.append(build_loss_scale_chart((of_steps, series.loss_scale), series.skips))
    return charts


def build_loss_chart(train: Points, val: Points, skips: Skips, form: Form = format_short_number) -> Curves:
    """Return the loss of every step, and of every evaluation."""
    return Curves("Loss", _build_curve_pair(train, val), y_title="loss", skips=skips, form=form)


def build_metric_chart(name: str, train: Points, val: Points, form: Form = format_short_number) -> Curves:
    """Return a metric of every epoch, under its usual name; a share such as IoU on an axis from 0 to 1."""
    title, curves = format_metric_name(name), _build_curve_pair(train, val)
    return Curves(title, curves, y_title=title, scale=choose_metric_scale(name), form=form)


def choose_metric_scale(name: str) -> Literal["auto", "share"]:
    """Return the scale of the axis of a metric."""
    return "share" if is_share(name) else "auto"


def build_learning_rate_chart(points: Points, form: Form = format_short_number) -> Curves:
    """Return the learning rate of every step."""
    return Curves("Learning rate", (Curve("each step", *points),), y_title="learning rate", scale="zero", form=form)


def build_loss_scale_chart(points: Points, skips: Skips, form: Form = format_short_number) -> Curves:
    """Return the loss scale of every step."""
    curve = Curve("each step", *points)
    return Curves("Loss scale", (curve,), y_title="loss scale", scale="log2", skips=skips, form=form)


def has_loss_scale(loss_scales: Iterable[float]) -> bool:
    """Return whether a run has a loss scale: without one, it is 1 all the way."""
    return any(is_drawable(scale) and scale != 1.0 for scale in loss_scales)


def _build_curve_pair(train: Points, val: Points) -> tuple[Curve, Curve]:
    return Curve("train", *train), Curve("val", *val, dashed=True, color=1)
