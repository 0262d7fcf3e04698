"""Lay out settings and recipes for terminals of 80 columns or more."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from halfstep.errors import HalfstepError
from halfstep.recipe.explain import OWN_SECTIONS, SettingRow, Shipped, rows, value_in_words
from halfstep.recipe.resolve import ChosenSetting
from halfstep.recipe.sources import RawRecipe, read_recipe
from halfstep.recipe.strict_yaml import flat
from halfstep.runs.registry import task_schemas

FIRST = (
    *("data.path", "data.val", "data.classes", "data.size", "data.crop", "model.name", "model.weights"),
    *("train.epochs", "train.batch_size", "train.microbatches", "train.num_workers", "train.seed"),
    *("optimizer.lr", "guard.mode", "run.dir", "run.tracker"),
)
"""The settings users change most, as far as a task has them."""
_USUAL = {"data.path": "--data_dir"}
"""The flag users type, where a setting has several."""
_CONDITION = re.compile(r"[a-z]+( and [a-z]+)?: ")
"""The start of the description of a setting that is for one kind of data or model."""
_CLAUSE = re.compile(r"\. |; ")


def settings_help(recipe: str | None = None) -> RenderableType:
    """Return the first settings of a recipe, for `halfstep train RECIPE --help`; of every task where none is given."""
    found = None if recipe is None else _found(recipe)
    # Without a recipe, any task will do: only the sections that all tasks share are shown.
    schemas = task_schemas() if found is None else {found.label: task_schemas()[str(found.raw["task"])]}
    every = rows(next(iter(schemas.values())))
    here = {} if found is None else {key: value_in_words(value) for key, value in flat(found.raw)}
    shown = [row for key in FIRST for row in every if row.key == key and _belongs(row, here, found is not None)]
    name = "RECIPE" if found is None else shlex.quote(str(recipe))
    title = "every task" if found is None else f"{found.label} (task {found.raw['task']})"
    more = f"All {len(every)} settings" if found is not None else "Those of a recipe: halfstep train RECIPE --help; all"
    return Group(
        Text(f"\nSettings of {title}, and what they are:", style="bold"),
        _first(shown, here),
        Text(f"\n{_PRECISION}\n{more}: halfstep recipes {name}"),
    )


def _belongs(row: SettingRow, here: Mapping[str, str], of_recipe: bool) -> bool:
    """Return whether a setting is shown: without a recipe, if every task has it; otherwise, if it fits the recipe's
    data.
    """
    if not of_recipe:
        return row.key.partition(".")[0] not in OWN_SECTIONS
    return row.key in here or not _CONDITION.match(row.doc)


def _found(recipe: str) -> RawRecipe | None:
    """Return the recipe; None where there is none or its task has no schema, because help must work then too."""
    try:
        found = read_recipe(recipe)
    except HalfstepError:
        return None
    return found if found.raw.get("task") in task_schemas() else None


def _first(found: Iterable[SettingRow], here: Mapping[str, str]) -> RenderableType:
    """Return a table with one line per setting: flag or key, value, meaning."""
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=16, overflow="ellipsis")
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row in found:
        name = _USUAL.get(row.key) or next(iter(row.flags), f"{row.key}=")
        # The first clause is enough here; `halfstep recipes` has the rest.
        doc = _CLAUSE.split(row.doc)[0].rstrip(".")
        table.add_row(Text(name, style="bold"), Text(_value(row, here)), Text(doc, style="dim"))
    return table


def short(found: Iterable[SettingRow], here: Mapping[str, str] | None = None) -> RenderableType:
    """Return a table of keys, flags and descriptions; `here` holds the values a recipe sets."""
    table = _table()
    for row in found:
        name = Text.assemble((row.key, "bold"))
        if row.flags:
            name.append("\n" + "\n".join(f"  {flag}" for flag in row.flags), style="dim")
        default = "" if row.default == "needed" else f"; default {row.default or 'empty'}"
        text = Text(f"{row.doc} ({row.allowed}{default})".strip())
        if here and row.key in here:
            text.append(f"\nhere: {here[row.key]}", style="bold")
        table.add_row(name, text)
    return table


def one_setting(row: SettingRow) -> RenderableType:
    """Return the full description of one setting."""
    lines = [row.doc, f"may be: {row.allowed}", f"default: {row.default}"]
    if row.flags:
        lines.append(f"flags: {'  '.join(row.flags)}")
    return Text("\n".join([row.key, *(f"  {line}" for line in lines)]))


def shipped_table(shipped: Sequence[Shipped]) -> RenderableType:
    """Return a table of the recipes that ship with halfstep."""
    table = _table()
    for one in shipped:
        table.add_row(Text(one.name, style="bold"), Text(one.task, style="dim"), Text(one.about))
    return table


def sizing_table(chosen: Iterable[ChosenSetting]) -> RenderableType:
    """Return a table of settings chosen for a data set and a machine, with the reasons."""
    table = _table()
    for one in chosen:
        table.add_row(Text(one.key, style="bold"), Text(value_in_words(one.value)), Text(one.reason))
    return table


def _value(row: SettingRow, here: Mapping[str, str]) -> str:
    value = here.get(row.key, row.default)
    return "-" if value == "null" else value


def _table() -> Table:
    return Table(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 0))


_PRECISION = "Precision: --bf16, --fp16, --fp32, or --precision P. Others: KEY=VALUE, or their flag."
