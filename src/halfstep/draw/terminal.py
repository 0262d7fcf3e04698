"""Render a page on the terminal with rich; without a terminal, as plain text of 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text as RichText

from halfstep.page import (
    Bars,
    Block,
    Box,
    Charts,
    Column,
    Command,
    Details,
    Heading,
    Items,
    Page,
    Pairs,
    Paragraph,
    SideBySide,
    Span,
    Table,
    Text,
    spans_of,
)  # fmt: skip
from halfstep.terminal import screen

_COLORS = {"": "", "dim": "dim", "code": "", "note": "cyan", "good": "green", "warn": "yellow", "bad": "red"}
_WIDE = 100
"""Terminal columns from which on columns marked `wide` are shown."""
_BAR = 30
_INDENT = 2


def show_page(page: Page, console: Console | None = None) -> None:
    """Print a page, without its title, on standard output or on the console given."""
    _show(console or screen(), page.blocks, 0)


def text_of(page: Page, width: int = 80) -> str:
    """Return a page as plain text."""
    file = io.StringIO()
    show_page(page, screen(file=file, width=width, force_terminal=False, force_jupyter=False))
    return file.getvalue().strip("\n")


def rich_text(text: Text) -> RichText:
    """Return text with rich's styles."""
    found = RichText()
    for span in spans_of(text):
        found.append(span.text, style=f"{'bold ' if span.strong else ''}{_COLORS[span.style]}".strip())
    return found


def _show(console: Console, blocks: Sequence[Block], indent: int) -> None:
    for block in blocks:
        _show_block(console, block, indent)


def _show_block(console: Console, block: Block, indent: int) -> None:
    if isinstance(block, Heading | Box) or (isinstance(block, Paragraph | Command | Pairs) and block.gap):
        console.print()
    match block:
        case Heading():
            aside = (Span(f"  {block.aside}", "dim"),) if block.aside else ()
            _print(console, rich_text((Span(block.text, strong=True), *aside)), indent)
        case Paragraph():
            _print(console, rich_text(block.text), _INDENT if block.indent else indent, wrap=block.wrap)
        case Items():
            _print(console, RichText("\n").join(map(rich_text, block.rows)), indent or _INDENT)
        case Command():
            text = rich_text(Span(f"{block.lead}{block.text}", strong=not block.is_prose))
            _print(console, text, indent, wrap=block.is_prose)
        case Pairs():
            rows = tuple((Span(name, "dim"), value) for name, value in block.rows)
            columns = (Column(wrap="fold" if block.widest else "words", widest=block.widest), Column())
            _print(console, _grid(Table(columns, rows)), indent or _INDENT)
        case Table():
            _show_table(console, block, indent)
        case Box():
            # A title may hold a path to copy: it is not wrapped.
            _print(console, rich_text(block.title), indent, wrap=False)
            _show(console, block.blocks, indent + _INDENT)
        case Details():
            _show(console, (Heading(block.summary), *block.blocks), indent)
        case SideBySide():
            _show(console, [inner for part in block.parts for inner in part], indent)
        case Charts():
            _show_bars(console, block, indent or _INDENT)


def _print(console: Console, content: RenderableType, indent: int, *, wrap: bool = True) -> None:
    if indent:
        content = Padding(content, (0, 0, 0, indent), expand=False)
    console.print(content, soft_wrap=not wrap)


def _show_table(console: Console, table: Table, indent: int) -> None:
    if not any(column.title for column in table.columns):
        _print(console, _grid(table), table.indent or indent or _INDENT)
        return
    shown = {"always", "wide"} if console.width >= _WIDE else {"always"}
    places = [n for n, column in enumerate(table.columns) if column.terminal in shown]
    _print(console, _ruled(console, table, places), table.indent or indent)
    second = [n for n, column in enumerate(table.columns) if column.terminal == "second"]
    if second:
        _show_block(console, Heading("More"), indent)
        _print(console, _ruled(console, table, [places[0], *second]), table.indent or indent)


def _ruled(console: Console, table: Table, places: Sequence[int]) -> RichTable:
    """Return these columns with a line below their titles; without it where the output is no terminal."""
    found = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    _fill(found, table, places)
    return found


def _grid(table: Table) -> RichTable:
    found = RichTable.grid(padding=(0, 2))
    _fill(found, table, range(len(table.columns)))
    return found


def _fill(found: RichTable, table: Table, places: Sequence[int]) -> None:
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
            found.add_row(*(rich_text(row[place]) for place in places))
        else:
            found.add_section()


def _show_bars(console: Console, block: Charts, indent: int) -> None:
    for chart in block.charts if block.terminal else ():
        if isinstance(chart, Bars):
            most = chart.axis_length
            rows = tuple(
                (bar.name, bar.words, Span("#" * round(bar.length / most * _BAR), "note")) for bar in chart.bars
            )
            columns = (Column(wrap="never"), Column(align="right", wrap="never"), Column(wrap="never"))
            _print(console, _grid(Table(columns, rows)), indent)
