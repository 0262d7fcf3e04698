"""Judge whether a run is alive from the status files of its ranks, for probes. Imports no torch.

Clocks of two hosts are never compared. The heartbeat of a rank on this host is dated by this host's clock, in the file
itself: the age of the file would be by the clock of a file server. A rank on another host, and one whose process is not
found here by its number, is watched until its file changes: each write raises `beat`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from halfstep.errors import HUNG, SOFTWARE, TRY_AGAIN, BadData
from halfstep.files import read_json
from halfstep.status_files import ENDED, WRITES, RankStatusRecord, compute_heartbeat, read_status

RESULT = "result.json"
MOVING, SILENT = "moving", "silent"
"""States of a rank, next to `ended`."""
ALIVE, FINISHED, FAILED = "alive", "finished", "ended"
"""States of a run, next to `silent`."""
MOST_RANKS = 100_000
FOR_A_BEAT = 12.0
"""Seconds in which a rank of this host writes at least once, where its process is not found or the clock was set back;
more with many ranks."""
PAUSE = 0.5
LONGEST = 1000


class RankLiveness(NamedTuple):
    """One rank; None for unknown values."""

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
    """Whether the same command continues, where the run ended."""
    ranks: list[RankLiveness]


class RankWatch(NamedTuple):
    """Ranks that this host cannot judge by itself: their files are read until each has changed."""

    watched: int
    """Ranks that have written nothing yet since the watch started."""
    heartbeat: float
    """Seconds between two heartbeats of a rank."""
    left: float
    """Seconds until the last of them counts as silent."""


OnWatch = Callable[[RankWatch], None]


def ignore_watch(watch: RankWatch) -> None:
    """Show nothing: for callers without a terminal."""


def judge_run(folder: Path, max_age: float, rank: int | None = None, on_watch: OnWatch = ignore_watch) -> RunLiveness:
    """Return whether all ranks of a run move, or one of them; waits for other hosts up to `max_age` seconds.

    All ranks are watched at the same time, so the wait does not grow with their number. `on_watch` is called when the
    watch starts and after each look.

    The code is 0 for a run that moves or finished, 76 where a rank wrote no heartbeat for `max_age` seconds, else the
    exit code of the run. Raises BadData for a folder without the status of a run.
    """
    statuses = _read_statuses(folder) if rank is None else {rank: read_status(folder, rank)}
    if not any(statuses.values()):
        if rank is None and read_json(folder / RESULT) is not None:
            return RunLiveness(folder, FINISHED, 0, "finished", False, [])
        raise BadData(
            f"{folder} has no status of a run" + ("" if rank is None else f" for rank {rank}"),
            allowed="the folder of a run that has started; ranks write their status after the rendezvous",
            do="give the run's own folder; `halfstep runs DIR` lists those of a folder",
        )
    ranks = _judge_ranks(folder, statuses, max_age, on_watch)
    return _judge_liveness(folder, ranks, {rank for rank, status in statuses.items() if status and status.restartable})


def _read_statuses(folder: Path) -> dict[int, RankStatusRecord | None]:
    """Return the statuses of all ranks of the last launch; None for ranks that have not written."""
    found = {0: read_status(folder, 0)}
    world, launch = (found[0].world or 1, found[0].launch) if found[0] else (1, None)
    # Statuses without a world are of an earlier version, and only rank 0 is known to belong to the launch.
    for rank in range(1, world if 0 < world <= MOST_RANKS else 1):
        status = read_status(folder, rank)
        found[rank] = status if status and status.launch == launch else None
    return found


def _judge_ranks(
    folder: Path, statuses: Mapping[int, RankStatusRecord | None], max_age: float, on_watch: OnWatch
) -> list[RankLiveness]:
    judged: dict[int, RankLiveness] = {}
    watched: dict[int, float] = {}
    """The seconds for which a rank is watched at most."""
    now = time.time()
    grace = min(max_age, max(FOR_A_BEAT, 2 * _count_ranks(statuses) / WRITES))
    for rank, status in statuses.items():
        if status is not None and status.state == ENDED:
            judged[rank] = _build_ended_rank(rank, status)
            continue
        if status is None or not status.is_of_this_host:
            watched[rank] = max_age
        elif _is_gone(status):
            watched[rank] = grace
        elif (age := now - status.written_at) > max_age:
            judged[rank] = _build_rank_liveness(rank, status, SILENT, age, f"no heartbeat for {age:.0f} s")
        elif age < 0.0:
            watched[rank] = grace
        else:
            judged[rank] = _build_rank_liveness(rank, status, MOVING, age, "")
    judged |= _watch_ranks(folder, statuses, watched, on_watch)
    return [judged[rank] for rank in statuses]


def _watch_ranks(
    folder: Path,
    statuses: Mapping[int, RankStatusRecord | None],
    limits: Mapping[int, float],
    on_watch: OnWatch,
) -> dict[int, RankLiveness]:
    """Read the files of some ranks until each has changed, at most as long as its limit."""
    judged: dict[int, RankLiveness] = {}
    launches = {status.launch for status in statuses.values() if status}
    heartbeat = compute_heartbeat(_count_ranks(statuses))
    began, waited = time.monotonic(), 0.0
    while left := {rank: limit for rank, limit in limits.items() if rank not in judged}:
        on_watch(RankWatch(len(left), heartbeat, max(left.values()) - waited))
        # Not beyond the nearest limit: a pause that is long for the sake of many files would add to it.
        pause = max(PAUSE, len(left) / WRITES / 10)
        time.sleep(max(min(pause, min(left.values()) - waited), 0.0))
        waited = time.monotonic() - began
        for rank, limit in left.items():
            status = read_status(folder, rank)
            if status and status.launch not in launches:  # of an earlier attempt: no status of this rank yet
                status = None
            if status and status.state == ENDED:
                judged[rank] = _build_ended_rank(rank, status)
            # The whole content, which `beat`, the step and the time are part of: earlier versions have no `beat`.
            elif status and status != statuses[rank]:
                judged[rank] = _build_rank_liveness(rank, status, MOVING, 0.0, "")
            elif waited >= limit:
                judged[rank] = _build_rank_liveness(
                    rank, status, SILENT, waited, _explain_silence(status, waited, heartbeat)
                )
    return judged


def _count_ranks(statuses: Mapping[int, RankStatusRecord | None]) -> int:
    """Return the number of ranks of the run, of which only one may be asked for."""
    worlds = (status.world or 1 for status in statuses.values() if status)
    return max(len(statuses), min(max(worlds, default=1), MOST_RANKS))


def _explain_silence(status: RankStatusRecord | None, waited: float, heartbeat: float) -> str:
    if not status:
        return f"no status of this launch within {waited:.0f} s"
    if status.is_of_this_host and _is_gone(status):
        return "its process is gone and wrote no result"
    if waited < heartbeat:  # a rank that is alive may exceed this limit
        return f"no heartbeat for {waited:.0f} s, but ranks write one every {heartbeat:.0f} s: give a longer --max-age"
    return f"no heartbeat for {waited:.0f} s"


def _is_gone(status: RankStatusRecord) -> bool:
    return status.is_gone(status.written_at)


def _judge_liveness(folder: Path, ranks: list[RankLiveness], restartable: Collection[int]) -> RunLiveness:
    failed = [one for one in ranks if one.state == ENDED and one.code]
    if failed:
        # The rank that failed by itself, not those that lost it or stopped with it.
        first = min(failed, key=lambda one: (one.code in (TRY_AGAIN, HUNG), one.rank))
        again = all(one.rank in restartable for one in failed)
        return RunLiveness(folder, FAILED, first.code or SOFTWARE, _describe_deciding_rank(first, ranks), again, ranks)
    silent = [one for one in ranks if one.state == SILENT]
    if silent:
        more = f"; {len(silent) - 1} more ranks are silent" if len(silent) > 1 else ""
        return RunLiveness(folder, SILENT, HUNG, f"{_describe_deciding_rank(silent[0], ranks)}{more}", True, ranks)
    moving = [one for one in ranks if one.state == MOVING]
    if not moving:
        return RunLiveness(folder, FINISHED, 0, "finished", False, ranks)
    slowest = min(moving, key=lambda one: (-1 if one.step is None else one.step, one.rank))
    where = f"at step {slowest.step} ({slowest.phase})"
    more = f"{len(moving)} ranks, rank {slowest.rank} " if len(ranks) > 1 else ""
    return RunLiveness(folder, ALIVE, 0, f"{more}{where}", False, ranks)


def _describe_deciding_rank(one: RankLiveness, ranks: list[RankLiveness]) -> str:
    where = f" on {one.host}" if one.host else ""
    return f"rank {one.rank}{where}: {one.why}" if len(ranks) > 1 else one.why


def _build_ended_rank(rank: int, status: RankStatusRecord) -> RankLiveness:
    # A code that no process can end with was not written by halfstep.
    known = SOFTWARE if status.code is None or not 0 <= status.code < 256 else status.code
    return _build_rank_liveness(rank, status, ENDED, None, (status.reason or "")[:LONGEST])._replace(code=known)


def _build_rank_liveness(
    rank: int, status: RankStatusRecord | None, state: str, age: float | None, why: str
) -> RankLiveness:
    status = status or RankStatusRecord()
    host, phase = (word[:LONGEST] if word else None for word in (status.host, status.phase))
    rounded = None if age is None else round(age, 1)
    return RankLiveness(rank, state, host, status.pid, status.step, phase, rounded, None, why, status.beat)
