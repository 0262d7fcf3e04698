"""Settings and recipes as blocks of a page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from halfstep.errors import HalfstepError
from halfstep.page import Block, Column, Items, Page, Paragraph, Span, Table, Text
from halfstep.recipe.explain import OWN_SECTIONS, SettingRow, ShippedRecipe, format_setting_value, list_setting_rows
from halfstep.recipe.fields import Json
from halfstep.recipe.resolve import ChosenSetting
from halfstep.recipe.sources import RawRecipe, read_recipe
from halfstep.recipe.strict_yaml import iterate_dotted_keys

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
_PRECISION = "Precision: --bf16, --fp16, --fp32, or --precision P. Any other setting: KEY=VALUE or --KEY VALUE."
_THREE = (Column(), Column(), Column())


def build_settings_help(schemas: Mapping[str, Json], recipe: str | None = None) -> Page:
    """Return the first settings of a recipe, for `halfstep train RECIPE --help`; of every task where none is given."""
    found = None if recipe is None else _find_recipe(recipe, schemas)
    # Without a recipe, any task will do: only the sections that all tasks share are shown.
    every = list_setting_rows(next(iter(schemas.values())) if found is None else schemas[str(found.raw["task"])])
    here = {} if found is None else format_recipe_values(found)
    shown = [row for key in FIRST for row in every if row.key == key and _is_shown(row, here, found is not None)]
    name = "RECIPE" if found is None else shlex.quote(str(recipe))
    title = "common to all tasks" if found is None else f"of {found.label} (task {found.raw['task']})"
    more = (
        f"All {len(every)} settings"
        if found is not None
        else "The main settings of a recipe: halfstep train RECIPE --help; all of them"
    )
    blocks = (
        Paragraph(
            Span(f"Settings {title}, with their {'defaults' if found is None else 'values'}:", strong=True), gap=True
        ),
        _build_short_table(shown, here),
        Paragraph(f"{_PRECISION}\n{more}: halfstep recipes explain {name}", gap=True),
    )
    return Page(f"settings {title}", blocks)


def format_recipe_values(recipe: RawRecipe) -> dict[str, str]:
    """Return the settings that a recipe has, in words."""
    return {key: format_setting_value(value) for key, value in iterate_dotted_keys(recipe.raw)}


def _is_shown(row: SettingRow, here: Mapping[str, str], of_recipe: bool) -> bool:
    """Return whether a setting is shown: without a recipe, if every task has it; otherwise, if it fits the recipe's
    data.
    """
    if not of_recipe:
        return row.key.partition(".")[0] not in OWN_SECTIONS
    return row.key in here or not _CONDITION.match(row.doc)


def _find_recipe(recipe: str, schemas: Mapping[str, Json]) -> RawRecipe | None:
    """Return the recipe; None if there is none or its task has no schema, because help must work then too."""
    try:
        found = read_recipe(recipe)
    except HalfstepError:
        return None
    return found if found.raw.get("task") in schemas else None


def _build_short_table(found: Iterable[SettingRow], here: Mapping[str, str]) -> Table:
    """Return a table of settings: flag or key, value, meaning."""
    cells: list[tuple[Text, ...]] = []
    for row in found:
        name = _USUAL.get(row.key) or next(iter(row.flags), f"{row.key}=")
        value = here.get(row.key, row.default)
        # The first clause is enough here; `halfstep recipes` has the rest.
        doc = _CLAUSE.split(row.doc)[0].rstrip(".")
        cells.append((Span(name, strong=True), "-" if value == "null" else value, Span(doc, "dim")))
    return Table((Column(wrap="never"), Column(wrap="cut", widest=16), Column()), tuple(cells), indent=0)


def build_settings_table(found: Iterable[SettingRow], here: Mapping[str, str] | None = None) -> Table:
    """Return a table of keys, flags and descriptions; `here` holds the values a recipe sets."""
    cells: list[tuple[Text, ...]] = []
    for row in found:
        flags = "".join(f"\n  {flag}" for flag in row.flags)
        default = "" if row.default == "needed" else f"; default {row.default or 'empty'}"
        value = f"\nhere: {here[row.key]}" if here and row.key in here else ""
        doc = f"{row.doc} ({row.allowed}{default})".strip()
        cells.append(((Span(row.key, strong=True), Span(flags, "dim")), (doc, Span(value, strong=True))))
    return Table((Column(), Column()), tuple(cells), indent=0)


def describe_setting(row: SettingRow) -> tuple[Block, ...]:
    """Return the full description of one setting."""
    flags = (f"flags: {'  '.join(row.flags)}",) if row.flags else ()
    return Paragraph(row.key), Items((row.doc, f"may be: {row.allowed}", f"default: {row.default}", *flags))


def build_recipes_table(shipped: Sequence[ShippedRecipe]) -> Table:
    """Return a table of the recipes that ship with halfstep."""
    cells = ((Span(one.name, strong=True), Span(one.task, "dim"), one.about) for one in shipped)
    return Table(_THREE, tuple(cells), indent=0)


def build_sizing_table(chosen: Iterable[ChosenSetting]) -> Table:
    """Return a table of settings chosen for a data set and a machine, with the reasons."""
    cells = ((Span(one.key, strong=True), format_setting_value(one.value), one.reason) for one in chosen)
    return Table(_THREE, tuple(cells), indent=0)
