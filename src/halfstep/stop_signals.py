"""The signals that ask a run to stop. Imports little: they are caught before torch is loaded."""

from __future__ import annotations

import signal
from pathlib import Path

POSSIBLE = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
"""All that may ask a process to stop."""
_BY_SCHEDULERS = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
"""Sent by Slurm (`--signal=USR1@60`) and others ahead of SIGTERM."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop, besides Ctrl-C.

    SIGHUP, of a terminal that closes, unless it is ignored, as by `nohup`; SIGUSR1 and SIGUSR2 unless somebody has a
    handler for them.
    """
    heard = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    return heard + [number for number in _BY_SCHEDULERS if is_free(number)]


def is_free(number: signal.Signals) -> bool:
    """Return whether a signal has its default action: nobody handles or ignores it."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    # Python does not know of handlers in C, such as those of faulthandler.register.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return not caught & 1 << (number - 1)
