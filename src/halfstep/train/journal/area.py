"""The live area as text: a bar for the epoch, one for the run, and the numbers of the moment, at any width."""

from __future__ import annotations

import math
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from halfstep.train.journal import numbers, words
from halfstep.train.journal.latest import Latest
from halfstep.train.journal.moment import line_of

_WIDEST_BAR, _WIDE, _MARGIN = 60, 110, 1
_FULL, _EMPTY, _BETWEEN = "━", "─", " · "
_ASCII_FULL, _ASCII_EMPTY, _ASCII_BETWEEN = "=", "-", " | "


class Clocks(NamedTuple):
    """Seconds, as they are while the area is drawn."""

    run: float
    epoch: float
    left: float
    """Of the whole run; NaN while it is not known."""


def area(latest: Latest, clocks: Clocks, width: int, encoding: str) -> list[Text]:
    """Lines that are never longer than `width`."""
    start, step = latest.start, latest.step
    if not start or not step:
        return [Text(" preparing the first step", style="dim", no_wrap=True, overflow="ellipsis")]
    plain = words.fitted(_FULL, encoding) != _FULL
    mark = words.fitted(words.mark(start, latest.observed_share if width >= _WIDE else None), encoding)
    rows = [_epoch_row(latest, clocks), _row("Run", step["attempt"], start["steps"], clocks.run, clocks.left)]
    label = max(cell_len(row[0]) for row in rows)
    right = max(cell_len(row[3]) for row in rows)
    room = width - 2 * _MARGIN - label - right - cell_len(mark) - 6
    bars = [
        Text(" " * _MARGIN + name.ljust(label) + "  ", style="bold", no_wrap=True, overflow="crop")
        .append(_bar(part, whole, min(max(room, 0), _WIDEST_BAR), plain))
        .append(f"  {counts.ljust(right)}", style="not bold")
        for name, part, whole, counts in rows
    ]
    bars[0].append(f"  {mark}", style="not bold green" if words.is_mixed(start["precision"]["chosen"]) else "not bold")
    for bar in bars:
        bar.truncate(width)
    return bars + _flowed(line_of(latest), width, encoding, _ASCII_BETWEEN if plain else _BETWEEN)


def _epoch_row(latest: Latest, clocks: Clocks) -> tuple[str, int, int, str]:
    start, step, evaluating = latest.start, latest.step, latest.evaluating
    name = words.place(latest)
    if evaluating:
        return _row(f"{name} [Val]", evaluating["done"], evaluating["of"], clocks.epoch, math.nan)
    done, total = step["in_epoch"], start["steps_per_epoch"]
    left = clocks.left * (total - done) / max(start["steps"] - step["attempt"], total - done, 1)
    return _row(f"{name} [Train]", done, total, clocks.epoch, left)


def _row(name: str, done: int, total: int, spent: float, left: float) -> tuple[str, int, int, str]:
    return name, done, total, f"{_place(done, total)}  {numbers.clock(spent)}<{numbers.clock(left)}"


def _place(done: int, total: int) -> str:
    return f"{numbers.count(done).rjust(len(numbers.count(total)))}/{numbers.count(total)}"


def _bar(done: int, total: int, width: int, plain: bool) -> Text:
    full = int(width * min(done / total, 1.0)) if total else 0
    line = Text((_ASCII_FULL if plain else _FULL) * full, style="not bold cyan")
    return line.append((_ASCII_EMPTY if plain else _EMPTY) * (width - full), style="not bold bright_black")


def _flowed(items: list[words.Item], width: int, encoding: str, between: str) -> list[Text]:
    """As few lines as hold the items; an item is broken by nothing but the edge of the terminal."""
    lines = [_blank()]
    for item in items:
        text = words.fitted(item.text, encoding)
        empty = lines[-1].cell_len <= _MARGIN
        if not empty and lines[-1].cell_len + cell_len(text) + len(between) + _MARGIN > width:
            lines.append(_blank())
            empty = True
        if not empty:
            lines[-1].append(between, style="bright_black")
        lines[-1].append(text, style="yellow" if item.alarm else "")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _blank() -> Text:
    return Text(" " * _MARGIN, no_wrap=True, overflow="crop")
