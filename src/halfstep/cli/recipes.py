"""`halfstep recipes`: list recipes, explain their settings, and copy one for editing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._completion import recipes
from halfstep.cli._options import Json, flag, print_json
from halfstep.errors import FolderTaken, Unsafe, WrongUse, unknown_name
from halfstep.printable import in_line
from halfstep.terminal import say, screen

if TYPE_CHECKING:
    from rich.console import Console

    from halfstep.recipe.explain import SettingRow
    from halfstep.recipe.sources import RawRecipe

GROUP = "Run"
ACTIONS = ("list", "explain", "copy", "schema")


def run(
    action: Annotated[str, typer.Argument(help="list, explain, copy or schema.", metavar="ACTION")] = "list",
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A name from the list, or a path.", autocompletion=recipes),
    ] = None,
    more: Annotated[
        str | None,
        typer.Argument(
            metavar="SETTING|FOLDER|FILE",
            help="explain: one setting, such as lr, or a folder to size the recipe to. copy: the file to write.",
        ),
    ] = None,
    script: Annotated[
        bool, flag("--script", "copy: the example script of this name instead, such as unet or own_loop.")
    ] = False,
    json: Json = False,
) -> None:
    """List the recipes, explain one, copy one to make it your own, or print the JSON schema for editors."""
    if script and action != "copy":
        raise WrongUse(f"{action} --script", allowed="copy --script NAME", do="halfstep recipes copy --script unet")
    # `halfstep recipes unet` is short for `explain unet`.
    if action not in ACTIONS:
        action, recipe, more = "explain", _recipe_or_action(action), recipe
    if action == "list":
        report: dict[str, Any] = {"recipes": _list(json)}
    elif action == "schema":
        report = _schema()
    elif script:
        report = {"copied": str(_copy_script(recipe, more, quiet=json))}
    elif action == "copy":
        report = {"copied": str(_copy(_needed(recipe, action), more, quiet=json))}
    else:
        report = _explain(_needed(recipe, action), more, quiet=json)
    if json or action == "schema":
        print_json(report)


def _recipe_or_action(word: str) -> str:
    """Return the word as a recipe; a misspelled action is reported as such, not as an unknown recipe."""
    from halfstep.recipe.fields import nearest
    from halfstep.recipe.sources import is_path, recipe_names

    # `halfstep recipes explian` is a misspelled action, not a missing recipe.
    if not is_path(word) and nearest(word, [*recipe_names(), *ACTIONS]) in ACTIONS:
        raise unknown_name("action", word, ACTIONS)
    return word


def shipped() -> list[Any]:
    """Return the recipes that ship with halfstep, with their own descriptions."""
    from halfstep.recipe.explain import Shipped
    from halfstep.recipe.sources import read_recipe, recipe_names

    raw = {name: read_recipe(name).raw for name in recipe_names()}
    return [Shipped(name, str(content.get("task")), str(content.get("about", ""))) for name, content in raw.items()]


def print_recipes(console: Console) -> None:
    """Print the recipes that ship with halfstep."""
    from halfstep.cli.pages.explained import shipped_table

    console.print(shipped_table(shipped()))


def _list(quiet: bool) -> list[dict[str, str]]:
    found = shipped()
    if not quiet:
        print_recipes(screen())
        say("\nhalfstep train NAME runs one; halfstep recipes NAME says what it sets.")
    return [one._asdict() for one in found]


def _schema() -> dict[str, Any]:
    from halfstep.recipe.explain import editor_schema
    from halfstep.runs.registry import task_schemas

    return editor_schema(task_schemas())


def _copy(recipe: str, to: str | None, *, quiet: bool) -> Path:
    from halfstep.recipe.sources import recipe_text

    label, text = recipe_text(recipe)
    target = _placed(to, f"{label}.yaml")
    _write_new(target, text, f"halfstep recipes copy {recipe} OTHER.yaml")
    if not quiet:
        path = shlex.quote(str(target) if "/" in str(target) else f"./{target}")
        say(f"wrote {in_line(target)}\nedit it, then: halfstep train {path}")
    return target


def _copy_script(name: str | None, to: str | None, *, quiet: bool) -> Path:
    from halfstep.recipe.scripts import script_names, script_text

    names = ", ".join(script_names())
    if name is None:
        raise WrongUse("copy which script?", allowed=names, do="halfstep recipes copy --script unet")
    file, text = script_text(name)
    target = _placed(to, file)
    if not target.resolve().is_relative_to(Path.cwd().resolve()):
        raise Unsafe(
            f"{target} is outside of this folder",
            allowed="a file in this folder, or in one below it",
            do=f"go to the folder first, then: halfstep recipes copy --script {name}",
        )
    _write_new(target, text, f"halfstep recipes copy --script {name} OTHER.py")
    if not quiet:
        say(f"wrote {in_line(target)}\nedit it, then: python {shlex.quote(str(target))}")
    return target


def _placed(to: str | None, name: str) -> Path:
    """Return the path to write: under this name in a folder, or here where none is given."""
    target = Path(to or name)
    return target / name if target.is_dir() else target


def _write_new(target: Path, text: str, do: str) -> None:
    """Write a file that is not there yet; raise `FolderTaken` otherwise."""
    try:
        # "x" fails where the file exists, without a race between check and write.
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "is there already" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
        raise FolderTaken(f"{target} {reason}", allowed="a new file", do=do) from None


def _explain(recipe: str, setting: str | None, *, quiet: bool) -> dict[str, Any]:
    from halfstep.recipe.explain import rows
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import task_schemas

    found, schemas = read_recipe(recipe), task_schemas()
    if setting is not None and found.raw.get("sizing") == "auto" and os.path.isdir(os.path.expanduser(setting)):
        return _sized(found, setting, quiet=quiet)
    task = str(found.raw.get("task"))
    if task not in schemas:
        raise unknown_name("task", task, schemas)
    chosen = [row for row in rows(schemas[task]) if setting is None or _is_meant(row, setting)]
    if not chosen:
        raise unknown_name("setting", setting, [row.key for row in rows(schemas[task])])
    if not quiet:
        _show(found, chosen, whole=setting is None)
    return {"recipe": found.label, "task": task, "settings": [row._asdict() for row in chosen]}


def _sized(found: RawRecipe, folder: str, *, quiet: bool) -> dict[str, Any]:
    """Report what a recipe chooses for a data set on this machine, and why."""
    from halfstep.runs.resolve import resolved_recipe

    chosen = resolved_recipe(found, {"data.path": folder}).sizing
    if not quiet:
        from halfstep.cli.pages.explained import sizing_table

        say(f"{found.label} chooses for {shlex.quote(folder)} on this machine, where nothing else is given:\n")
        _print(sizing_table(chosen))
        say(f"\nrun it: halfstep train {found.label} --data_dir {shlex.quote(folder)}")
    return {"recipe": found.label, "folder": folder, "sizing": [one._asdict() for one in chosen]}


def _is_meant(row: SettingRow, word: str) -> bool:
    return word in (row.key, row.key.partition(".")[0], *(name.lstrip("-") for name in row.flags))


def _show(found: RawRecipe, chosen: list[SettingRow], *, whole: bool) -> None:
    from halfstep.cli.pages.explained import one_setting, short
    from halfstep.recipe.explain import value_in_words
    from halfstep.recipe.strict_yaml import flat

    if not whole:
        for row in chosen:
            _print(one_setting(row))
        return
    say(f"{found.text.rstrip()}\n\nWhat can be set, what it is if it is left out, and what it is here:\n")
    _print(short(chosen, {key: value_in_words(value) for key, value in flat(found.raw)}))


def _needed(recipe: str | None, action: str) -> str:
    if recipe is None:
        raise WrongUse(
            f"{action} which recipe?",
            allowed="a name from `halfstep recipes`, or a path",
            do=f"halfstep recipes {action} unet",
        )
    return recipe


def _print(content: Any) -> None:
    screen().print(content)
