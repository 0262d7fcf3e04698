"""Draw the candidates of a benchmark side by side: speed, memory by category, and the metric of each seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.draw.figures import as_label, write_figure
from halfstep.errors import MissingExtra

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as missing:
    raise MissingExtra(
        "matplotlib, which is not installed",
        allowed="drawing bars with matplotlib",
        do="pip install 'halfstep[train]'",
    ) from missing

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, distinguishable with any color vision, and two grays.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999", "#444444")
_BAR, _BASE, _GRID, _WRONG = "#0072B2", "#999999", "#DDDDDD", "#B2182B"
_DPI, _HEIGHT, _PANEL = 100, 4.2, 4.0
_LONGEST = 40
_FAR = 5.0
"""Margins from fp32 beyond which a dot becomes an arrow."""


def draw_bars(bench: Mapping[str, Any], path: Path) -> None:
    """Write a picture of a benchmark's plain data atomically; a panel without data says so."""
    rows: Rows = bench["rows"]
    # Room for more candidates than the usual three.
    wider = max(0, len(rows) - 3) * 0.7
    figure = Figure(figsize=(3 * (_PANEL + wider), _HEIGHT), dpi=_DPI, layout="constrained")
    # Agg directly, not pyplot: pyplot keeps global state and may need a display.
    speed, memory, metric = figure.subplots(1, 3)
    _speed(speed, rows)
    _memory(memory, rows)
    _metric(metric, rows, bench)
    figure.suptitle(as_label(bench["name"], _LONGEST), fontsize=12, fontweight="bold")
    write_figure(figure, path)


def _speed(axes: Axes, rows: Rows) -> None:
    axes.set_title("Speed, with its 95 % interval")
    axes.set_ylabel("times as fast as strict fp32")
    gains = [row["gain"] for row in rows]
    for place, gain in enumerate(gains):
        if gain is None:
            continue
        axes.bar(place, gain["times"], width=0.6, color=_BAR if place else _BASE)
        if gain["low"] is not None and place:
            reach = [[gain["times"] - gain["low"]], [gain["high"] - gain["times"]]]
            axes.errorbar(place, gain["times"], yerr=reach, color="black", capsize=4, linewidth=1.2)
    # A very wide interval would flatten the bars; it may leave the picture.
    tops = [min(gain["high"] or gain["times"], 2 * gain["times"]) for gain in gains if gain is not None]
    if tops:
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_ylim(0.0, 1.1 * max(1.0, *tops))
    else:
        _note(axes, "speed was not measured")
    _name(axes, rows, ["not measured" if gain is None else f"{gain['times']:.2f}x" for gain in gains])


def _memory(axes: Axes, rows: Rows) -> None:
    axes.set_title("Memory of one update")
    found = [row["memory"] or {} for row in rows]
    parts = [memory.get("parts") or {} for memory in found]
    # NaN is left out of the plot.
    measured = [float(memory.get("measured") or math.nan) for memory in found]
    heights = [max(float(sum(own.values())), 0.0 if math.isnan(count) else count)
               for own, count in zip(parts, measured, strict=True)]  # fmt: skip
    unit, size = ("GiB", 2**30) if max(heights) >= 2**30 else ("MiB", 2**20)
    axes.set_ylabel(unit)
    if not any(heights):
        _note(axes, "memory was not measured")
        _name(axes, rows, [""] * len(rows))
        return
    _stack(axes, [{name: taken / size for name, taken in own.items()} for own in parts])
    if not all(map(math.isnan, measured)):
        axes.plot(range(len(rows)), [count / size for count in measured], color="black", marker="_", markersize=42,
                  markeredgewidth=2, linestyle="", label="measured")  # fmt: skip
    axes.set_ylim(0.0, 1.1 * max(heights) / size)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
                markerscale=0.3)  # fmt: skip
    _name(axes, rows, [f"{height / size:,.3g} {unit}" if height else "not measured" for height in heights])


def _stack(axes: Axes, parts: Sequence[Mapping[str, float]]) -> None:
    """Stack categories, the largest at the bottom; categories that are zero everywhere are left out."""
    most = {name: max(own.get(name, 0.0) for own in parts) for own in parts for name in own}
    below = [0.0] * len(parts)
    for number, name in enumerate(sorted((name for name in most if most[name]), key=lambda name: -most[name])):
        heights = [own.get(name, 0.0) for own in parts]
        axes.bar(range(len(parts)), heights, width=0.6, bottom=below, label=name, color=_COLOURS[number % 9])
        below = [low + height for low, height in zip(below, heights, strict=True)]


def _metric(axes: Axes, rows: Rows, bench: Mapping[str, Any]) -> None:
    metric = bench["metric"]
    name = as_label(metric["name"], _LONGEST)
    axes.set_title(f"Final {name}, a dot for each seed")
    axes.set_ylabel(f"{name} ({'more' if metric['higher_is_better'] else 'less'} is better)")
    _name(axes, rows, [(row["parity"] or {}).get("verdict", "") if row["runs"] else "" for row in rows])
    values = [[number for run in row["runs"] if math.isfinite(number := float(run["metric"]))] for row in rows]
    if not any(values):
        _note(axes, "there is no finite metric")
        return
    margin = (bench.get("margin") or {}).get("size")
    centre = sum(values[0]) / len(values[0]) if values[0] else None
    if centre is not None and margin is not None:
        axes.axhspan(centre - margin, centre + margin, color=_BASE, alpha=0.25, linewidth=0, label="margin around fp32")
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    low, high = _limits(values, centre, margin)
    axes.set_ylim(low, high)
    for place, (own, row) in enumerate(zip(values, rows, strict=True)):
        _dots(axes, place, [number for number in own if low <= number <= high])
        _outside(axes, place, [number for number in own if number < low], [number for number in own if number > high])
        lost = len(row["runs"]) - len(own)
        if lost:
            axes.text(place, 0.5, f"{lost} of {len(row['runs'])}\nnot finite", transform=axes.get_xaxis_transform(),
                      ha="center", va="center", fontsize=8, color=_WRONG, fontweight="bold")  # fmt: skip


def _limits(values: Sequence[Sequence[float]], centre: float | None, margin: float | None) -> tuple[float, float]:
    """Return y limits that show all dots, except those so far from fp32 that the margin would shrink to a line."""
    known = [number for own in values for number in own]
    low, high = min(known), max(known)
    if centre is not None and margin:
        low = max(min(low, centre - margin), centre - _FAR * margin)
        high = min(max(high, centre + margin), centre + _FAR * margin)
    room = 0.15 * (high - low) or 0.02 * abs(high) or 0.02
    return low - room, high + room


def _outside(axes: Axes, place: int, below: Sequence[float], above: Sequence[float]) -> None:
    """Draw an arrow towards dots outside the picture, with their mean."""
    for numbers, edge, inside in ((below, 0.0, 0.16), (above, 1.0, 0.84)):
        if numbers:
            axes.annotate(f"{sum(numbers) / len(numbers):.3g}", xy=(place, edge), xytext=(place, inside),
                          xycoords=axes.get_xaxis_transform(), textcoords=axes.get_xaxis_transform(), ha="center",
                          va="center", fontsize=9, color=_WRONG,
                          arrowprops={"arrowstyle": "->", "color": _WRONG})  # fmt: skip


def _dots(axes: Axes, place: int, values: Sequence[float]) -> None:
    if not values:
        return
    colour = _BAR if place else "#555555"
    across = [place + 0.24 * (n / (len(values) - 1) - 0.5) if len(values) > 1 else place for n in range(len(values))]
    axes.plot(across, values, color=colour, marker="o", markersize=5, linestyle="", alpha=0.8)
    mean = sum(values) / len(values)
    axes.plot([place - 0.25, place + 0.25], [mean, mean], color=colour, linewidth=2)


def _note(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="#555555")


def _name(axes: Axes, rows: Rows, below: Sequence[str]) -> None:
    """Write the names of the candidates below the bars, each with its figure."""
    figures = ["failed" if row["failed"] and not row["runs"] else text for row, text in zip(rows, below, strict=True)]
    names = [f"{as_label(row['name'], _LONGEST)}\n{text}".rstrip() for row, text in zip(rows, figures, strict=True)]
    axes.set_xticks(range(len(rows)), names, fontsize=9 if len(rows) < 4 else 8)
    axes.set_xlim(-0.6, max(len(rows) - 0.4, 1.6))
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
