"""Draw a run as curves: loss, metric, learning rate, loss scale and skips, from events or numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.draw.figures import as_label, write_figure
from halfstep.draw.series import Numbers, Series, series_of, thinned
from halfstep.errors import MissingExtra

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator
except ImportError as missing:
    raise MissingExtra(
        "matplotlib, which is not installed",
        allowed="drawing curves with matplotlib",
        do="pip install 'halfstep[train]'",
    ) from missing

# Okabe and Ito's palette, distinguishable with any color vision; lines differ in their markers too.
_TRAIN, _VAL, _SKIP, _GRID = "#0072B2", "#D55E00", "#CC79A7", "#DDDDDD"
_WIDTH, _HEIGHT, _DPI = 9.0, 6.0, 100
_TICKS = 100
_LOG_FROM = 50.0
_FEW = 60


def draw_curves(run: Series | Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a picture of 900 × 600 pixels atomically. A run without steps gets a picture that says so."""
    series = run if isinstance(run, Series) else series_of(run)
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    # Agg directly, not pyplot: pyplot keeps global state and may need a display.
    panels = _panels(series)
    axes = figure.subplot_mosaic(_mosaic(panels), sharex=True)
    drawn = {"loss": _loss, "metric": _metric, "rate": _rate, "scale": _scale}
    for name in panels:
        drawn[name](axes[name], series)
        _finish(axes[name], series.attempt[-1] if series.attempt else 1.0)
    if series.title:
        figure.suptitle(as_label(series.title), fontsize=12, fontweight="bold")
    # Drawn in memory first: an error in matplotlib must not leave half a file.
    write_figure(figure, path)


def _panels(series: Series) -> list[str]:
    has_metric = series.metric not in ("", "loss") and any(
        np.isfinite(v).any() for v in series.of_epochs(series.metric)
    )
    scales = np.frombuffer(series.loss_scale) if series.loss_scale else np.zeros(0)
    is_scaled = bool(np.any(np.isfinite(scales) & (scales != 1.0)))
    return ["loss", *(["metric"] if has_metric else []), "rate", *(["scale"] if is_scaled else [])]


def _mosaic(panels: list[str]) -> list[Any]:
    """Return the layout: the loss panel is the largest, beside or above the others."""
    # A loss scale is drawn only in fp16, and a metric only where a task has one beside the loss: two to four panels.
    if len(panels) == 4:
        return [panels[:2], panels[2:]]
    if len(panels) == 3:
        return [[panels[0]] * 2, panels[1:]]
    return [[panels[0]], [panels[0]], [panels[1]]]


def _loss(axes: Axes, series: Series) -> None:
    # A run of a million steps would take long to draw, and no screen shows them all.
    x, y = thinned(np.array(series.attempt), np.array(series.loss))
    mark = "." if len(x) <= _FEW else ""
    axes.plot(x, y, color=_TRAIN, alpha=0.4, linewidth=0.8, marker=mark, label="train, each step")
    train, val = series.of_epochs("loss")
    _epochs(axes, series, train, val)
    _fit_to(axes, np.concatenate([y, train, val]))
    _mark_skips(axes, series)
    axes.set_title("Loss")
    axes.set_ylabel("loss")


def _metric(axes: Axes, series: Series) -> None:
    _epochs(axes, series, *series.of_epochs(series.metric))
    axes.set_title(as_label(series.metric))
    axes.set_ylabel(as_label(series.metric))


def _rate(axes: Axes, series: Series) -> None:
    x, y = thinned(np.array(series.attempt), np.array(series.lr))
    axes.plot(x, y, color=_TRAIN, marker="." if len(x) <= _FEW else "", drawstyle="steps-post")
    axes.set_title("Learning rate")
    axes.set_ylabel("learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _scale(axes: Axes, series: Series) -> None:
    x, y = thinned(np.array(series.attempt), np.array(series.loss_scale))
    axes.plot(x, y, color=_TRAIN, marker="." if len(x) <= _FEW else "", drawstyle="steps-post")
    axes.set_yscale("log", base=2)
    _mark_skips(axes, series)
    axes.set_title("Loss scale")
    axes.set_ylabel("loss scale")


def _epochs(axes: Axes, series: Series, train: Numbers, val: Numbers) -> None:
    at = np.array(series.epoch_at)
    few = len(at) <= _FEW
    for y, label, color, mark, line in ((train, "train", _TRAIN, "o", "-"), (val, "val", _VAL, "s", "--")):
        known = np.isfinite(y)
        if known.any():
            style: dict[str, Any] = {
                "marker": mark if few else "",
                "markersize": 4,
                "linestyle": line,
                "linewidth": 1.6,
            }
            axes.plot(at[known], y[known], label=f"{label}, each epoch", color=color, **style)


def _mark_skips(axes: Axes, series: Series) -> None:
    """Mark skipped steps with ticks at the lower edge, as many as can be distinguished."""
    if not series.skipped_at:
        return
    at = np.array(series.skipped_at)
    span = max(series.attempt[-1] - series.attempt[0], 1.0)
    # One tick per hundredth of the axis: more could not be told apart.
    _, kept = np.unique(np.floor((at - series.attempt[0]) / span * _TICKS), return_index=True)
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in series.skipped.most_common(3))
    height = axes.get_xaxis_transform()
    axes.plot(
        at[kept],
        np.full(len(kept), 0.035),
        transform=height,
        linestyle="",
        marker="|",
        markersize=9,
        markeredgewidth=1.2,
        color=_SKIP,
        label=f"skipped: {as_label(reasons)}",
    )


def _fit_to(axes: Axes, y: Numbers) -> None:
    """Use a log scale where one spike would flatten the rest, and label an empty panel."""
    finite = y[np.isfinite(y)]
    if not len(finite):
        axes.text(0.5, 0.5, "no finite numbers", transform=axes.transAxes, ha="center", color="#555555")
    elif finite.min() > 0.0 and finite.max() / finite.min() > _LOG_FROM:
        axes.set_yscale("log")


def _finish(axes: Axes, last: float) -> None:
    axes.set_xlabel("attempted steps")
    # A run of one step still needs an axis of some length.
    axes.set_xlim(0.0, max(last, 1.0) * 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelbottom=True)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=True, framealpha=0.8, loc="best")
