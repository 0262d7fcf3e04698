"""Processes as files and other ranks name them: which are of this host, and which are gone. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

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


SETTLED = 2.0
"""Seconds after its end from which a process counts as gone: what it sent before may still arrive."""


class RankProcess(NamedTuple):
    """The process of a rank on this host."""

    rank: int
    pid: int
    began: str
    """Its start, in ticks of the kernel: a later process with the same number has another one."""

    def __str__(self) -> str:
        return f"{self.rank} {self.pid} {self.began};"


def read_own_process(rank: int) -> RankProcess:
    """Return the process that calls this, as that of a rank."""
    return RankProcess(rank, os.getpid(), read_process_start(os.getpid()))


def parse_processes(text: str) -> list[RankProcess]:
    """Return the processes of a concatenation of their texts; of a rank that is there twice, the last one."""
    rows = (entry.split(" ") for entry in text.split(";") if entry)
    found = {int(rank): RankProcess(int(rank), int(pid), began) for rank, pid, began in rows}
    return list(found.values())


def compute_host_id() -> str:
    """Return a name that is the same for two processes only if each can see the other by its process id."""
    # Not the host's name alone: two containers may share one, and have separate process ids.
    return f"{socket.gethostname()} {compute_boot_container_id()}"


def is_process_gone(process: RankProcess) -> bool:
    """Return whether a process of this host has ended."""
    return not is_process_alive(process.pid, 0) or read_process_start(process.pid) != process.began


def read_process_start(pid: int) -> str:
    """Return the start of a process in ticks since the boot, which no change of the clock moves; empty if unknown."""
    try:
        # The name, in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Peers:
    """The other ranks. Read from any thread; nothing here touches a disk or a network."""

    def __init__(self, here: Iterable[RankProcess], away: Iterable[int]) -> None:
        self._here, self.away = tuple(here), tuple(away)
        self._since: dict[int, float] = {}
        self._lost: dict[int, str] = {}

    def report_lost(self, rank: int, why: str) -> None:
        """Report that a rank of another host is lost."""
        self._lost.setdefault(rank, why)

    def gone(self) -> Mapping[int, str]:
        """Return the ranks that are gone, each with the evidence."""
        now = time.monotonic()
        for process in self._here:
            if process.rank not in self._since and is_process_gone(process):
                self._since[process.rank] = now
        ended = {rank: "its process has ended" for rank, since in self._since.items() if now - since >= SETTLED}
        return dict(sorted({**self._lost, **ended}.items()))
