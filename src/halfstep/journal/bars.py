"""Draw the bars of the epoch and of the run, with the current numbers below them, as the guides do."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from halfstep import numbers
from halfstep.journal import text as words
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import RunClocks, draw_stage
from halfstep.journal.status_items import StatusItem, list_status_items

_WIDEST_BAR, _WIDE, _MARGIN = 60, 110, 1
_FULL, _EMPTY, _BETWEEN = "━", "─", " · "
_ASCII_FULL, _ASCII_EMPTY, _ASCII_BETWEEN = "=", "-", " | "


def draw_bars(latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
    """Return the lines of the bars and numbers; none is longer than `width`."""
    start, step = latest.start, latest.step
    if not start or not step or latest.stage:
        return draw_stage(latest, clocks, width)
    # If the terminal cannot encode the bar's character, all bars and separators are drawn in ASCII.
    plain = words.fit_encoding(_FULL, encoding) != _FULL
    mark = words.fit_encoding(
        words.format_bar_label(start, latest.observed_share if width >= _WIDE else None), encoding
    )
    about = "~" if clocks.is_rough else ""
    run_row = _build_progress_row("Run", step["attempt"], start["steps"], clocks.run, clocks.left, about)
    rows = [_build_epoch_row(latest, clocks), run_row]
    label = max(cell_len(row[0]) for row in rows)
    right = max(cell_len(row[3]) for row in rows)
    room = width - 2 * _MARGIN - label - right - cell_len(mark) - 6
    bars = [
        Text(" " * _MARGIN + name.ljust(label) + "  ", style="bold", no_wrap=True, overflow="crop")
        .append(_draw_progress_bar(part, whole, min(max(room, 0), _WIDEST_BAR), plain))
        .append(f"  {counts.ljust(right)}", style="not bold")
        for name, part, whole, counts in rows
    ]
    bars[0].append(
        f"  {mark}", style="not bold green" if words.is_mixed_precision(start["precision"]["chosen"]) else "not bold"
    )
    for bar in bars:
        bar.truncate(width)
    return bars + _flow_items(list_status_items(latest), width, encoding, _ASCII_BETWEEN if plain else _BETWEEN)


def _build_epoch_row(latest: LatestEvents, clocks: RunClocks) -> tuple[str, int, int, str]:
    step, evaluating, name = latest.step, latest.evaluating, words.format_epoch_place(latest)
    if evaluating:
        return _build_progress_row(
            f"{name} [Val]", evaluating["done"], evaluating["total"], clocks.epoch, clocks.in_epoch
        )
    return _build_progress_row(
        f"{name} [Train]", step["step_in_epoch"], words.count_epoch_steps(latest), clocks.epoch, clocks.in_epoch
    )


def _build_progress_row(
    name: str, done: int, total: int, spent: float, left: float, about: str = ""
) -> tuple[str, int, int, str]:
    whole = numbers.format_count(total)
    place = f"{numbers.format_count(done).rjust(len(whole))}/{whole}"
    return name, done, total, f"{place}  {numbers.format_clock(spent)}<{about}{numbers.format_clock(left)}"


def _draw_progress_bar(done: int, total: int, width: int, plain: bool) -> Text:
    full = int(width * min(done / total, 1.0)) if total else 0
    line = Text((_ASCII_FULL if plain else _FULL) * full, style="not bold cyan")
    return line.append((_ASCII_EMPTY if plain else _EMPTY) * (width - full), style="not bold bright_black")


def _flow_items(items: list[StatusItem], width: int, encoding: str, between: str) -> list[Text]:
    """Return as few lines as hold the items; an item is only cut at the edge of the terminal."""
    lines = [_create_blank_line()]
    for item in items:
        text = words.fit_encoding(item.text, encoding)
        empty = lines[-1].cell_len <= _MARGIN
        # cell_len, not len: a wide character takes two columns.
        if not empty and lines[-1].cell_len + cell_len(text) + len(between) + _MARGIN > width:
            lines.append(_create_blank_line())
            empty = True
        if not empty:
            lines[-1].append(between, style="bright_black")
        lines[-1].append(text, style="yellow" if item.alarm else "")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _create_blank_line() -> Text:
    return Text(" " * _MARGIN, no_wrap=True, overflow="crop")
