"""Lay out bars: memory in parts, intervals beside a margin, and a model as wide as its work.

All places along a bar are shares in percent of its width, so that text keeps its size on any screen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from halfstep.journal import numbers
from halfstep.report.charts import Axis, tick_text
from halfstep.report.json_fields import fields, known, number, rows, text

PARTS = (
    "weights", "buffers", "average", "optimizer", "gradients", "cast copies", "batch", "activations", "temporary",
)  # fmt: skip
"""The uses of memory in the order in which they are stacked: what stays, then what comes and goes."""


class Piece(NamedTuple):
    """A piece of a bar."""

    left: float
    width: float
    kind: str
    """What it is, which is also its color."""
    title: str


@dataclass(frozen=True)
class Bar:
    """A named bar of pieces, or one without parts."""

    name: str
    total: str
    pieces: list[Piece]


class MemoryUse(NamedTuple):
    """The memory of one setting: predicted in parts, and measured where it was."""

    name: str
    parts: Mapping[str, Any]
    """Predicted bytes of each part at the peak; empty where nothing was predicted."""
    measured: float
    """Bytes; NaN where they were not measured."""


def memory_bars(uses: Sequence[MemoryUse]) -> list[Bar]:
    """Return a stacked bar for each prediction, and the measured one below it, all on one axis."""
    predicted = {use.name: _parts(use.parts) for use in uses}
    sums = [sum(parts.values()) for parts in predicted.values()]
    most = max([*sums, *(use.measured for use in uses if known(use.measured))], default=0.0)
    bars = []
    for use in uses if most else ():
        if predicted[use.name]:
            bars.append(_stacked(f"{use.name}, predicted", predicted[use.name], most))
        if known(use.measured):
            bars.append(_stacked(f"{use.name}, measured", {"measured": use.measured}, most))
    return bars


def kinds_in(bars: Sequence[Bar]) -> list[str]:
    """Return the parts that some bar has, in the order in which they are stacked."""
    found = {piece.kind for bar in bars for piece in bar.pieces}
    return [part for part in PARTS if part in found]


def _parts(given: Mapping[str, Any]) -> dict[str, float]:
    return {part: value for part in PARTS if known(value := number(given.get(part))) and value > 0}


def _stacked(name: str, parts: Mapping[str, float], most: float) -> Bar:
    pieces, left = [], 0.0
    for part, value in parts.items():
        width = 100 * value / most
        pieces.append(Piece(round(left, 3), round(width, 3), part, f"{part}: {numbers.size(value)}"))
        left += width
    return Bar(name, numbers.size(sum(parts.values())), pieces)


# -- intervals --------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """An interval on a common axis, in percent of its width."""

    name: str
    words: str
    verdict: str
    low: float
    width: float
    at: float


@dataclass(frozen=True)
class Intervals:
    """Intervals on one axis, with a line at `zero` and the margin round it, in percent of the width."""

    rows: list[Interval]
    zero: float
    band_left: float
    band_width: float
    margin: str
    """The margin in words; empty where there is none."""
    ticks: list[tuple[float, str]]
    unit: str = ""


Row = tuple[str, str, str, float, float, float]
"""A name, words, a verdict, and the low end, the middle and the high end of an interval."""


def intervals(
    found: Sequence[Row], *, around: float, unit: str, scale: float = 1.0, margin: float = 0.0
) -> Intervals | None:
    """Return the rows on one axis that has `around` and the margin in view; None where there is no number.

    Labels are multiplied by `scale`.
    """
    laid = [row for row in found if known(row[4])]
    if not laid:
        return None
    ends = [value for row in laid for value in row[3:] if known(value)]
    seen = np.array([*ends, around - margin, around + margin, around]) * scale
    axis = Axis.fitting(seen, "linear")

    def place(value: float) -> float:
        return round(3 + 94 * axis.share(value * scale), 2)

    return Intervals(
        [_interval(row, place) for row in laid],
        place(around),
        place(around - margin),
        round(place(around + margin) - place(around - margin), 2),
        tick_text(margin * scale) if margin else "",
        [(place(tick / scale), axis.label(tick)) for tick in axis.ticks(5)],
        unit,
    )


def _interval(row: Row, place: Callable[[float], float]) -> Interval:
    name, words, verdict, low, at, high = row
    left, right = (place(low), place(high)) if known(low) and known(high) else (place(at), place(at))
    return Interval(name, words, verdict, left, round(right - left, 2), place(at))


# -- model ------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A module of the model, as wide as its share of the work."""

    left: float
    width: float
    level: int
    name: str
    title: str
    island: bool
    stripes: list[Piece]


@dataclass(frozen=True)
class ModelDrawing:
    """A model as rows of blocks, its root on top."""

    levels: int
    blocks: list[Block]
    shares: dict[str, str] = field(default_factory=dict)


MOST_BLOCKS = 600


def model_drawing(audit: Mapping[str, Any]) -> ModelDrawing | None:
    """Return the model of an audit colored by the format it computes in; None where no work was seen."""
    from halfstep.draw.model_formats import DEEPEST, depth_of, placed, tree

    root = tree(_checked(rows(audit.get("modules"))), "the model")
    if not root.total:
        return None
    levels = min(depth_of(root), DEEPEST)
    blocks = [
        Block(round(100 * left, 3), round(100 * width, 3), level, node.name, _block_said(node, root), node.island,
              _stripes(node))
        for node, left, width, level in placed(root, 0.0, 1.0, 0, levels)
    ]  # fmt: skip
    shares = {name: numbers.share(count / root.total) for name, count in root.flops.items()}
    return ModelDrawing(levels, blocks[:MOST_BLOCKS], shares)


def _checked(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the modules with the fields of a tree, each of the right type."""
    return [
        {
            "module": text(row.get("module"), 300) or "?",
            "flops": {name: int(value) for name, n in fields(row.get("flops")).items() if known(value := number(n))},
            "island": row.get("island"),
        }
        for row in modules
    ]


def _block_said(node: Any, root: Any) -> str:
    shares = ", ".join(f"{name} {numbers.share(count / node.total)}" for name, count in node.flops.items())
    island = ", an island" if node.island else ""
    return f"{node.path or node.name}: {shares}, {numbers.share(node.total / root.total)} of the FLOPs{island}"


def _stripes(node: Any) -> list[Piece]:
    pieces, left = [], 0.0
    for name, stripe in groupby(node.stripes(), key=lambda one: one[0]):
        width = 100 * sum(count for _, count in stripe) / node.total
        pieces.append(Piece(round(left, 3), round(width, 3), str(name), ""))
        left += width
    return pieces
