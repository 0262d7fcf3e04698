"""Judge whether a run is alive from the status files of its ranks, for probes. Imports no torch.

Clocks of two hosts are never compared. The heartbeat of a rank on this host is dated by this host's clock, in the file
itself: the age of the file would be by the clock of a file server. A rank on another host, and one whose process is not
found here by its number, is watched until its file changes: each write raises `beat`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import HUNG, SOFTWARE, TRY_AGAIN, BadData
from halfstep.files import read_json
from halfstep.ownership import is_alive

RESULT = "result.json"
MOVING, ENDED, SILENT = "moving", "ended", "silent"
"""States of a rank."""
ALIVE, FINISHED, FAILED = "alive", "finished", "ended"
"""States of a run, next to `silent`."""
MOST_RANKS = 100_000
FOR_A_BEAT = 12.0
"""Seconds in which a rank of this host writes at least once, where its process is not found or the clock was set back;
more with many ranks."""
RANKS_A_SECOND = 50.0
"""Status files that all ranks together write in a second, as `train.watchdog` has it."""
PAUSE = 0.5
LONGEST = 1000


class RankLiveness(NamedTuple):
    """One rank; None for what is not known."""

    rank: int
    state: str
    host: str | None
    pid: int | None
    step: int | None
    phase: str | None
    age: float | None
    """Seconds since its last heartbeat as far as this host can tell: by its own clock, or as long as it watched."""
    code: int | None
    why: str
    beat: int | None


class RunLiveness(NamedTuple):
    """A run, and the exit code of a probe."""

    run: Path
    state: str
    code: int
    why: str
    restartable: bool
    """Whether the same command goes on, where the run ended."""
    ranks: list[RankLiveness]


Status = Mapping[str, Any]
"""The content of a status file, in which nothing is taken for granted; empty where there is none."""


def judge_run(folder: Path, max_age: float, rank: int | None = None) -> RunLiveness:
    """Return whether all ranks of a run move, or one of them; waits for other hosts up to `max_age` seconds.

    The code is 0 for a run that moves or finished, 76 where a rank wrote no heartbeat for `max_age` seconds, else the
    exit code of the run. Raises BadData for a folder without the status of a run.
    """
    statuses = _read_statuses(folder) if rank is None else {rank: _read(folder, rank)}
    if not any(statuses.values()):
        if rank is None and read_json(folder / RESULT) is not None:
            return RunLiveness(folder, FINISHED, 0, "finished", False, [])
        raise BadData(
            f"{folder} has no status of a run" + ("" if rank is None else f" for rank {rank}"),
            allowed="the folder of a run that has started; ranks write their status after the rendezvous",
            do="give the run's own folder; `halfstep runs DIR` lists those of a folder",
        )
    ranks = _judge_ranks(folder, statuses, max_age)
    return _judge(folder, ranks, statuses)


def _read(folder: Path, rank: int) -> Status:
    status = read_json(folder / f"status.rank-{rank:05d}.json")
    return status if isinstance(status, dict) else {}


def _read_statuses(folder: Path) -> dict[int, Status]:
    """Return the statuses of all ranks of the last launch; empty ones for ranks that have not written."""
    first = _read(folder, 0)
    world = first.get("world")
    # Statuses without a world are of an earlier version, and only rank 0 is known to belong to the launch.
    size = world if type(world) is int and 0 < world <= MOST_RANKS else 1
    found = {rank: _read(folder, rank) for rank in range(1, size)}
    same = {rank: one if one.get("launch") == first.get("launch") else {} for rank, one in found.items()}
    return {0: first, **same}


def _judge_ranks(folder: Path, statuses: Mapping[int, Status], max_age: float) -> list[RankLiveness]:
    judged: dict[int, RankLiveness] = {}
    watched: dict[int, float] = {}
    """The seconds for which a rank is watched at most."""
    here, now = socket.gethostname(), time.time()
    grace = min(max_age, max(FOR_A_BEAT, 2 * len(statuses) / RANKS_A_SECOND))
    for rank, status in statuses.items():
        if status.get("state") == "ended":
            judged[rank] = _as_ended(rank, status)
        elif status.get("host") != here or _is_gone(status):
            watched[rank] = grace if status.get("host") == here else max_age
        elif (age := now - _timestamp(status.get("time"))) > max_age:
            judged[rank] = _as_running(rank, status, SILENT, age, f"no heartbeat for {age:.0f} s")
        elif age < 0.0:
            watched[rank] = grace
        else:
            judged[rank] = _as_running(rank, status, MOVING, age, "")
    return [(judged | _watch(folder, statuses, watched))[rank] for rank in statuses]


def _watch(folder: Path, statuses: Mapping[int, Status], limits: Mapping[int, float]) -> dict[int, RankLiveness]:
    """Read the files of some ranks until each has changed, at most as long as its limit."""
    judged: dict[int, RankLiveness] = {}
    launches = {status.get("launch") for status in statuses.values() if status}
    began = time.monotonic()
    while left := {rank: limit for rank, limit in limits.items() if rank not in judged}:
        time.sleep(max(PAUSE, len(left) / RANKS_A_SECOND / 10))
        waited = time.monotonic() - began
        for rank, limit in left.items():
            status = _read(folder, rank)
            if status.get("launch") not in launches:  # of an attempt before, and this rank has not written yet
                status = {}
            if status.get("state") == "ended":
                judged[rank] = _as_ended(rank, status)
            # The whole content, which `beat`, the step and the time are part of: earlier versions have no `beat`.
            elif status and status != statuses[rank]:
                judged[rank] = _as_running(rank, status, MOVING, 0.0, "")
            elif waited >= limit:
                judged[rank] = _as_running(rank, status, SILENT, waited, _why_silent(status, waited))
    return judged


def _why_silent(status: Status, waited: float) -> str:
    if not status:
        return f"no status of this launch within {waited:.0f} s"
    if status.get("host") == socket.gethostname() and _is_gone(status):
        return "its process is gone, and wrote no end"
    return f"no heartbeat for {waited:.0f} s"


def _is_gone(status: Status) -> bool:
    """Return whether this host has no such process any more; a pod may get the name of the one before."""
    pid = status.get("pid")
    return type(pid) is int and not is_alive(pid, _timestamp(status.get("time")))


def _judge(folder: Path, ranks: list[RankLiveness], statuses: Mapping[int, Status]) -> RunLiveness:
    failed = [one for one in ranks if one.state == ENDED and one.code]
    if failed:
        # The rank that failed by itself, not those that lost it or stopped with it.
        first = min(failed, key=lambda one: (one.code in (TRY_AGAIN, HUNG), one.rank))
        restartable = all(statuses[one.rank].get("restartable") is True for one in failed)
        return RunLiveness(folder, FAILED, first.code or SOFTWARE, _named(first, ranks), restartable, ranks)
    silent = [one for one in ranks if one.state == SILENT]
    if silent:
        more = f"; {len(silent) - 1} more ranks are silent" if len(silent) > 1 else ""
        return RunLiveness(folder, SILENT, HUNG, f"{_named(silent[0], ranks)}{more}", True, ranks)
    moving = [one for one in ranks if one.state == MOVING]
    if not moving:
        return RunLiveness(folder, FINISHED, 0, "finished", False, ranks)
    slowest = min(moving, key=lambda one: (-1 if one.step is None else one.step, one.rank))
    where = f"at step {slowest.step} ({slowest.phase})"
    more = f"{len(moving)} ranks, rank {slowest.rank} " if len(ranks) > 1 else ""
    return RunLiveness(folder, ALIVE, 0, f"{more}{where}", False, ranks)


def _named(one: RankLiveness, ranks: list[RankLiveness]) -> str:
    where = f" on {one.host}" if one.host else ""
    return f"rank {one.rank}{where}: {one.why}" if len(ranks) > 1 else one.why


def _as_ended(rank: int, status: Status) -> RankLiveness:
    code = status.get("code")
    # A code that no process can end with was not written by halfstep.
    known = code if type(code) is int and 0 <= code < 256 else SOFTWARE
    found = _as_running(rank, status, ENDED, None, _word(status.get("reason")) or "")
    return found._replace(code=known)


def _as_running(rank: int, status: Status, state: str, age: float | None, why: str) -> RankLiveness:
    host, phase = _word(status.get("host")), _word(status.get("phase"))
    numbers = {name: value if type(value := status.get(name)) is int else None for name in ("pid", "step", "beat")}
    rounded = None if age is None else round(age, 1)
    return RankLiveness(rank, state, host, phase=phase, age=rounded, code=None, why=why, **numbers)


def _word(value: object) -> str | None:
    return value[:LONGEST] if isinstance(value, str) and value else None


def _timestamp(value: object) -> float:
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else 0.0
    except (ValueError, OverflowError):
        return 0.0
