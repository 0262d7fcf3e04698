"""Arrange samples on one sheet: a heading, a legend, and pictures side by side with captions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from halfstep.draw.images import INK, PALE, PAPER, Array, Color, compute_line_height, draw_text_line

WIDTH = 1200
"""The largest width in pixels, so that a sheet fits on any screen."""
MARGIN, GAP = 16, 8
HIGHEST, LARGEST = 320, 900
"""The largest height in pixels of a picture among others, and of a single one."""
LOWEST, LENGTH, FRAME = 128, 1400, 5
"""With many rows pictures become lower, down to LOWEST, to keep a sheet near LENGTH pixels."""
LEAST = 240
"""The least width of text in pixels, however narrow a picture is."""
CARDS = 4
"""Single-picture samples per row."""
WIDE = 2.0
"""A picture with this ratio of width to height gets a separate row."""
TITLE, TEXT = 20, 14


@dataclass(frozen=True)
class PicturedSample:
    """A sample: pictures of one size by their headings, and a caption."""

    panels: Mapping[str, Array]
    caption: str = ""
    frame: Color | None = None
    """The frame color of a single picture."""


def draw_sample_sheet(
    entries: Sequence[PicturedSample],
    heading: str = "",
    note: str = "",
    legend: Sequence[tuple[str, Color]] = (),
    figures: Sequence[Array] = (),
) -> Array:
    """Draw all entries as one picture, at most WIDTH wide; `figures` are placed above them unchanged."""
    inner = WIDTH - 2 * MARGIN
    first = [next(iter(entry.panels.values())) for entry in entries if len(entry.panels) == 1]
    are_cards = len(first) == len(entries) and all(p.shape[1] < WIDE * p.shape[0] for p in first)
    body = _draw_sample_cards(entries, inner) if are_cards else _draw_sample_rows(entries, inner)
    body = [*figures, create_blank_picture(GAP, 1), *body] if figures else body
    top = [draw_text_line(heading, TITLE, inner)] if heading else []
    top += [draw_text_line(note, TEXT, inner, PALE)] if note else []
    top += [_draw_color_legend(legend, inner)] if legend else []
    return _add_frame(join_in_column([*top, *body]))


def draw_single_picture(entry: PicturedSample, legend: Sequence[tuple[str, Color]]) -> Array:
    """Draw a single picture as large as a screen allows, with its caption above and the legend below."""
    inner = WIDTH - 2 * MARGIN
    given = next(iter(entry.panels.values()))
    picture = fit_picture(given, inner, max(LARGEST // 2, min(LARGEST, given.shape[0])))
    wide = max(picture.shape[1], LEAST)
    return _add_frame(
        join_in_column([draw_text_line(entry.caption, TEXT, wide), picture, _draw_color_legend(legend, wide)])
    )


def _draw_sample_rows(entries: Sequence[PicturedSample], inner: int) -> list[Array]:
    """Draw one row per sample; the headings are above the first."""
    columns = max((len(entry.panels) for entry in entries), default=1)
    each = (inner - GAP * (columns - 1)) // columns
    # A single wide picture may itself be a row of pictures: enlarge it less than one of several panels.
    tallest = max((picture.shape[0] for entry in entries for picture in entry.panels.values()), default=0)
    most = HIGHEST if columns > 1 else max(HIGHEST // 2, min(HIGHEST, tallest))
    highest = max(LOWEST, min(most, LENGTH // max(1, len(entries))))
    fitting = [[fit_picture(picture, each, highest) for picture in entry.panels.values()] for entry in entries]
    wide = [max(row[n].shape[1] for row in fitting if n < len(row)) for n in range(columns if entries else 0)]
    parts: list[Array] = []
    if entries and any(entries[0].panels):
        parts.append(_align_columns([draw_text_line(name, TEXT, each, PALE) for name in entries[0].panels], wide))
    for entry, pictures in zip(entries, fitting, strict=True):
        parts += [draw_text_line(entry.caption, TEXT, inner)] if entry.caption else []
        parts.append(_align_columns(pictures, wide))
    return parts


def _align_columns(parts: Sequence[Array], wide: Sequence[int]) -> Array:
    """Place each part in its column."""
    return join_in_row([_fit_width(part, across) for part, across in zip(parts, wide, strict=False)])


def _draw_sample_cards(entries: Sequence[PicturedSample], inner: int) -> list[Array]:
    """Draw samples side by side, each with its caption below."""
    each = (inner - GAP * (CARDS - 1)) // CARDS
    cards = [_draw_sample_card(entry, each) for entry in entries]
    return [join_in_row(cards[first : first + CARDS]) for first in range(0, len(cards), CARDS)]


def _draw_sample_card(entry: PicturedSample, each: int) -> Array:
    edge = FRAME if entry.frame else 0
    picture = fit_picture(next(iter(entry.panels.values())), each - 2 * edge, HIGHEST)
    picture = _add_frame(picture, FRAME, entry.frame) if entry.frame else picture
    lines = [
        draw_text_line(line, TEXT, each - GAP, INK if not n else PALE)
        for n, line in enumerate(entry.caption.split("\n"))
    ]
    return _fit_width(join_in_column([picture, *lines], gap=2), each)


def fit_picture(picture: Array, wide: int, high: int) -> Array:
    """Return the picture as large as fits: small ones enlarged by whole factors, large ones reduced."""
    image = Image.fromarray(np.ascontiguousarray(picture)).convert("RGB")
    factor = min(wide / image.width, high / image.height)
    if factor >= 1:
        # Whole factors, so that all pixels keep one size.
        times = int(factor)
        return np.asarray(image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST))
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    # BOX averages all pixels it covers; NEAREST would drop thin lines.
    return np.asarray(image.resize(size, Image.Resampling.BOX))


def _draw_color_legend(legend: Sequence[tuple[str, Color]], inner: int) -> Array:
    """Draw color patches with their names in as many lines as they need."""
    items = [
        join_in_row([_draw_color_patch(color), draw_text_line(name, TEXT, inner // 3)], gap=5) for name, color in legend
    ]
    lines: list[list[Array]] = [[]]
    for item in items:
        taken = sum(one.shape[1] + 2 * GAP for one in lines[-1])
        if lines[-1] and taken + item.shape[1] > inner:
            lines.append([])
        lines[-1].append(item)
    return join_in_column([join_in_row(line, gap=2 * GAP) for line in lines], gap=2)


def _draw_color_patch(color: Color) -> Array:
    high = compute_line_height(TEXT)
    patch: Any = np.full((high, TEXT, 3), PAPER, dtype=np.uint8)
    top = (high - TEXT) // 2
    patch[top : top + TEXT] = PALE  # an edge makes white and yellow visible
    patch[top + 1 : top + TEXT - 1, 1:-1] = color
    return np.asarray(patch)


def join_in_row(parts: Sequence[Array], gap: int = GAP) -> Array:
    """Join parts in a row."""
    high = max(part.shape[0] for part in parts)
    wide = sum(part.shape[1] for part in parts) + gap * (len(parts) - 1)
    out, left = create_blank_picture(high, wide), 0
    for part in parts:
        out[: part.shape[0], left : left + part.shape[1]] = part
        left += part.shape[1] + gap
    return out


def join_row_or_column(parts: Sequence[Array], gap: int = 4 * GAP) -> Array:
    """Join parts in a row where a sheet is wide enough, otherwise in a column."""
    wide = sum(part.shape[1] for part in parts) + gap * (len(parts) - 1)
    return join_in_row(parts, gap) if wide <= WIDTH - 2 * MARGIN else join_in_column(parts, gap)


def join_in_column(parts: Sequence[Array], gap: int = GAP) -> Array:
    """Join parts in a column."""
    high = sum(part.shape[0] for part in parts) + gap * (len(parts) - 1)
    out, top = create_blank_picture(high, max(part.shape[1] for part in parts)), 0
    for part in parts:
        out[top : top + part.shape[0], : part.shape[1]] = part
        top += part.shape[0] + gap
    return out


def _fit_width(part: Array, wide: int) -> Array:
    """Pad or crop a part on the right to the given width."""
    return (
        join_in_row([part, create_blank_picture(1, wide - part.shape[1])], gap=0)
        if part.shape[1] < wide
        else part[:, :wide]
    )


def _add_frame(part: Array, edge: int = MARGIN, color: Color = PAPER) -> Array:
    out = create_blank_picture(part.shape[0] + 2 * edge, part.shape[1] + 2 * edge)
    out[:] = color
    out[edge:-edge, edge:-edge] = part
    return out


def create_blank_picture(high: int, wide: int) -> Array:
    """Return a blank picture."""
    out: Array = np.full((high, wide, 3), PAPER, dtype=np.uint8)
    return out
