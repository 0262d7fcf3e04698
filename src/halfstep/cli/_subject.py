"""What every Choose and Trouble command takes: a RECIPE with settings, or a case; and how it ends on Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.errors import WrongUse

if TYPE_CHECKING:
    from halfstep.measure.case import Subject

TAKES_SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""How typer is to make such a command: what it does not know itself is a setting of the recipe."""
INTERRUPTED = 130
"""What a shell expects of a command that Ctrl-C ended."""

RecipeOrCase = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|CASE",
        help="A recipe, then settings of it; or `module:callable`, which returns (model, loss_fn, batch).",
    ),
]


def subject(text: str, settings: Sequence[str]) -> Subject:
    """What the words of a command mean; wrong ones are found before anything is measured."""
    if text.startswith("-"):
        raise WrongUse(f"{text} where RECIPE should be", allowed="RECIPE or CASE first", do=f"put {text} after it")
    from halfstep.measure.case import Subject

    return Subject(text, tuple(settings))


def print_json(report: dict[str, Any]) -> None:
    typer.echo(dumps(report, indent=1))


def end(report: dict[str, Any]) -> None:
    """Leave as a shell expects it where a report says that it was interrupted."""
    if report.get("interrupted"):
        raise typer.Exit(INTERRUPTED)
