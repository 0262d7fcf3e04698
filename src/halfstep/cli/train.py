"""`halfstep train`: a recipe, changed by what follows it, becomes a run."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._flag import flag
from halfstep.cli._settings import TakesSettings
from halfstep.errors import Diverged, NotBegun, Stopped, WrongUse
from halfstep.freed_memory import keep_freed_memory
from halfstep.train.stopping import Stopping

GROUP = "Run"
COMMAND = {
    "cls": TakesSettings,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
"""How typer is to make the command, where that is not as usual."""


def run(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="The name of a recipe (see `halfstep recipes`), or a path to one.")],
    new: Annotated[bool, flag("--new", "Number another folder where the run's own is taken.")] = False,
    task: Annotated[Path | None, typer.Option(help="A Python file with a task of your own.", metavar="FILE")] = None,
    accept_data_change: Annotated[
        bool, flag("--accept-data-change", "Go on with an unfinished run though its data has changed.")
    ] = False,
    accept_recipe_change: Annotated[
        bool, flag("--accept-recipe-change", "Go on with an unfinished run under another recipe.")
    ] = False,
    show: Annotated[bool, flag("--show", "Print the resolved recipe, and train nothing.")] = False,
    json: Annotated[bool, flag("--json", "Print the result as one JSON object at the end.")] = False,
) -> None:
    """Train a recipe. What follows it changes it: train.batch_size=4, or --batch_size 4, or --bf16.

    A run that was interrupted goes on where it was, when it is started again with the same command. One whose steps
    fail names what made them fail, and stops with exit code 80; with --guard repair it cures it and goes on.
    """
    if recipe.startswith("-"):
        raise WrongUse(f"{recipe} where RECIPE should be", allowed="RECIPE first", do=f"halfstep train RECIPE {recipe}")
    from halfstep.tasks._folder import task_from_file
    from halfstep.tasks._resolving import resolved_recipe
    from halfstep.train.recipe.changes import DATA, RECIPE
    from halfstep.train.recipe.sources import read_recipe

    own, digest = task_from_file(task) if task else (None, "")
    # Everything that can be wrong in words is found here, before torch is loaded.
    resolved = resolved_recipe(read_recipe(recipe), context.args, schema=own.schema if own else None)
    if show:
        from halfstep.train.recipe.written import to_yaml

        typer.echo(to_yaml(resolved.recipe), nl=False)
        return
    accepted = {DATA: accept_data_change, RECIPE: accept_recipe_change}
    notes = [f"task {own.__name__} from {task} (sha256 {digest})"] if own else []
    with Stopping():  # torch takes seconds to load, and a run that is asked to stop meanwhile should know of it
        from halfstep.tasks._fit import launch

        if not _has_accelerator():
            keep_freed_memory()
        given = [name for name, is_given in accepted.items() if is_given]
        try:
            result = launch(resolved, task=own, new=new, quiet=json, command=_command(), notes=notes, accepted=given)
        except (Stopped, Diverged) as ended:
            if json or isinstance(ended, NotBegun):
                raise
            raise typer.Exit(ended.exit_code) from None  # the journal has said it on the screen already
    if json and os.environ.get("RANK", "0") == "0":
        from dataclasses import asdict
        from json import dumps

        typer.echo(dumps({**asdict(result), "dir": str(result.dir)}, indent=1))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _command() -> str:
    """What was typed, to be typed again."""
    return shlex.join(["halfstep", *sys.argv[1:]])
