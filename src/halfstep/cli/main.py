"""The `halfstep` command: lists the folder, adds each command, and turns errors into three lines and an exit code.

A command is a file here with `GROUP` (a heading of `--help`) and `run` (its docstring is the help), and `COMMAND` where
typer is to be told more. What it needs from torch is imported inside `run`, so that `--help` stays quick. Files that
begin with an underscore are not commands.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from halfstep import __version__, cli
from halfstep.cli._flag import flag
from halfstep.cli._printable import printable
from halfstep.errors import CONFIGURATION, USAGE, HalfstepError, missing_extra

(_WrongWords,) = typer.BadParameter.__bases__
_WrongWords.exit_code = USAGE  # type: ignore[attr-defined]
"""typer ends with 2 where the words of a command cannot be read; our codes are those of sysexits.h."""
GROUPS = ("Run", "Choose", "Trouble", "Files")


class Commands(TyperGroup):
    """The group of all commands; errors that explain themselves are printed without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (HalfstepError, ImportError) as error:
            told = error if isinstance(error, HalfstepError) else missing_extra(error)
            if told is None or ctx.params["debug"]:
                raise
            _print(told)
            raise typer.Exit(told.exit_code) from None


def _print(error: HalfstepError) -> None:
    """Of several processes one tells of a wrong setting, which all of them have; other troubles are each one's own."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and error.exit_code == CONFIGURATION:
        return
    whose = "" if rank == "0" else f"rank {rank}: "
    Console(stderr=True, soft_wrap=True).print(Text(printable(f"{whose}{error}"), style="red"))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfstep {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[bool, flag("--version", "Print the version.", is_eager=True, callback=_print_version)] = False,
    debug: Annotated[bool, flag("--debug", "Show tracebacks of errors.", envvar="HALFSTEP_DEBUG")] = False,
) -> None:
    """Mixed precision training for PyTorch that you can trust."""


def build() -> typer.Typer:
    """The application, with a command for each file in this folder."""
    app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
    app.callback()(_options)
    commands = {name: importlib.import_module(f"{cli.__name__}.{name}") for name in command_names()}
    for name, command in sorted(commands.items(), key=lambda item: GROUPS.index(item[1].GROUP)):
        app.command(name, rich_help_panel=command.GROUP, **getattr(command, "COMMAND", {}))(command.run)
    return app


def command_names() -> list[str]:
    names = (info.name for info in pkgutil.iter_modules(cli.__path__))
    return [name for name in names if name != "main" and not name.startswith("_")]


def main() -> None:
    # What the library logs, a command prints in its own report.
    logging.getLogger("halfstep").addHandler(logging.NullHandler())
    build()()
