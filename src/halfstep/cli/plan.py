"""`halfstep plan`: the precision, layout, compilation and batch for this model on this device, chosen by measuring."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._storing import storing
from halfstep.cli._subject import INTERRUPTED, TAKES_SETTINGS, RecipeOrCase, end, print_json, subject
from halfstep.errors import FolderTaken, WrongUse
from halfstep.progress import progress

if TYPE_CHECKING:
    from halfstep.measure.case import Subject
    from halfstep.measure.plan.plan import Plan
    from halfstep.train.recipe.resolve import Resolved
    from halfstep.train.setup import AnyRecipe

GROUP = "Choose"
COMMAND = TAKES_SETTINGS
FOLDER = Path("runs")
SECONDS = 180.0


def run(
    context: typer.Context,
    recipe: RecipeOrCase,
    seconds: Annotated[float, typer.Option(help="How long it may take, about.")] = SECONDS,
    device: Annotated[
        str | None, typer.Option(help="A device as torch names it; the best one present if left out.")
    ] = None,
    grow_batch: Annotated[
        bool, flag("--grow-batch", "Try larger batches too, which changes the optimisation.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="The recipe to write; runs/plan-RECIPE.yaml if left out.", metavar="FILE")
    ] = None,
    yes: Annotated[bool, flag("--yes", "Write the recipe without asking.")] = False,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Measure which precision, layout, compilation and batch are fastest here, and write the recipe for them."""
    given = subject(recipe, context.args)
    file = _file(given, write, yes)  # what cannot be written is found before anything is measured
    from halfstep.measure.plan.plan import plan

    try:
        with progress("planning", "s") as tell:
            found = plan(given, seconds=seconds, device=device, grow_batch=grow_batch, progress=tell)
    except KeyboardInterrupt:  # before the search began: the case was still being opened
        nothing = {"subject": given.text, "interrupted": True}
        if json:
            print_json(nothing)
        typer.echo("interrupted before anything was measured", err=True)
        raise typer.Exit(INTERRUPTED) from None
    found = _fitted(given, found)
    report = found.as_dict() | {
        "subject": given.text,
        "settings": list(given.settings),
        "options": _options(seconds, device, grow_batch),
        "file": file and str(file),
        "written": None,
    }
    if not json:
        from halfstep.cli._plan_page import show

        show(report)
    left = False
    if file is not None and not found.interrupted:
        try:
            report["written"] = _offer(given, report, file, yes=yes, asks=not json)
        except typer.Abort:  # Ctrl-C at the question is a no
            left = True
        report["file"] = report["written"] or str(_free(file))
    if json:
        print_json(report)
    else:
        from halfstep.cli._plan_page import show_next

        show_next(report)
    if left:
        raise typer.Exit(INTERRUPTED)
    end(report)


def _options(seconds: float, device: str | None, grow_batch: bool) -> list[str]:
    """As they were typed, for the commands that are printed."""
    found = [] if seconds == SECONDS else ["--seconds", f"{seconds:g}"]
    found += ["--device", device] if device else []
    return [*found, *(["--grow-batch"] * grow_batch)]


def _fitted(given: Subject, found: Plan) -> Plan:
    """A warm-up for a larger learning rate is to be a small part of the run that it is written for."""
    if found.growth is None or given.is_own_code:
        return found
    from halfstep.measure.plan.run_length import updates_of

    return replace(found, growth=found.growth.within(updates_of(_changed(given, found.changes))))


def _file(given: Subject, write: Path | None, yes: bool) -> Path | None:
    """Where the recipe would go; None for a person's own code, which has none."""
    if given.is_own_code:
        if write is not None or yes:
            raise WrongUse(
                f"{'--write' if write is not None else '--yes'} for the case {given.text}",
                allowed="a RECIPE: a case is code, and is changed by the lines that are printed",
                do="leave it out",
            )
        return None
    file = write or FOLDER / f"plan-{_resolved(given).label}.yaml"
    if file.suffix not in (".yaml", ".yml"):
        raise WrongUse(f"--write {file}", allowed="a name that ends in .yaml", do=f"--write {file}.yaml")
    _refuse_link(file)
    if yes and file.exists():
        raise FolderTaken(f"{file} is there already", allowed="a new file", do=f"give --write {_free(file)}")
    return file


def _free(file: Path) -> Path:
    """This name, or the next one that is not taken."""
    names = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    return next(name for name in chain([file], names) if not (name.exists() or name.is_symlink()))


def _refuse_link(file: Path) -> None:
    if file.is_symlink():
        raise FolderTaken(
            f"{file} is a link", allowed="a new file, not one elsewhere", do="give --write FILE with another name"
        )


def _offer(given: Subject, report: dict[str, Any], file: Path, *, yes: bool, asks: bool) -> str | None:
    """Write the recipe if the person wants it; without a terminal nobody can be asked, and nothing is written."""
    if not yes:
        if not (asks and has_terminal()):
            return None
        question = f"Replace {file}?" if file.exists() else f"Write {file}?"
        if not typer.confirm(question, default=not file.exists()):
            return None
    _refuse_link(file)
    _write(file, _text(given, report))
    return str(file)


def has_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _text(given: Subject, report: dict[str, Any]) -> str:
    """A complete recipe, with what the plan changes in it."""
    from halfstep.train.recipe.written import to_yaml

    choice, device = report["choice"], report["device"]["name"]
    speed = f", {choice['speed']['speedup']:.2f}x strict fp32" if choice["speed"] else ""
    about = f"# halfstep plan {given.text}: {choice['name']}{speed} on {device}\n"
    if report["growth"]:
        about += f"# {report['growth']['words']}\n"
    return about.replace("\r", " ") + to_yaml(_changed(given, report["changes"]))


def _changed(given: Subject, changes: dict[str, Any]) -> AnyRecipe:
    """The recipe with what the plan changes in it."""
    from halfstep.train.recipe.overrides import Override, apply

    recipe = _resolved(given).recipe
    changed = apply(recipe.model_dump(), [Override(key, value) for key, value in changes.items()])
    found: AnyRecipe = type(recipe).model_validate(changed)
    return found


def _resolved(given: Subject) -> Resolved:
    from halfstep.tasks._resolving import resolved_recipe
    from halfstep.train.recipe.sources import read_recipe

    return resolved_recipe(read_recipe(given.text), list(given.settings))


def _write(file: Path, text: str) -> None:
    from halfstep.files import write_text

    with storing(
        f"{file} cannot be written",
        allowed="a place that this user can write to",
        do="give --write FILE, in a place of your own",
    ):
        write_text(file, text)
