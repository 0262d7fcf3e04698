"""Draw a confusion matrix of shares, and a bar per class."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from halfstep.draw.images import INK, PALE, PAPER, Array, Color, compute_line_height, compute_text_width, draw_text_line
from halfstep.draw.sheet import create_blank_picture, join_in_column, join_in_row

TEXT = 13
MOST_NAMED = 16
"""The most classes with room for names and shares; a larger matrix is color only."""
MOST_BARS = 24
MOST_SHOWN = 200
"""The most classes a matrix has room for."""
CELL, SMALLEST = 44, 3
NAME, BAR = 150, 200
EMPTY, RIGHT, WRONG = (244, 244, 246), (0, 114, 178), (213, 94, 0)
"""Colors of an empty cell, of the diagonal, and of mistakes."""


def draw_confusion_matrix(names: Sequence[str], shares: Sequence[Sequence[float]]) -> Array:
    """Draw a matrix of true (rows) and predicted (columns) classes; rows sum to 1, or are NaN for an absent class."""
    cell = CELL if len(names) <= MOST_NAMED else max(SMALLEST, MOST_NAMED * CELL // len(names))
    numbered = cell == CELL
    rows = [
        join_in_row([_draw_matrix_cell(share, y == x, cell, numbered) for x, share in enumerate(row)], 1)
        for y, row in enumerate(shares)
    ]
    body = join_in_column(rows, 1)
    if not numbered:
        return join_in_column([draw_text_line("rows: truth, columns: prediction", TEXT, body.shape[1], PALE), body], 4)
    left = min(NAME, max(compute_text_width(name, TEXT) for name in names) + 4)
    head = _draw_column_names(names, left, cell)
    lines = [join_in_row([_draw_class_name(name, left, cell), row], 4) for name, row in zip(names, rows, strict=True)]
    return join_in_column(
        [draw_text_line("rows: truth, columns: prediction (% of the row)", TEXT, 400, PALE), head, *lines], 1
    )


def draw_class_bars(names: Sequence[str], values: Sequence[float], heading: str) -> Array:
    """Draw a bar from 0 to 1 per class; with many classes, the lowest ones."""
    order = list(range(len(names)))
    if len(names) > MOST_BARS:
        order = sorted(order, key=lambda n: (math.isnan(values[n]), values[n]))[:MOST_BARS]
        heading += f", the lowest {MOST_BARS} of {len(names)}"
    left = min(NAME, max(compute_text_width(names[n], TEXT) for n in order) + 4)
    lines = [_draw_class_bar(names[n], values[n], left) for n in order]
    return join_in_column([draw_text_line(heading, TEXT, NAME + BAR + 60, PALE), *lines], 3)


def _draw_class_bar(name: str, value: float, left: int) -> Array:
    high = compute_line_height(TEXT)
    field = create_blank_picture(high, BAR)
    field[2:-2] = EMPTY
    field[2:-2, : 0 if math.isnan(value) else round(BAR * value)] = RIGHT
    text = "none there" if math.isnan(value) else f"{value:.3f}"
    return join_in_row([_draw_class_name(name, left, high), field, draw_text_line(text, TEXT, 80)], 6)


def _draw_matrix_cell(share: float, right: bool, side: int, numbered: bool) -> Array:
    """Draw a cell in a color as strong as its share; rows of an absent class are pale gray."""
    missing = math.isnan(share)
    strength = 0.0 if missing else share**0.5  # the square root keeps small mistakes visible
    mixed = [round(p + (c - p) * strength) for p, c in zip(EMPTY, RIGHT if right else WRONG, strict=True)]
    color: Color = (235, 235, 235) if missing else (mixed[0], mixed[1], mixed[2])
    cell = create_blank_picture(side, side)
    cell[:] = color
    if numbered and not missing and share >= 0.0005:
        # Two significant digits: 10 and more without a decimal, less with one; 9.95 would round up to 10.0.
        text = f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}"
        written = draw_text_line(text, TEXT, side, PAPER if strength > 0.6 else INK, color)
        top, left = ((outer - inner) // 2 for outer, inner in zip(cell.shape[:2], written.shape[:2], strict=True))
        cell[max(top, 0) : max(top, 0) + written.shape[0], left : left + written.shape[1]] = written
    return cell


def _draw_column_names(names: Sequence[str], left: int, cell: int) -> Array:
    """Draw the names above the columns, rotated where one is wider than its column."""
    narrow = all(compute_text_width(name, TEXT) <= cell for name in names)
    labels = [draw_text_line(name, TEXT, cell if narrow else NAME) for name in names]
    labels = labels if narrow else [np.rot90(label) for label in labels]
    high = max(label.shape[0] for label in labels)
    fields = []
    for label in labels:
        field = create_blank_picture(high + 4, cell)
        indent = (cell - label.shape[1]) // 2
        field[high - label.shape[0] : high, indent : indent + label.shape[1]] = label
        fields.append(field)
    return join_in_row([create_blank_picture(high, left), join_in_row(fields, 1)], 4)


def _draw_class_name(name: str, wide: int, high: int) -> Array:
    """Draw a name right-aligned in its field."""
    field, text = create_blank_picture(high, wide), draw_text_line(name, TEXT, wide)
    top = max(0, (high - text.shape[0]) // 2)
    field[top : top + text.shape[0], wide - text.shape[1] :] = text[: high - top]
    return field
