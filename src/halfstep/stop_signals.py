"""The signals that ask a run to stop. Imports little: they are caught before torch is loaded."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from halfstep.errors import TRY_AGAIN
from halfstep.status_line import clear_status_line

POSSIBLE = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
"""All that may ask a process to stop."""
_BY_SCHEDULERS = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
"""Sent by Slurm (`--signal=USR1@60`) and others ahead of SIGTERM."""


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop, besides Ctrl-C.

    SIGHUP, of a terminal that closes, unless it is ignored, as by `nohup`; SIGUSR1 and SIGUSR2 unless somebody has a
    handler for them.
    """
    heard = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    return heard + [number for number in _BY_SCHEDULERS if is_signal_free(number)]


def is_signal_free(number: signal.Signals) -> bool:
    """Return whether nobody but halfstep handles a signal, and nobody ignores it."""
    handler = signal.getsignal(number)
    if handler is not signal.SIG_DFL:
        return handler is exit_before_run
    # Python does not know of handlers in C, such as those of faulthandler.register.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return not caught & 1 << (number - 1)


def exit_before_run(number: int, _: object) -> NoReturn:
    """End a process that has started no run yet; a signal handler."""
    clear_status_line()
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # the terminal that closed
            sys.stderr.write(f"stopped by {signal.Signals(number).name} before the first step\n")
            sys.stderr.flush()
    # Not SystemExit, which a callback of the import system would lose.
    os._exit(TRY_AGAIN)
