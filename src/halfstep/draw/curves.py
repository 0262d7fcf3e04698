"""A run as curves: loss, metric, learning rate, loss scale and skips, from plain events or numbers."""

from __future__ import annotations

import io
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import MissingExtra
from halfstep.files import replacing

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator
except ImportError as missing:
    raise MissingExtra(
        "matplotlib, which is not installed",
        allowed="drawing curves with matplotlib",
        do="pip install halfstep[train]",
    ) from missing

Numbers = np.ndarray[Any, np.dtype[np.float64]]

# Okabe and Ito's colours, which people with any colour vision tell apart; lines differ in their marks too.
_TRAIN, _VAL, _SKIP, _GRID = "#0072B2", "#D55E00", "#CC79A7", "#DDDDDD"
_WIDTH, _HEIGHT, _DPI = 9.0, 6.0, 100
_BINS, _TICKS = 600, 100
_LOG_FROM = 50.0
_FEW = 60
_LARGEST = 1e300


class Series:
    """What curves are drawn from: eight bytes a number, however long the run."""

    def __init__(self) -> None:
        self.title, self.metric = "", ""
        self.attempt, self.loss, self.lr, self.loss_scale = (array("d") for _ in range(4))
        self.skipped_at = array("d")
        self.skipped: Counter[str] = Counter()
        self.epoch_at = array("d")
        self.epochs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Take what an event says of a curve; others say nothing."""
        kind = event["event"]
        if kind == "step":
            self._add_step(event)
        elif kind == "epoch":
            self.epoch_at.append(self.attempt[-1] if self.attempt else float(event["epoch"]))
            self.epochs.append((event.get("train") or {}, event.get("val") or {}))
        elif kind == "start":
            self.metric = str((event.get("metric") or {}).get("name") or "")
            chosen = (event.get("precision") or {}).get("chosen")
            self.title = str(event.get("label") or "") + (f", {chosen}" if chosen else "")

    def _add_step(self, event: Mapping[str, Any]) -> None:
        self.attempt.append(event["attempt"])
        self.loss.append(_real(event["loss"]))
        self.lr.append(_real(event["lr"]))
        self.loss_scale.append(_real(event.get("loss_scale")))
        if not event["applied"]:
            self.skipped_at.append(event["attempt"])
            self.skipped[str(event["reason"])] += 1

    def of_epochs(self, name: str) -> tuple[Numbers, Numbers]:
        """A number of every epoch, from training and from validation; NaN where there is none."""
        train = [_real(train.get(name)) for train, _ in self.epochs]
        val = [_real(val.get(name)) for _, val in self.epochs]
        return np.array(train, dtype=float), np.array(val, dtype=float)


def draw_curves(run: Series | Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a picture of 900 × 600 pixels, whole or not at all. A run without a step has a picture that says so."""
    series = run if isinstance(run, Series) else _series(run)
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = _panels(series)
    axes = figure.subplot_mosaic(_mosaic(panels), sharex=True)
    drawn = {"loss": _loss, "metric": _metric, "rate": _rate, "scale": _scale}
    for name in panels:
        drawn[name](axes[name], series)
        _finish(axes[name], series.attempt[-1] if series.attempt else 1.0)
    if series.title:
        figure.suptitle(_printable(series.title), fontsize=12, fontweight="bold")
    picture = io.BytesIO()
    canvas.print_png(picture)
    with replacing(path) as draft:
        draft.write_bytes(picture.getvalue())


def _series(events: Iterable[Mapping[str, Any]]) -> Series:
    series = Series()
    for event in events:
        series.add(event)
    return series


def _real(value: Any) -> float:
    """A number, or NaN: what is not finite, or too large for an axis, has no place on one."""
    number = float("nan") if value is None else float(value)
    return number if abs(number) < _LARGEST else float("nan")


def _panels(series: Series) -> list[str]:
    has_metric = series.metric not in ("", "loss") and any(
        np.isfinite(v).any() for v in series.of_epochs(series.metric)
    )
    scales = np.frombuffer(series.loss_scale) if series.loss_scale else np.zeros(0)
    is_scaled = bool(np.any(np.isfinite(scales) & (scales != 1.0)))
    return ["loss", *(["metric"] if has_metric else []), "rate", *(["scale"] if is_scaled else [])]


def _mosaic(panels: list[str]) -> list[Any]:
    """The loss is the largest, beside or above the others."""
    if len(panels) == 4:
        return [panels[:2], panels[2:]]
    if len(panels) == 3:
        return [[panels[0]] * 2, panels[1:]]
    return [[panels[0]], [panels[0]], [panels[1]]]


def _loss(axes: Axes, series: Series) -> None:
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
    axes.set_title(_printable(series.metric))
    axes.set_ylabel(_printable(series.metric))


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
    """A tick at the lower edge for every skipped step, as many as can be told apart."""
    if not series.skipped_at:
        return
    at = np.array(series.skipped_at)
    span = max(series.attempt[-1] - series.attempt[0], 1.0)
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
        label=f"skipped: {_printable(reasons)}",
    )


def _fit_to(axes: Axes, y: Numbers) -> None:
    """One spike must not flatten the rest of a curve, and an empty panel is no mistake of the reader's."""
    finite = y[np.isfinite(y)]
    if not len(finite):
        axes.text(0.5, 0.5, "no finite numbers", transform=axes.transAxes, ha="center", color="#555555")
    elif finite.min() > 0.0 and finite.max() / finite.min() > _LOG_FROM:
        axes.set_yscale("log")


def _finish(axes: Axes, last: float) -> None:
    axes.set_xlabel("attempted steps")
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


def thinned(x: Numbers, y: Numbers, bins: int = _BINS) -> tuple[Numbers, Numbers]:
    """At most two finite points a bin, its lowest and its highest, in their order: spikes stay, whatever the length."""
    # Steps without a finite number are marked as skipped; a gap for each would hide the points between them.
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) <= 2 * bins:
        return x, y
    chosen: list[int] = []
    for begin, end in pairwise(np.linspace(0, len(x), bins + 1).astype(int).tolist()):
        part = y[begin:end]
        chosen += sorted({begin + int(part.argmin()), begin + int(part.argmax())})
    return x[chosen], y[chosen]


def _printable(text: str) -> str:
    """Text that is neither markup for formulas nor longer than its place."""
    plain = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return plain if len(plain) <= 80 else plain[:79] + "…"
