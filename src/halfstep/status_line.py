"""Show on one line of stderr what a command is doing. It appears at once, so this module imports little."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from shutil import get_terminal_size

from halfstep.printable import escape_to_one_line

OnProgress = Callable[[int, int], None]
"""A callback that is given (done, total)."""
Now = Callable[[str], None]
"""Called with the current activity; an empty string removes the line."""
_ERASED = "\r\x1b[2K"
_shown = ""
"""The line that is displayed now, without a newline: it is erased before anything else is printed."""


def ignore_status(doing: str) -> None:
    """Show nothing: for calls that nobody waits for."""


def create_status_reporter(title: str) -> Now:
    """Return a function that shows what `title` is doing. Only rank 0 prints."""
    return partial(_show_phase, title)


def show_status(line: str) -> None:
    """Show a status line: on a terminal it replaces the previous one, in a log it is one more line."""
    global _shown
    line = escape_to_one_line(line)
    if _can_erase_line():
        show_on_terminal(line)
    elif line != _shown and _can_print():
        _shown = line
        _write_stderr(f"{line}\n")


def show_on_terminal(line: str) -> None:
    """Show a status line on a terminal, and nothing in a log."""
    global _shown
    if _can_erase_line():
        _shown = escape_to_one_line(line)
        # One column less than the width: a full line would wrap, and the erase code clears a single row.
        _write_stderr(f"{_ERASED}{_shown[: get_terminal_size().columns - 1]}")


def clear_status_line() -> None:
    """Erase the status line."""
    global _shown
    if _shown and _can_erase_line():
        _write_stderr(_ERASED)
    _shown = ""


def _show_phase(title: str, doing: str) -> None:
    if doing:
        show_status(f"{title}: {doing}")
    else:
        clear_status_line()


def is_in_notebook() -> bool:
    """Return whether output goes to a notebook's cell, which appends what a terminal draws over.

    IPython runs `!command` in a pseudo-terminal; the command inherits the variables of the kernel.
    """
    inline = os.environ.get("MPLBACKEND", "").startswith("module://matplotlib_inline")
    return inline or "JPY_PARENT_PID" in os.environ


def _can_erase_line() -> bool:
    if is_in_notebook():
        return False
    # TERM=dumb means that the terminal does not interpret the codes that erase a line.
    return _can_print() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _can_print() -> bool:
    # sys.stderr is None under pythonw; torchrun sets RANK.
    return sys.stderr is not None and os.environ.get("RANK", "0") == "0"


def _write_stderr(text: str) -> None:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    try:
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stderr.flush()
    except OSError:  # the reader has closed its end
        pass
