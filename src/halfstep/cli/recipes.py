"""`halfstep recipes`: what there is to run, what each setting means, and a copy to make one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag

if TYPE_CHECKING:
    from halfstep.train.recipe.explain import Row
    from halfstep.train.recipe.sources import Found

GROUP = "Run"
ACTIONS = ("list", "explain", "copy", "schema")


def run(
    action: Annotated[str, typer.Argument(help="list, explain, copy or schema.", metavar="[ACTION]")] = "list",
    recipe: Annotated[str | None, typer.Argument(help="The name of a recipe, or a path to one.")] = None,
    more: Annotated[
        str | None, typer.Argument(help="explain: one setting, such as optimizer.lr. copy: the file to write.")
    ] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """List the recipes, explain one, copy one to make it your own, or print the JSON schema for editors."""
    # `halfstep recipes unet` is what people type first.
    if action not in ACTIONS:
        action, recipe, more = "explain", _recipe_or_action(action), recipe
    if action == "list":
        report: dict[str, Any] = {"recipes": _list(json)}
    elif action == "schema":
        report = _schema()
    elif action == "copy":
        report = {"copied": str(_copy(_needed(recipe, action), more, quiet=json))}
    else:
        report = _explain(_needed(recipe, action), more, quiet=json)
    if json or action == "schema":
        from json import dumps

        typer.echo(dumps(report, indent=1))


def _recipe_or_action(word: str) -> str:
    """A recipe; a misspelt action is told so, and not that there is no such recipe."""
    from halfstep.errors import unknown_name
    from halfstep.train.recipe.sources import is_path, recipe_names
    from halfstep.train.recipe.spelling import nearest

    if not is_path(word) and nearest(word, [*recipe_names(), *ACTIONS]) in ACTIONS:
        raise unknown_name("action", word, ACTIONS)
    return word


def shipped() -> list[Any]:
    """The recipes that ship with halfstep, as they describe themselves."""
    from halfstep.train.recipe.explain import Shipped
    from halfstep.train.recipe.sources import read_recipe, recipe_names

    raw = {name: read_recipe(name).raw for name in recipe_names()}
    return [Shipped(name, str(content.get("task")), str(content.get("about", ""))) for name, content in raw.items()]


def _list(quiet: bool) -> list[dict[str, str]]:
    found = shipped()
    if not quiet:
        from halfstep.cli._explained import shipped_table

        _print(shipped_table(found))
        typer.echo("\nhalfstep train NAME runs one; halfstep recipes explain NAME says what it sets.")
    return [one._asdict() for one in found]


def _schema() -> dict[str, Any]:
    from halfstep.cli._schemas import task_schemas
    from halfstep.train.recipe.explain import editor_schema

    return editor_schema(task_schemas())


def _copy(recipe: str, to: str | None, *, quiet: bool) -> Path:
    from halfstep.errors import FolderTaken
    from halfstep.train.recipe.sources import recipe_text

    label, text = recipe_text(recipe)
    target = Path(to or f"{label}.yaml")
    if target.is_dir():
        target = target / f"{label}.yaml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "is there already" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
        raise FolderTaken(
            f"{target} {reason}", allowed="a new file", do=f"halfstep recipes copy {recipe} OTHER.yaml"
        ) from None
    if not quiet:
        typer.echo(f"wrote {target}\nedit it, then: halfstep train {target if '/' in str(target) else f'./{target}'}")
    return target


def _explain(recipe: str, setting: str | None, *, quiet: bool) -> dict[str, Any]:
    from halfstep.cli._schemas import task_schemas
    from halfstep.errors import unknown_name
    from halfstep.train.recipe.explain import rows
    from halfstep.train.recipe.sources import read_recipe

    found, schemas = read_recipe(recipe), task_schemas()
    task = str(found.raw.get("task"))
    if task not in schemas:
        raise unknown_name("task", task, schemas)
    chosen = [row for row in rows(schemas[task]) if setting is None or _is_meant(row, setting)]
    if not chosen:
        raise unknown_name("setting", setting, [row.key for row in rows(schemas[task])])
    if not quiet:
        _show(found, chosen, whole=setting is None)
    return {"recipe": found.label, "task": task, "settings": [row._asdict() for row in chosen]}


def _is_meant(row: Row, word: str) -> bool:
    return word in (row.key, row.key.partition(".")[0], *(name.lstrip("-") for name in row.flags))


def _show(found: Found, chosen: list[Row], *, whole: bool) -> None:
    from halfstep.cli._explained import one_setting, short
    from halfstep.train.recipe.explain import value_in_words
    from halfstep.train.recipe.written import flat

    if not whole:
        for row in chosen:
            _print(one_setting(row))
        return
    typer.echo(f"{found.text.rstrip()}\n\nWhat can be set, what it is if it is left out, and what it is here:\n")
    _print(short(chosen, {key: value_in_words(value) for key, value in flat(found.raw)}))


def _needed(recipe: str | None, action: str) -> str:
    if recipe is None:
        from halfstep.errors import WrongUse

        raise WrongUse(
            f"{action} which recipe?",
            allowed="a name from `halfstep recipes`, or a path",
            do=f"halfstep recipes {action} unet",
        )
    return recipe


def _print(content: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(content)
