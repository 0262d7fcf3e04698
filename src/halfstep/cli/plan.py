"""`halfstep plan`: choose precision, layout, compilation and batch for a model on this device by measuring."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import (
    TAKES_SETTINGS,
    Json,
    OnDevice,
    RecipeOrCaseIfAny,
    create_flag_option,
    print_json,
    subject,
)
from halfstep.errors import INTERRUPTED, FolderTaken, WrongUse
from halfstep.files import replace_storage_errors
from halfstep.json_data import convert_to_json_data
from halfstep.status_line import is_in_notebook
from halfstep.terminal import create_console, display_progress

if TYPE_CHECKING:
    from halfstep.measure.plan.page import Plan
    from halfstep.measure.subject import Subject
    from halfstep.recipe.resolve import ResolvedRecipe
    from halfstep.train.setup import AnyRecipe

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
FOLDER = Path("runs")
FIRST = "segmentation_tiny"
"""The recipe that is offered: it needs no data."""
SECONDS = 180.0


def run(
    context: typer.Context,
    recipe: RecipeOrCaseIfAny = None,
    seconds: Annotated[float, typer.Option(help="About how long it may take, in seconds.")] = SECONDS,
    device: OnDevice = None,
    grow_batch: Annotated[
        bool, create_flag_option("--grow-batch", "Try larger batches too, which changes the optimization.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="The recipe to write. Default: runs/plan-RECIPE.yaml.", metavar="FILE")
    ] = None,
    yes: Annotated[bool, create_flag_option("--yes", "Write the recipe without asking.")] = False,
    json: Json = False,
) -> None:
    """Find the fastest precision, memory format, compile setting and micro-batch size by measuring; --write saves them.

    Without a recipe it lists them and asks for one.
    """
    given = subject(recipe if recipe is not None else _ask_recipe(json), context.args)
    file = _choose_recipe_file(given, write, yes)  # fails before anything is measured
    from halfstep.measure.plan.plan import plan

    try:
        with display_progress("planning", "s") as on_progress:
            found = plan(given, seconds=seconds, device=device, grow_batch=grow_batch, progress=on_progress)
    except KeyboardInterrupt:  # the case was still being opened
        if json:
            print_json({"subject": given.text, "interrupted": True})
        create_console(stderr=True).print("interrupted before anything was measured")
        raise typer.Exit(INTERRUPTED) from None
    found = _limit_warmup(given, found)
    from halfstep.draw.terminal import show_page
    from halfstep.measure.plan.page import PlanCommand, build_next_blocks, build_plan_blocks
    from halfstep.page import Page

    # As typed, for the commands that are printed.
    options = [] if seconds == SECONDS else ["--seconds", f"{seconds:g}"]
    options += ["--device", device] if device else []
    options += ["--grow-batch"] * grow_batch
    command = PlanCommand(given.text, given.settings, tuple(options), str(file) if file else None)
    if not json:
        show_page(Page(found.name, tuple(build_plan_blocks(found))))
    left = False
    if file is not None and not found.interrupted:
        written = None
        try:
            written = _write_if_confirmed(given, found, file, yes=yes, asks=not json)
        except typer.Abort:  # Ctrl-C at the prompt means no
            left = True
        # The printed command must not name a file that exists.
        command = replace(command, written=written, file=written or str(_find_free_path(file)))
    if json:
        print_json(found.as_dict() | convert_to_json_data(command))
    else:
        show_page(Page(found.name, tuple(build_next_blocks(found, command))))
    if left or found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _ask_recipe(json: bool) -> str:
    """Return the recipe that the user chooses from the list; raise `WrongUse` where nobody can be asked."""
    asks = has_terminal() and not json
    if not json:
        from halfstep.cli.recipes import list_shipped_recipes
        from halfstep.draw.terminal import show_page
        from halfstep.page import Page
        from halfstep.recipe.explain_page import build_recipes_table

        show_page(Page("recipes", (build_recipes_table(list_shipped_recipes()),)), create_console(stderr=not asks))
    if asks:
        return str(typer.prompt("Plan which recipe, or module:callable of your code", default=FIRST))
    raise WrongUse(
        "a plan of which recipe?",
        allowed="a name from `halfstep recipes`, a path, or module:callable of your code",
        do=f"halfstep plan {FIRST}",
    )


def _limit_warmup(given: Subject, found: Plan) -> Plan:
    """Return the plan with its learning rate warm-up limited to a small part of the run."""
    if found.growth is None or given.is_own_code:
        return found
    from halfstep.runs.recipe_case import count_run_updates

    return replace(found, growth=found.growth.within(count_run_updates(_apply_plan(given, found))))


def _choose_recipe_file(given: Subject, write: Path | None, yes: bool) -> Path | None:
    """Return where the recipe would be written; None for a user's own code. Raise `WrongUse` or `FolderTaken`."""
    if given.is_own_code:
        if write is not None or yes:
            raise WrongUse(
                f"{'--write' if write is not None else '--yes'} for the case {given.text}",
                allowed="a RECIPE; a case is code: change it by the printed lines",
                do="leave it out",
            )
        return None
    file = write or FOLDER / f"plan-{_resolve_subject(given).label}.yaml"
    if file.suffix not in (".yaml", ".yml"):
        raise WrongUse(f"--write {file}", allowed="a name that ends in .yaml", do=f"--write {file}.yaml")
    _refuse_link(file)
    # With --yes nobody is asked, so nothing is replaced.
    if yes and file.exists():
        raise FolderTaken(f"{file} already exists", allowed="a new file", do=f"give --write {_find_free_path(file)}")
    return file


def _find_free_path(file: Path) -> Path:
    """Return this path, or the next numbered one that is free."""
    # A broken link does not exist, but writing would follow it.
    names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    return next(name for name in chain([file], names) if not (name.exists() or name.is_symlink()))


def _refuse_link(file: Path) -> None:
    if file.is_symlink():
        raise FolderTaken(
            f"{file} is a link", allowed="a regular file, or a new one", do="give --write FILE with another name"
        )


def _write_if_confirmed(given: Subject, found: Plan, file: Path, *, yes: bool, asks: bool) -> str | None:
    """Write the recipe if the user agrees; without a terminal nobody can be asked, and nothing is written."""
    if not yes:
        if not (asks and has_terminal()):
            return None
        question = f"Replace {file}?" if file.exists() else f"Write {file}?"
        if not typer.confirm(question, default=not file.exists()):
            return None
    _refuse_link(file)
    _write_recipe_file(file, _build_recipe_text(given, found))
    return str(file)


def has_terminal() -> bool:
    """Return whether the user can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_in_notebook()


def _build_recipe_text(given: Subject, found: Plan) -> str:
    """Return the complete recipe with the plan's changes, as YAML."""
    from halfstep.recipe.strict_yaml import dump_recipe_yaml

    choice = found.choice
    speed = f", {choice.speed.speedup:.2f}x strict fp32" if choice.speed else ""
    about = f"# halfstep plan {given.text}: {choice.name}{speed} on {found.device.name}\n"
    if found.growth:
        about += f"# {found.growth.words}\n"
    # A carriage return in a name would end the YAML comment.
    return about.replace("\r", " ") + dump_recipe_yaml(_apply_plan(given, found))


def _apply_plan(given: Subject, plan: Plan) -> AnyRecipe:
    """Return the recipe with the plan's changes."""
    from halfstep.recipe.resolve import apply_overrides

    recipe = _resolve_subject(given).recipe
    changed = apply_overrides(recipe.model_dump(), plan.changes.items())
    found: AnyRecipe = type(recipe).model_validate(changed)
    return found


def _resolve_subject(given: Subject) -> ResolvedRecipe:
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.resolve import resolve_run_recipe

    return resolve_run_recipe(read_recipe(given.text), list(given.settings))


def _write_recipe_file(file: Path, text: str) -> None:
    from halfstep.files import write_text

    with replace_storage_errors(
        f"{file} cannot be written",
        allowed="a place that this user can write to",
        do="give --write FILE, a writable path",
    ):
        write_text(file, text)
