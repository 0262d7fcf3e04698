"""Settings and recipes, laid out for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfstep.cli._schemas import task_schemas
from halfstep.train.recipe.explain import OWN_SECTIONS, Row, Shipped, rows


def settings_help(schemas: Mapping[str, Mapping[str, Any]] | None = None) -> RenderableType:
    """Every setting of every task, for the end of `halfstep train --help`."""
    tables = {task: rows(schema) for task, schema in (schemas or task_schemas()).items()}
    common = [row for row in next(iter(tables.values()), []) if not _is_own(row)]
    parts: list[RenderableType] = [_heading("Settings of every task: KEY=VALUE, or the flag beside it"), short(common)]
    for task, found in tables.items():
        parts += [_heading(f"Settings of {task}"), short(row for row in found if _is_own(row))]
    parts.append(Text(_PRECISION))
    return Group(*parts)


def short(found: Iterable[Row], here: Mapping[str, str] | None = None) -> RenderableType:
    """Key, flags and documentation; `here` says what a recipe sets."""
    table = _table()
    for row in found:
        name = Text.assemble((row.key, "bold"))
        if row.flags:
            name.append("\n" + "\n".join(f"  {flag}" for flag in row.flags), style="dim")
        text = Text(f"{row.doc} {_bracket(row)}".strip())
        if here and row.key in here:
            text.append(f"\nhere: {here[row.key]}", style="bold")
        table.add_row(name, text)
    return table


def one_setting(row: Row) -> RenderableType:
    lines = [row.doc, f"may be: {row.allowed}", f"default: {row.default}"]
    if row.flags:
        lines.append(f"flags: {'  '.join(row.flags)}")
    return Text("\n".join([row.key, *(f"  {line}" for line in lines)]))


def shipped_table(shipped: Sequence[Shipped]) -> RenderableType:
    table = _table()
    for one in shipped:
        table.add_row(Text(one.name, style="bold"), Text(one.task, style="dim"), Text(one.about))
    return table


def _is_own(row: Row) -> bool:
    return row.key.partition(".")[0] in OWN_SECTIONS


def _bracket(row: Row) -> str:
    return f"({row.allowed})" if row.default == "needed" else f"({row.allowed}; default {row.default or 'empty'})"


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table() -> Table:
    return Table(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 0))


_PRECISION = """
Precision: --bf16, --fp16, --fp32, --precision P, or --mixed_precision with
--precision_type P; --use_amp and --amp_dtype P are understood too."""
