"""`halfstep train`: train a recipe, changed by the settings that follow it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._completion import complete_recipes
from halfstep.cli._options import TAKES_SETTINGS, SettingsCommand, create_flag_option, print_json
from halfstep.errors import Diverged, NotBegun, OutOfMemory, Stopped, WrongUse
from halfstep.host_memory import keep_freed_memory, pause_gc
from halfstep.status_line import Now, create_status_reporter
from halfstep.terminal import print_plain_text
from halfstep.train.signals import StopSignalHandler, end_process

if TYPE_CHECKING:
    from halfstep.recipe.resolve import ResolvedRecipe
    from halfstep.train.run import Run

GROUP = "Run"
COMMAND = {"cls": SettingsCommand, **TAKES_SETTINGS}
"""typer's arguments for the command, where they differ from the default."""


def run(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A name from `halfstep recipes`, or a path.", autocompletion=complete_recipes
        ),
    ],
    new: Annotated[
        bool, create_flag_option("--new", "Start a new run in a numbered folder if the run's folder exists.")
    ] = False,
    task: Annotated[Path | None, typer.Option(help="A Python file with your own task.", metavar="FILE")] = None,
    accept_data_change: Annotated[
        bool, create_flag_option("--accept-data-change", "Continue an unfinished run even if its data has changed.")
    ] = False,
    accept_recipe_change: Annotated[
        bool, create_flag_option("--accept-recipe-change", "Continue an unfinished run with a different recipe.")
    ] = False,
    extend: Annotated[
        bool,
        create_flag_option(
            "--extend", "Continue a finished run to a new total of --epochs or --steps, at its final lr."
        ),
    ] = False,
    rewarm: Annotated[
        bool, create_flag_option("--rewarm", "With --extend: a new warm-up and decay of the lr over the added steps.")
    ] = False,
    show: Annotated[bool, create_flag_option("--show", "Print the resolved recipe without training.")] = False,
    json: Annotated[bool, create_flag_option("--json", "Print the result as one JSON object at the end.")] = False,
) -> None:
    """Train a recipe. Override its settings after the name: train.batch_size=4, --batch_size 4 or --bf16.

    An interrupted run resumes when it is started again with the same command. If steps keep failing, the run reports
    the cause and stops with exit code 80; with --guard repair, it applies a remedy and continues.
    """
    if recipe.startswith("-"):
        raise WrongUse(
            f"{recipe} instead of RECIPE", allowed="RECIPE first", do=_suggest_recipe_first([recipe, *context.args])
        )
    now = create_status_reporter(f"halfstep train {recipe}")
    now("reading the recipe")
    from halfstep.runs.resolve import list_accepted_changes, refuse_early

    accepted = list_accepted_changes(new, accept_data_change, accept_recipe_change, extend, rewarm)
    resolved, own, notes = _resolve_recipe_and_task(recipe, task, context.args, now)
    if show:
        from halfstep.recipe.strict_yaml import dump_recipe_yaml

        now("")
        print_plain_text(dump_recipe_yaml(resolved.recipe).rstrip("\n"))
        return
    # A user's task may need other packages and data than ours, so only our tasks are checked early.
    if own is None:
        refuse_early(resolved, new=new, accepted=accepted)
    now("loading torch")
    # Loading torch takes seconds; a signal during that time must not be lost.
    with StopSignalHandler(end_process) as stopping:
        options = {"task": own, "new": new, "quiet": json, "notes": notes, "accepted": accepted, "now": now}
        try:
            result = _launch_run(resolved, stopping, options)
        except (Stopped, Diverged) as ended:
            if json or isinstance(ended, NotBegun):
                raise
            raise typer.Exit(ended.exit_code) from None  # the journal has printed it already
        except OutOfMemory as failed:
            from halfstep.cli._out_of_memory import report_out_of_memory as show_memory

            show_memory(failed, recipe, context.args)
            raise typer.Exit(failed.exit_code) from None
    if json and os.environ.get("RANK", "0") == "0":
        from dataclasses import asdict

        print_json({**asdict(result), "dir": str(result.dir)})


_CONFIG = ("--config", "--cfg", "--config-file", "--config_file")


def _suggest_recipe_first(words: list[str]) -> str:
    """Return the command with RECIPE first; other projects give a file as `--config FILE`."""
    flag, equals, value = words[0].partition("=")
    if flag in _CONFIG and (equals or len(words) > 1):
        words = [value, *words[1:]] if equals else words[1:]
        return shlex.join(["halfstep", "train", *words])
    return f"halfstep train RECIPE {words[0]}"


def _resolve_recipe_and_task(
    recipe: str, task: Path | None, words: list[str], now: Now
) -> tuple[ResolvedRecipe, Any, list[str]]:
    """Return the complete recipe, the user's own task if any, and notes about it."""
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import load_task_file
    from halfstep.runs.resolve import resolve_run_recipe

    found = read_recipe(recipe)
    if task is None:
        return resolve_run_recipe(found, words), None, []
    now(f"loading {task}")
    with pause_gc():
        own, digest = load_task_file(task)
    notes = [f"task {own.__name__} from {task} (sha256 {digest})"]
    return resolve_run_recipe(found, words, schema=own.schema), own, notes


def _launch_run(resolved: ResolvedRecipe, stopping: StopSignalHandler, options: dict[str, Any]) -> Run:
    with pause_gc():
        from halfstep.runs.fit import launch
        from halfstep.train.watchdog import end_hung_process

    # A signal that came while torch was loading.
    stopping.leave_unbegun()
    import torch

    if not torch.accelerator.is_available():
        # glibc returns large blocks to the system, and the next step would fault every page in again; must precede the
        # first large allocation.
        keep_freed_memory()
    command = shlex.join(["halfstep", *sys.argv[1:]])  # as typed, for typing it again
    return launch(resolved, command=command, on_hang=end_hung_process, **options)
