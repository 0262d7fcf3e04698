"""Build the command line application from the files of this folder, and turn errors into three lines and an exit code.

A command is a file with `GROUP` (a heading of `--help`) and `run` (its docstring is the help), and optionally `COMMAND`
(arguments for typer). torch is imported inside `run`, so that `--help` stays fast. Files with a leading underscore
are not commands.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable
from functools import partial
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from halfstep import cli
from halfstep._version import __version__
from halfstep.cli._options import HalfstepCommand, HelpOptionMixin, create_flag_option, read_help_text
from halfstep.errors import (
    CONFIGURATION,
    INTERRUPTED,
    USAGE,
    HalfstepError,
    WrongLaunch,
    convert_import_error,
    convert_torchvision_error,
    use_command_wording,
)
from halfstep.printable import escape_to_one_line, escape_unprintable
from halfstep.status_line import clear_status_line
from halfstep.terminal import create_console, print_plain_text

_WrongWords: Any
# click's UsageError, reached through typer: click itself is not among our dependencies.
(_WrongWords,) = typer.BadParameter.__bases__
_WrongWords.exit_code = USAGE
"""typer exits with 2 for a command line it cannot parse; halfstep uses the codes of sysexits.h."""
GROUPS = ("Run", "Choose", "Trouble", "Files")


class CommandGroup(HelpOptionMixin, TyperGroup):
    """The group of all commands; a `HalfstepError` is printed without a traceback."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options; those that typer adds for completion are shown without a value, as ours are."""
        params = super().get_params(ctx)
        for param in params:
            if param.name in ("install_completion", "show_completion"):
                param.metavar = ""
        return params

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print errors that explain themselves, and exit with their code."""
        try:
            with use_command_wording():
                return super().invoke(ctx)
        except _WrongWords as error:
            # The message may contain a file name that a shell glob inserted, with control characters in it.
            error.message = escape_to_one_line(error.message)
            clear_status_line()
            raise
        except KeyboardInterrupt:
            # Long commands handle Ctrl-C themselves; mostly this one came while torch and others were imported.
            clear_status_line()
            sys.stderr.write("stopped\n")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise  # both derive from RuntimeError, and `_convert_to_halfstep_error` would load torch after every --help
        except (HalfstepError, ImportError, MemoryError, RuntimeError) as error:
            explained = _convert_to_halfstep_error(error)
            if explained is None or ctx.params["debug"]:
                raise
            _print_error(explained)
            raise typer.Exit(explained.exit_code) from None


def _convert_to_halfstep_error(error: Exception) -> HalfstepError | None:
    """Return the error as a `HalfstepError`; None for a bug, which gets a traceback."""
    if isinstance(error, HalfstepError):
        return error
    if isinstance(error, ImportError):
        return convert_import_error(error)
    from halfstep.out_of_memory import convert_memory_error

    return convert_torchvision_error(error) or convert_memory_error(
        error, "", "smaller images or batches, such as data.tile=256 for predict; or close other programs"
    )


def _print_error(error: HalfstepError) -> None:
    """Print an error. A configuration error is the same on every rank, so only rank 0 prints it; other errors are
    per rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0" and error.exit_code == CONFIGURATION and not isinstance(error, WrongLaunch):
        return
    whose = "" if rank == "0" else f"rank {rank}: "
    console = create_console(stderr=True, soft_wrap=True)
    width = console.width if console.is_terminal else None
    lines = [_wrap_words(_indent_lines(whose + error.given), width)]
    if error.allowed:
        lines.append(_wrap_words(_indent_lines(f"  allowed: {error.allowed}"), width))
    if error.do:
        lines.append(_indent_lines(f"  do: {error.do}"))  # never folded: it may contain a command to copy
    console.print(Text("\n".join(lines), style="red"))


def _wrap_words(text: str, width: int | None) -> str:
    """Wrap lines between words, where a terminal would break inside them."""
    if width is None:
        return text
    fold = partial(wrap, width=width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(fold(line)) for line in text.split("\n"))


def _indent_lines(part: str) -> str:
    """Indent all lines but the first, so that a line break in a file name cannot imitate a line of halfstep's."""
    first, *others = escape_unprintable(part).split("\n")
    return "\n".join([first, *(f"    {line.strip()}" for line in others)])


def _print_version(wanted: bool) -> None:
    if wanted:
        print_plain_text(f"halfstep {__version__}")
        raise typer.Exit


def _declare_global_options(
    version: Annotated[
        bool, create_flag_option("--version", "Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, create_flag_option("--debug", "Show full tracebacks on errors.", envvar="HALFSTEP_DEBUG")
    ] = False,
) -> None:
    """Mixed precision training for PyTorch that you can trust."""


def build_application(names: Iterable[str]) -> typer.Typer:
    """Return the application with one command per file name."""
    # `CommandGroup` prints errors itself, so typer's own tracebacks are off.
    app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_declare_global_options)
    commands = {name: importlib.import_module(f"{cli.__name__}.{name}") for name in names}
    for name, command in sorted(commands.items(), key=lambda item: GROUPS.index(item[1].GROUP)):
        options = {"cls": HalfstepCommand, **getattr(command, "COMMAND", {})}
        app.command(name, help=read_help_text(command.run), rich_help_panel=command.GROUP, **options)(command.run)
    return app


def list_command_names() -> list[str]:
    """Return the names of all commands."""
    # Listed without importing them: a command imports only itself.
    files = (info.name for info in pkgutil.iter_modules(cli.__path__) if not info.ispkg)
    return [name for name in files if name != "main" and not name.startswith("_")]
