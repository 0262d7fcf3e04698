"""The entry point of `halfstep`: print at once what is being done, then load what that takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from halfstep.errors import INTERRUPTED
from halfstep.host_memory import nothing_collected
from halfstep.status_line import clear, show, tell

if TYPE_CHECKING:
    import typer

QUICK = ("recipes",)
"""Commands that load nothing slow."""


def main() -> None:
    """Run the command line."""
    # Commands print log messages in their own reports; without a handler, logging would print warnings to stderr.
    logging.getLogger("halfstep").addHandler(logging.NullHandler())
    try:
        with nothing_collected():
            _show_activity(sys.argv[1:])
            application = build(sys.argv[1:2])
        application(prog_name="halfstep")
    except KeyboardInterrupt:
        # Ctrl-C while modules are imported: a traceback through them would tell the user nothing.
        clear()
        sys.stderr.write("stopped\n")
        raise SystemExit(INTERRUPTED) from None
    finally:
        clear()


def build(names: Iterable[str] = ()) -> typer.Typer:
    """Return the application with these commands, or with all where none of the names is known. Loading all is slow."""
    from halfstep.cli._commands import application, command_names

    known = command_names()
    return application([name for name in known if name in tuple(names)] or known)


def _show_activity(words: list[str]) -> None:
    command, subject = (*words[:2], "", "")[:2]
    # These finish at once; a line that says so would only flicker.
    if "--help" in words or command in QUICK or command.startswith("-"):
        return
    if command == "train" and subject and not subject.startswith("-"):
        tell(f"halfstep train {subject}: reading the recipe")
    elif command:
        show(f"halfstep {command}: loading")
