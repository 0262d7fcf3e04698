"""Read the status files of a run's ranks: where each rank is, and how it ended. Imports no torch."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from halfstep.files import parse_known_fields, read_json
from halfstep.peers import RecordedProcess, is_process_alive

RUNNING, ENDED = "running", "ended"
HEARTBEAT = 5.0
"""Seconds between two writes of a rank; more with many ranks, see `compute_heartbeat`."""
WRITES = 50.0
"""Status files that all ranks together write in a second: a shared file system has other work."""
_NAME = re.compile(r"status\.rank-([0-9]{5})\.json")


def compute_heartbeat(ranks: int) -> float:
    """Return the seconds between two writes of each of so many ranks."""
    return max(HEARTBEAT, ranks / WRITES)


def name_status_file(rank: int) -> str:
    """Return the name of a rank's status file."""
    return f"status.rank-{rank:05d}.json"


def parse_status_rank(name: str) -> int | None:
    """Return the rank whose status file has this name; None for any other file."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class RankStatusRecord:
    """The status of one rank; None for a field that is missing or of another type: nothing is taken for granted."""

    state: str | None = None
    step: int | None = None
    phase: str | None = None
    collectives: int | None = None
    """Collectives started by the rank."""
    answered: bool | None = None
    """Whether the rank wrote this when another one found that nothing moves."""
    code: int | None = None
    """Exit code, where the rank ended."""
    reason: str | None = None
    restartable: bool | None = None
    traceback: str | None = None
    pid: int | None = None
    host: str | None = None
    machine: str | None = None
    """See `peers.compute_boot_container_id`."""
    job: str | None = None
    rank: int | None = None
    since: str | None = None
    world: int | None = None
    launch: str | None = None
    """Token of the attempt on all ranks."""
    restarts: int | None = None
    fruitless: int | None = None
    checkpoint: int | None = None
    batch_size: int | None = None
    divided_by: int | None = None
    """These are fields of `train.status.Launch`."""
    time: str | None = None
    beat: int | None = None
    """Number of writes so far; files of earlier versions have none."""

    @property
    def written_at(self) -> float:
        """When the file was written, by the clock of its host, in seconds since 1970; 0 if that is not known."""
        return parse_timestamp(self.time)

    @property
    def is_of_this_host(self) -> bool:
        """Return whether the rank ran on this host, by its name."""
        return self.host == socket.gethostname()

    @property
    def holder(self) -> RecordedProcess | None:
        """The process that wrote the file; None if the file names none."""
        return RecordedProcess.read(vars(self))

    def is_gone(self, started_by: float) -> bool:
        """Return whether this host has no such process that started by then; a pod may have its predecessor's name."""
        return self.pid is not None and not is_process_alive(self.pid, started_by)


def read_status(folder: Path, rank: int) -> RankStatusRecord | None:
    """Return the status of a rank; None if it has written none."""
    content = read_json(folder / name_status_file(rank))
    return parse_known_fields(RankStatusRecord, content) if isinstance(content, dict) and content else None


def parse_timestamp(written: str | None) -> float:
    """Return an ISO date in seconds since 1970; 0 for anything else."""
    try:
        return datetime.fromisoformat(written).timestamp() if written else 0.0
    except (ValueError, OverflowError):
        return 0.0
