"""Headings and tables for terminals of 80 columns or more, plain without a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def indented(content: RenderableType, by: int = 2) -> Padding:
    """Return text or a table moved to the right, no wider than it needs."""
    return Padding(content, (0, 0, 0, by), expand=False)


def ruled_table(console: Console, **more: Any) -> Table:
    """Return a table with a line below its titles; without it where the output is no terminal."""
    return Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False, **more)


def heading(console: Console, title: str, aside: str = "") -> None:
    """Print a heading with an optional remark."""
    console.print()
    console.print(Text(title, style="bold").append(f"  {aside}" if aside else "", style="not bold dim"))


def pairs(rows: dict[str, str]) -> Padding:
    """Return an indented table of keys and values."""
    table = Table.grid(padding=(0, 2))
    for key, value in rows.items():
        table.add_row(Text(key, style="dim"), Text(value))
    return indented(table)
