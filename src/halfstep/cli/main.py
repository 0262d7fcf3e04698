"""The entry point of `halfstep`: print the current activity at once, then load the required modules."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from halfstep.cli import _probe
from halfstep.errors import INTERRUPTED, SOFTWARE, HalfstepError, WrongLaunch
from halfstep.host_memory import pause_gc
from halfstep.launch_variables import convert_slurm_variables
from halfstep.status_line import clear_status_line, show_on_terminal, show_status
from halfstep.stop_signals import exit_before_run, list_stop_signals

if TYPE_CHECKING:
    from types import FrameType

    import typer

QUICK = ("recipes", "runs", "status")
"""Commands that load nothing slow."""


def main() -> None:
    """Run the command line."""
    # Commands print log messages in their own reports; without a handler, logging would print warnings to stderr.
    logging.getLogger("halfstep").addHandler(logging.NullHandler())
    # transformers imports torchao where it is installed, and torchao calls what torch deprecates: no news for a user.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # Print a question mark for a character that the encoding lacks, such as an ellipsis in ASCII, and no traceback.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")
    # The signals that end a run with 75 from its first moment on, while modules are imported too.
    in_main = threading.current_thread() is threading.main_thread()
    heard = list_stop_signals() if sys.argv[1:2] == ["train"] and in_main else []
    before = {number: signal.getsignal(number) for number in [*heard, signal.SIGINT]}
    try:
        for number in heard:
            signal.signal(number, exit_before_run)
        _answer_status_probe(sys.argv[1:])
        # First of all: one rank prints, also before torch is loaded.
        os.environ.update(convert_slurm_variables(os.environ))
        with _exit_on_interrupt(sys.argv[1:2]), pause_gc():
            _show_activity(sys.argv[1:])
            application = build(sys.argv[1:2])
        application(prog_name="halfstep")
    except KeyboardInterrupt:
        _print_stopped()
        raise SystemExit(INTERRUPTED) from None
    except WrongLaunch as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None
    except Exception:
        # A bug, or an error in a task: Python would exit with 1, which says nothing.
        traceback.print_exc()
        raise SystemExit(SOFTWARE) from None
    finally:
        clear_status_line()
        _restore_handlers(before)


def _restore_handlers(before: Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int | None]) -> None:
    """Set back signal handlers, for a process that lives on: Ctrl-C in it must not end it like a command."""
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _answer_status_probe(words: list[str]) -> None:
    """Answer a usual `halfstep status` and exit, before anything slow is imported; errors are left to its command."""
    asked = _probe.parse_status_query(words[1:]) if words[:1] == [_probe.COMMAND] else None
    if asked is not None:
        with contextlib.suppress(HalfstepError, ImportError):
            raise SystemExit(_probe.answer(asked))


@contextmanager
def _exit_on_interrupt(command: list[str]) -> Iterator[None]:
    """Let Ctrl-C end the process while modules are imported.

    A KeyboardInterrupt would be lost where it meets a callback of the import system, which cannot raise. `train` keeps
    this until it watches signals itself.
    """
    # Ignored signals stay ignored, as for a command that was started with `nohup`.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit_interrupted)
    try:
        yield
    finally:
        if command != ["train"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_stopped() -> None:
    clear_status_line()
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("stopped\n")
        sys.stderr.flush()


def _exit_interrupted(*_: object) -> NoReturn:
    _print_stopped()
    # Not SystemExit, which a callback would lose as well; nothing was started that needs a cleanup.
    os._exit(INTERRUPTED)


def build(names: Iterable[str] = ()) -> typer.Typer:
    """Return the application with these commands, or with all where none of the names is known. Loading all is slow."""
    from halfstep.cli._commands import build_application, list_command_names

    known = list_command_names()
    return build_application([name for name in known if name in tuple(names)] or known)


def _show_activity(words: list[str]) -> None:
    command, subject = (*words[:2], "", "")[:2]
    # These finish at once; a line that says so would only flicker.
    if "--help" in words or command in QUICK or command.startswith("-"):
        return
    if command == "train" and subject and not subject.startswith("-"):
        show_status(f"halfstep train {subject}: reading the recipe")
    elif command:
        show_on_terminal(f"halfstep {command}: loading")
