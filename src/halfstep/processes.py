"""Processes as files name them: whether one is of this host, and whether it is still running. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CLOCK_ERROR = 2.0
"""Seconds by which the start of a process may be wrong: files have whole seconds, and the system rounds."""
_TOKEN = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class RecordedProcess:
    """A process as a file names it. Other programs may have written it: process ids are reused, files are copied."""

    pid: int
    host: str
    since: str
    machine: str = ""
    """See `compute_boot_container_id`; empty in files of earlier versions."""
    launch: str = ""
    """The token of its launch; empty in files of earlier versions."""

    @classmethod
    def read(cls, content: Any) -> RecordedProcess | None:
        """Return the holder in the parsed content of a file; None if it names none."""
        match content:
            case {"pid": int(pid), "host": str(host), "since": str(since)} if _is_printable_text(host, since):
                machine, launch = content.get("machine"), content.get("launch")
                return cls(
                    pid, host, since, machine if isinstance(machine, str) else "", parse_launch_token(launch) or ""
                )
        return None

    @classmethod
    def own(cls, launch: str) -> RecordedProcess:
        """Return this process as a holder."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), since, compute_boot_container_id(), launch)

    @property
    def is_here(self) -> bool:
        """Return whether its process id is one of this host."""
        return self.host == socket.gethostname() and self.machine in ("", compute_boot_container_id())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def parse_launch_token(value: Any) -> str | None:
    """Return a value of a file that has the form of a launch token; None for any other."""
    return value if isinstance(value, str) and _TOKEN.fullmatch(value) else None


def compute_boot_container_id() -> str:
    """Return what tells two hosts of one name apart: a digest of the boot and of the container; empty if not known.

    A pod that is replaced keeps its name, and may have its process ids again, while the old one is still running.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:16]
    except (OSError, ValueError):  # not Linux
        return ""


def is_process_alive(pid: int, since: float) -> bool:
    """Return whether this host has a process of this id that had started at the time `since`, 0 where not known."""
    import psutil

    try:
        process = psutil.Process(pid)
        # Process ids are reused, and the first process of each container has the id 1: one that started later is
        # another one.
        is_over = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not is_over and (not since or process.create_time() < since + CLOCK_ERROR)
    except (psutil.NoSuchProcess, OSError, ValueError, OverflowError):
        return False
    except psutil.Error:  # it is another user's
        return True


def _is_printable_text(*words: str) -> bool:
    return all(word.isprintable() and 0 < len(word) <= 255 for word in words)
