"""Render a page on the terminal with rich; without a terminal, as plain text of 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text as RichText

from halfstep.page import (
    Bars,
    Block,
    Box,
    Charts,
    Code,
    Column,
    Details,
    Heading,
    Instruction,
    Items,
    Page,
    Pairs,
    Paragraph,
    SideBySide,
    Span,
    Table,
    Text,
    convert_to_spans,
    strip_styles,
)  # fmt: skip
from halfstep.printable import escape_unprintable
from halfstep.terminal import create_console

_COLORS = {"": "", "dim": "dim", "code": "", "note": "cyan", "good": "green", "warn": "yellow", "bad": "red"}
_WIDE = 100
"""Terminal columns from which on columns marked `wide` are shown."""
_BAR = 30
_INDENT = 2
_GAP = 2
"""Columns of space that a column of a table adds to its text."""
_SHORTEST = 12
"""Columns of text that a cell keeps where it is cut."""
_MARKS = {"✅": "OK:", "❌": "NO:"}
"""Words for marks that a terminal without Unicode cannot print."""


def show_page(page: Page, console: Console | None = None) -> None:
    """Print a page, without its title, on standard output or on the console given."""
    _show_blocks(console or create_console(), page.blocks, 0)


def render_plain_text(page: Page, width: int = 80) -> str:
    """Return a page as plain text."""
    file = io.StringIO()
    show_page(page, create_console(file=file, width=width, force_terminal=False, force_jupyter=False))
    return file.getvalue().strip("\n")


def build_rich_text(text: Text) -> RichText:
    """Return text with rich's styles."""
    found = RichText()
    for span in convert_to_spans(text):
        found.append(
            escape_unprintable(span.text), style=f"{'bold ' if span.strong else ''}{_COLORS[span.style]}".strip()
        )
    return found


def _show_blocks(console: Console, blocks: Sequence[Block], indent: int) -> None:
    for block in blocks:
        _show_block(console, block, indent)


def _show_block(console: Console, block: Block, indent: int) -> None:
    spaced = Paragraph | Items | Instruction | Pairs | Table
    if isinstance(block, Heading | Box) or (isinstance(block, spaced) and block.gap):
        console.print()
    match block:
        case Heading():
            aside = (Span(f"  {block.aside}", "dim"),) if block.aside else ()
            _print_indented(console, build_rich_text((Span(block.text, strong=True), *aside)), indent)
        case Paragraph():
            _print_indented(console, build_rich_text(block.text), _INDENT if block.indent else indent, wrap=block.wrap)
        case Items():
            _show_items(console, block, indent or block.indent)
        case Code():
            _print_indented(console, RichText(block.text), indent, wrap=False)
        case Instruction():
            text = build_rich_text(Span(f"{block.lead}{block.text}", strong=not block.is_prose))
            _print_indented(console, text, indent, wrap=block.is_prose)
        case Pairs():
            wrap: Literal["fold", "words"] = "fold" if block.widest else "words"
            columns = (Column(wrap=wrap, widest=block.widest), Column(wrap=wrap))
            pairs = Table(columns, tuple((Span(name, "dim"), value) for name, value in block.rows))
            _print_indented(console, _build_plain_grid(pairs), indent or _INDENT)
        case Table():
            _show_table(console, block, indent)
        case Box():
            # A title may hold a path to copy: it is not wrapped.
            _print_indented(console, build_rich_text(block.title), indent, wrap=False)
            _show_blocks(console, block.blocks, indent + _INDENT)
        case Details():
            _show_blocks(console, (Heading(block.summary), *block.blocks), indent)
        case SideBySide():
            _show_blocks(console, [inner for part in block.parts for inner in part], indent)
        case Charts():
            _show_bars(console, block, indent or _INDENT)


def _print_indented(console: Console, content: RenderableType, indent: int, *, wrap: bool = True) -> None:
    if isinstance(content, RichText) and console.options.ascii_only:
        for mark, words in _MARKS.items():
            content = RichText(words).join(content.split(mark)) if mark in content.plain else content
    if isinstance(content, RichText) and not wrap:  # padding would cut long lines
        content = RichText("\n").join(
            RichText(" " * indent).append_text(line) for line in content.split("\n", allow_blank=True)
        )
    elif indent:
        content = Padding(content, (0, 0, 0, indent), expand=False)
    console.print(content, soft_wrap=not wrap)


def _show_items(console: Console, items: Items, indent: int) -> None:
    if items.dashes:
        dashes = RichTable.grid(padding=(0, 1))
        for row in items.rows:
            dashes.add_row("-", build_rich_text(row))
        _print_indented(console, dashes, indent)
        return
    for row in items.rows:
        _print_indented(console, build_rich_text(row), indent, wrap=items.wrap)


def _show_table(console: Console, table: Table, indent: int) -> None:
    has_titles = any(column.title for column in table.columns)
    indent = table.indent if table.indent is not None else indent or (0 if has_titles else _INDENT)
    if not has_titles:
        _print_indented(console, _build_plain_grid(table), indent)
        return
    shown = {"always", "wide"} if console.width >= _WIDE else {"always"}
    places = [n for n, column in enumerate(table.columns) if column.terminal in shown]
    left_out = _choose_dropped_columns(table, places, console.width - indent)
    _print_indented(
        console, _build_ruled_table(console, table, [place for place in places if place not in left_out]), indent
    )
    if left_out:
        names = ", ".join(table.columns[place].title for place in sorted(left_out))
        _print_indented(console, RichText(f"no room for {names} in this terminal: --json has all"), indent, wrap=False)
    second = [n for n, column in enumerate(table.columns) if column.terminal == "second"]
    if second:
        _show_block(console, Heading("More"), indent)
        _print_indented(console, _build_ruled_table(console, table, [places[0], *second]), indent)


def _choose_dropped_columns(table: Table, places: Sequence[int], width: int) -> list[int]:
    """Return the columns to leave out so that the others fit."""
    lengths = {}
    for place in places:
        column = table.columns[place]
        longest = max(
            cell_len(strip_styles(text)) for text in (column.title, *(row[place] for row in table.rows if row))
        )
        lengths[place] = _GAP + (min(longest, _SHORTEST) if column.wrap == "cut" else longest)
    left_out: list[int] = []
    for place in sorted(places, key=lambda place: table.columns[place].left_out):
        if table.columns[place].left_out and sum(lengths.values()) > width:
            del lengths[place]
            left_out.append(place)
    return left_out


def _build_ruled_table(console: Console, table: Table, places: Sequence[int]) -> RichTable:
    """Return these columns with a line below their titles; without it where the output is no terminal."""
    found = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    _fill_rich_table(found, table, places)
    return found


def _build_plain_grid(table: Table) -> RichTable:
    found = RichTable.grid(padding=(0, 2))
    _fill_rich_table(found, table, range(len(table.columns)))
    return found


def _fill_rich_table(found: RichTable, table: Table, places: Sequence[int]) -> None:
    for place in places:
        column = table.columns[place]
        found.add_column(
            column.title,
            justify=column.align,
            no_wrap=column.wrap == "never",
            max_width=column.widest,
            overflow="fold" if column.wrap == "fold" else "ellipsis",
        )
    for row in table.rows:
        if row:
            found.add_row(*(_build_table_cell(row[place], table.columns[place]) for place in places))
        else:
            found.add_section()


def _build_table_cell(text: Text, column: Column) -> RichText:
    cell = build_rich_text(text)
    if column.wrap == "cut":
        cell.no_wrap, cell.overflow = True, "ellipsis"
    return cell


def _show_bars(console: Console, block: Charts, indent: int) -> None:
    for chart in block.charts if block.terminal else ():
        if isinstance(chart, Bars):
            most = chart.axis_length
            rows = tuple(
                (bar.name, bar.words, Span("#" * round(bar.length / most * _BAR), "note")) for bar in chart.bars
            )
            columns = (Column(wrap="never"), Column(align="right", wrap="never"), Column(wrap="never"))
            _print_indented(console, _build_plain_grid(Table(columns, rows)), indent)
