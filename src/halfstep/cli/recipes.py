"""`halfstep recipes`: list recipes, explain their settings, and copy one for editing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._completion import complete_recipes
from halfstep.cli._options import Json, create_flag_option, print_json, show_result
from halfstep.errors import FolderTaken, Unsafe, WrongUse, build_unknown_name_error
from halfstep.page import Block, Code, Page, Paragraph
from halfstep.printable import escape_to_one_line

if TYPE_CHECKING:
    from halfstep.recipe.explain import SettingRow, ShippedRecipe
    from halfstep.recipe.sources import RawRecipe

GROUP = "Run"
ACTIONS = ("list", "explain", "copy", "schema")


def run(
    action: Annotated[str, typer.Argument(help="list, explain, copy or schema.", metavar="ACTION")] = "list",
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A name from the list, or a path.", autocompletion=complete_recipes),
    ] = None,
    more: Annotated[
        str | None,
        typer.Argument(
            metavar="SETTING|FOLDER|FILE",
            help="explain: one setting, such as lr; or a folder, for its sizing or the order of its shards. "
            "copy: the file to write.",
        ),
    ] = None,
    script: Annotated[
        bool, create_flag_option("--script", "copy: the example script of this name instead, such as unet or own_loop.")
    ] = False,
    json: Json = False,
) -> None:
    """List the recipes, explain one, copy one to make it your own, or print the JSON schema for editors."""
    if script and action != "copy":
        raise WrongUse(f"{action} --script", allowed="copy --script NAME", do="halfstep recipes copy --script unet")
    # `halfstep recipes unet` is short for `explain unet`.
    if action not in ACTIONS:
        action, recipe, more = "explain", _resolve_recipe_word(action), recipe
    if action == "list":
        from halfstep.recipe.explain_page import build_recipes_table

        found = list_shipped_recipes()
        words = Paragraph(
            "halfstep train NAME runs one; halfstep recipes NAME shows its settings.", gap=True, wrap=False
        )
        show_result({"recipes": found}, Page("recipes", (build_recipes_table(found), words)), json)
    elif action == "schema":
        from halfstep.recipe.explain import build_editor_schema
        from halfstep.runs.registry import build_task_schemas

        print_json(build_editor_schema(build_task_schemas()))
    elif script:
        _copy_script(recipe, more, json)
    elif action == "copy":
        _copy_recipe(_check_recipe_given(recipe, action), more, json)
    else:
        _explain_recipe(_check_recipe_given(recipe, action), more, json)


def _resolve_recipe_word(word: str) -> str:
    """Return the word as a recipe; a misspelled action is reported as such, not as an unknown recipe."""
    from halfstep.nearest_word import find_nearest_word
    from halfstep.recipe.sources import is_recipe_path, list_recipe_names

    # `halfstep recipes explian` is a misspelled action, not a missing recipe.
    if not is_recipe_path(word) and find_nearest_word(word, [*list_recipe_names(), *ACTIONS]) in ACTIONS:
        raise build_unknown_name_error("action", word, ACTIONS)
    return word


def list_shipped_recipes() -> list[ShippedRecipe]:
    """Return the recipes that ship with halfstep, with their own descriptions."""
    from halfstep.recipe.explain import ShippedRecipe
    from halfstep.recipe.sources import list_recipe_names, read_recipe

    raw = {name: read_recipe(name).raw for name in list_recipe_names()}
    return [
        ShippedRecipe(name, str(content.get("task")), str(content.get("about", ""))) for name, content in raw.items()
    ]


def _copy_recipe(recipe: str, to: str | None, json: bool) -> None:
    from halfstep.recipe.sources import read_recipe_text

    label, text = read_recipe_text(recipe)
    target = _resolve_target_path(to, f"{label}.yaml")
    _write_new_file(target, text, f"halfstep recipes copy {recipe} OTHER.yaml")
    _show_copied(target, f"halfstep train {shlex.quote(str(target) if '/' in str(target) else f'./{target}')}", json)


def _copy_script(name: str | None, to: str | None, json: bool) -> None:
    from halfstep.recipe.scripts import list_script_names, read_script

    names = ", ".join(list_script_names())
    if name is None:
        raise WrongUse("copy which script?", allowed=names, do="halfstep recipes copy --script unet")
    file, text = read_script(name)
    target = _resolve_target_path(to, file)
    if not target.resolve().is_relative_to(Path.cwd().resolve()):
        raise Unsafe(
            f"{target} is outside of this folder",
            allowed="a file in this folder, or in one below it",
            do=f"go to the folder first, then: halfstep recipes copy --script {name}",
        )
    _write_new_file(target, text, f"halfstep recipes copy --script {name} OTHER.py")
    _show_copied(target, f"python {shlex.quote(str(target))}", json)


def _show_copied(target: Path, following: str, json: bool) -> None:
    words = Paragraph(f"wrote {escape_to_one_line(target)}\nedit it, then: {following}", wrap=False)
    show_result({"copied": target}, Page("copied", (words,)), json)


def _resolve_target_path(to: str | None, name: str) -> Path:
    """Return the path to write: under this name in a folder, or here where none is given."""
    target = Path(to or name)
    return target / name if target.is_dir() else target


def _write_new_file(target: Path, text: str, do: str) -> None:
    """Write a file that is not there yet; raise `FolderTaken` otherwise."""
    try:
        # "x" fails where the file exists, without a race between check and write.
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "already exists" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
        raise FolderTaken(f"{target} {reason}", allowed="a new file", do=do) from None


def _explain_recipe(recipe: str, setting: str | None, json: bool) -> None:
    from halfstep.recipe.explain import list_setting_rows
    from halfstep.recipe.explain_page import build_settings_table, describe_setting, format_recipe_values
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import build_task_schemas

    found, schemas = read_recipe(recipe), build_task_schemas()
    if setting is not None and found.raw.get("sizing") == "auto" and os.path.isdir(os.path.expanduser(setting)):
        _show_sizing(found, setting, json)
        return
    task = str(found.raw.get("task"))
    if task not in schemas:
        raise build_unknown_name_error("task", task, schemas)
    chosen = [row for row in list_setting_rows(schemas[task]) if setting is None or _is_named_setting(row, setting)]
    if not chosen and setting is not None and _is_data_place(setting):
        _show_shard_order(found, setting, json)
        return
    if not chosen:
        raise build_unknown_name_error("setting", setting, [row.key for row in list_setting_rows(schemas[task])])
    blocks: list[Block] = [block for row in chosen for block in describe_setting(row)]
    if setting is None:
        words = "Settings, their defaults, and their values in this recipe:\n"
        blocks = [Code(found.text.rstrip(), "yaml"), Paragraph(words, gap=True)]
        blocks.append(build_settings_table(chosen, format_recipe_values(found)))
    report = {"recipe": found.label, "task": task, "settings": chosen}
    show_result(report, Page(f"recipe {found.label}", tuple(blocks)), json)


def _show_sizing(found: RawRecipe, folder: str, json: bool) -> None:
    """Show what a recipe chooses for a data set on this machine, and why."""
    from halfstep.recipe.explain_page import build_sizing_table
    from halfstep.runs.resolve import resolve_run_recipe

    chosen = resolve_run_recipe(found, {"data.path": folder}).sizing
    place = shlex.quote(folder)
    first = f"{found.label} chooses for {place} on this machine, unless settings are given:\n"
    last = Paragraph(f"run it: halfstep train {found.label} --data_dir {place}", gap=True, wrap=False)
    page = Page(f"recipe {found.label}", (Paragraph(first, wrap=False), build_sizing_table(chosen), last))
    show_result({"recipe": found.label, "folder": folder, "sizing": chosen}, page, json)


def _show_shard_order(found: RawRecipe, folder: str, json: bool) -> None:
    """Show in which order a recipe would read a folder of shards: its window, what it reads, how well it mixes."""
    from halfstep.runs.explain_order import explain_order

    facts = explain_order(found, folder)
    page = Page(f"recipe {found.label}", tuple(Paragraph(line) for line in str(facts).splitlines()))
    show_result({"recipe": found.label, "folder": folder, "order": facts}, page, json)


def _is_data_place(word: str) -> bool:
    from halfstep.data.layout import is_store_address
    from halfstep.data.shard_patterns import is_shard_pattern

    return is_store_address(word) or is_shard_pattern(word) or os.path.exists(os.path.expanduser(word))


def _is_named_setting(row: SettingRow, word: str) -> bool:
    return word in (row.key, row.key.partition(".")[0], *(name.lstrip("-") for name in row.flags))


def _check_recipe_given(recipe: str | None, action: str) -> str:
    if recipe is None:
        raise WrongUse(
            f"{action} which recipe?",
            allowed="a name from `halfstep recipes`, or a path",
            do=f"halfstep recipes {action} unet",
        )
    return recipe
