"""The processes of the other ranks: which of them share this host, and which are gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from halfstep.processes import compute_boot_container_id, is_process_alive

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
