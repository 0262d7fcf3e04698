"""End a run in which nothing moves any more, with the stacks of every rank and the name of the one that is behind.

Every rank has a thread that watches its own main thread. A rank that is stopped, or whose main thread holds the
interpreter, cannot notice that itself: the others, which wait for it, do. The thread that judges touches no disk, which
may be what hangs: another one writes where this rank is, and reads where the others are.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from halfstep import distributed
from halfstep.deadline import run_within_deadline
from halfstep.errors import HUNG, FolderLost
from halfstep.files import check_ownership, create_parent_folder
from halfstep.peers import Peers
from halfstep.printable import escape_unprintable
from halfstep.recipe.schema import WorldOptions
from halfstep.status_files import ENDED, HEARTBEAT, WRITES, RankStatusRecord, read_status
from halfstep.train.status import RankStatus, read_last_statuses

STACKS = "stacks"
"""The folder of the stacks, one file a rank."""
TICK = 1.0
SLOWER = 2.0
"""A phase may take this many times its longest duration so far, regardless of the timeout."""
MARGIN = 30.0
"""Seconds by which the process group's own timeout is longer: the watchdog names the rank, a backend only aborts."""
ANSWER = 4.0
"""Ticks that the other ranks have to write their stacks."""
REPORT = 5.0
"""Seconds more for everything that the report of a hang reads, writes and prints; then the process ends without it."""
SILENT, HEARTBEATS = 90.0, 5.0
"""A rank of another host is lost after this many seconds and this many heartbeats without a write."""
AWAY = 8
"""The ranks of other hosts that one rank watches: the next ones by number, so that each is watched by as many."""
JOIN = 2.0
"""Seconds that the end of a run waits for the threads that watch it."""
COMPUTING, ENDING = "computing", "ending"
"""The phase of forward and backward; and the last one of a run, in which no rank waits for another one."""
LONGEST_WHY = 200
STDERR = 2

Beat = Callable[[str, int], None]
"""Reports progress: the new phase, and the step."""
OnHang = Callable[[str], None]


def ignore_beat(phase: str, step: int) -> None:
    """Report nothing; for loops that nobody watches."""


class RankPosition(NamedTuple):
    """Where a rank is in its run."""

    step: int
    phase: str
    collectives: int
    """Collectives started so far."""
    answered: bool | None
    """True if it writes this because nothing moves."""


class Watchdog:
    """A context in which `beat` has to be called again and again; where it is not, `on_hang` is called with the reason.

    The first time of each phase may take `start_timeout`, since torch compiles and allocates there; later ones
    `timeout`, or twice the longest so far, whichever is more: a step on a CPU may take minutes. Time in which this
    process itself was stopped does not count: a scheduler may suspend a job as a whole. Without `on_hang` there is only
    a warning: the process is the caller's own, such as a notebook's.
    """

    def __init__(
        self,
        status: RankStatus,
        options: WorldOptions,
        *,
        on_hang: OnHang | None = None,
        on_limit: Callable[[float], None] = lambda limit: None,
        on_ending: Callable[[], None] = lambda: None,
        peers: Peers | None = None,
    ) -> None:
        self._status, self._options, self._on_hang, self._on_limit = status, options, on_hang, on_limit
        self._on_ending, self._peers = on_ending, peers
        self._beats, self._phase, self._step = 0, "starting", 0
        self._passed: set[str] = set()
        self._longest: dict[str, float] = {}
        self._limit = options.start_timeout
        self._tick = min(TICK, options.timeout / 10, options.start_timeout / 10)
        self._over, self._is_marked, self._answers = threading.Event(), False, False
        self._silent: dict[int, tuple[int, float]] = {}
        """For each watched rank of another host its last beat, and the seconds in which that did not change."""
        self._beats_before = -1
        self._marker = status.folder / STACKS / f"hung-{status.launch.token}"
        self._judge = threading.Thread(target=self._watch, name="halfstep watchdog", daemon=True)
        self._writer = threading.Thread(target=self._write, name="halfstep status", daemon=True)

    def __enter__(self) -> Watchdog:
        self._judge.start()
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._judge.join(JOIN)
        self._writer.join(JOIN)

    def beat(self, phase: str, step: int) -> None:
        """Report that `phase` of `step` starts or continues; called by the main thread, a few times a step."""
        if phase != self._phase or step != self._step:
            self._passed.add(self._phase)
            self._phase, self._step = phase, step
            limit = self._limit_of(phase)
            if limit != self._limit:
                self._limit = limit
                self._on_limit(limit)
            if phase == ENDING:
                self._on_ending()
        self._beats += 1

    def _limit_of(self, phase: str) -> float:
        is_known = phase in self._passed or phase == ENDING
        given = self._options.timeout if is_known else self._options.start_timeout
        return max(given, SLOWER * self._longest.get(phase, 0.0))

    @property
    def _heartbeat(self) -> float:
        return max(min(HEARTBEAT, 5 * self._tick), distributed.count_ranks() / WRITES)

    def _position(self) -> RankPosition:
        return RankPosition(self._step, self._phase, _count_collectives(), self._answers or None)

    # -- in the thread that judges ------------------------------------------------------------------------------

    def _watch(self) -> None:
        beats, idle, now = -1, 0.0, time.monotonic()
        while not self._over.wait(self._tick):
            before, now = now, time.monotonic()
            if beats != self._beats:
                beats, phase, idle = self._beats, self._phase, 0.0
            else:
                # Not the clock: after SIGSTOP and SIGCONT it has moved, and nobody had a chance to.
                idle += min(now - before, 2 * self._tick)
                self._longest[phase] = max(idle, self._longest.get(phase, 0.0))
            if idle >= self._limit or self._is_marked:
                self._report(idle)
                return

    def _report(self, idle: float) -> None:
        """Write the stacks, give the other ranks time to write theirs, and exit; in time, even if the disk hangs."""
        self._answers = True
        answer = ANSWER * self._tick if distributed.count_ranks() > 1 else 0.0
        is_told = run_within_deadline(answer + REPORT, lambda: self._explain(idle, answer))
        if not is_told and self._on_hang is not None:
            run_within_deadline(1.0, lambda: _write_to_stderr(f"{self._where(idle)}, and the disk does not answer"))
            os._exit(HUNG)

    def _explain(self, idle: float, answer: float) -> None:
        write_stacks(self._status.folder / STACKS / f"rank-{self._status.rank:05d}.txt", self._position())
        self._status.running(*self._position())
        with suppress(OSError, FolderLost):  # a full disk: the others notice by themselves
            check_ownership(self._marker)
            self._marker.touch()
        self._over.wait(answer)
        reason = self._reason(idle)
        if self._on_hang is None:
            _write_to_stderr(f"warning: {reason}")
            return
        self._status.ended(HUNG, reason, within=REPORT)
        self._on_hang(reason)

    def _reason(self, idle: float) -> str:
        where = f"{self._where(idle)}; the stacks are in {self._status.folder / STACKS}"
        if distributed.count_ranks() == 1:
            return where
        statuses = read_last_statuses(self._status.folder, self._status.launch.token)
        return f"{describe_late_ranks(statuses, distributed.count_ranks())}: {where}"

    def _where(self, idle: float) -> str:
        seconds = idle if distributed.count_ranks() == 1 else max(idle, self._limit)
        return f"no progress for {seconds:.0f} s in step {self._step} ({self._phase})"

    # -- in the thread that writes and reads --------------------------------------------------------------------

    def _write(self) -> None:
        if self._status.rank == 0:
            with suppress(OSError, FolderLost):
                for old in self._marker.parent.glob("hung-*"):  # of earlier launches
                    check_ownership(old)
                    old.unlink(missing_ok=True)
        written, looked = -1.0, time.monotonic()
        while not self._over.wait(self._tick):
            self._is_marked = distributed.count_ranks() > 1 and self._marker.exists()
            now = time.monotonic()
            if now - written >= self._heartbeat:
                written = now
                self._status.running(*self._position())
                self._look_away(min(now - looked, 2 * self._heartbeat))
                looked = now
        self._status.running(*self._position())

    def _look_away(self, passed: float) -> None:
        """Look whether ranks of other hosts still write, while this one waits for the others.

        By the count in their files, and the time that passed here: no clocks of two hosts are compared.
        """
        # DDP waits inside of backward, where only a step that does not come to its end shows it.
        is_in_step = self._phase == COMPUTING and self._beats == self._beats_before
        self._beats_before = self._beats
        if self._peers is None or not self._peers.away or not (distributed.is_waiting() or is_in_step):
            self._silent.clear()
            return
        if self._phase == ENDING:
            return
        for rank in _select_next_ranks(self._peers.away, self._status.rank):
            status = read_status(self._status.folder, rank)
            # Nothing to read says nothing: the file system may be at fault.
            if status is None or status.launch != self._status.launch.token:
                continue
            if status.state == ENDED:
                self._peers.report_lost(rank, f"it ended: {str(status.reason)[:LONGEST_WHY]}")
                continue
            beat, before = status.beat or 0, self._silent.get(rank, (-1, 0.0))
            silent = before[1] + passed if beat == before[0] else 0.0
            self._silent[rank] = beat, silent
            if silent >= max(SILENT, HEARTBEATS * self._heartbeat):
                self._peers.report_lost(rank, f"it has written no heartbeat for {silent:.0f} s")


def _select_next_ranks(ranks: tuple[int, ...], own: int) -> list[int]:
    """Return the few ranks that follow this one by number, around the end."""
    return sorted(ranks, key=lambda rank: (rank < own, rank))[:AWAY]


def describe_late_ranks(statuses: Mapping[int, RankStatusRecord], size: int) -> str:
    """Return the ranks that the others wait for: those that do not answer, else those at the earliest place."""
    silent = [rank for rank in range(size) if not statuses.get(rank, RankStatusRecord()).answered]
    if silent:
        return (
            f"{distributed.format_rank_numbers(silent)} {'does' if len(silent) == 1 else 'do'} not answer, and may "
            "be stopped"
        )
    places = {rank: (one.step or 0, one.collectives or 0) for rank, one in statuses.items()}
    earliest = min(places.values())
    late = [rank for rank, place in sorted(places.items()) if place == earliest]
    if len(late) == len(places):
        hosts = sorted({str(one.host) for one in statuses.values()})
        between = f"between {', '.join(hosts[: distributed.MOST_NAMED])}" if len(hosts) > 1 else "between them"
        return f"all ranks answer, and each waits for another: the network {between} may be cut, or their calls differ"
    return f"{distributed.format_rank_numbers(late)} {'is' if len(late) == 1 else 'are'} behind, at step {earliest[0]}"


def _count_collectives() -> int:
    """Return the number of collectives started by this rank: of ranks at one step, the one with fewer is behind."""
    try:
        group: Any = dist.group.WORLD
        return int(group._get_sequence_number_for_group()) if distributed.count_ranks() > 1 else 0
    except RuntimeError:  # no sequence numbers in this backend
        return 0


def write_stacks(path: Path, position: RankPosition) -> None:
    """Write the Python stacks of all threads of this process."""
    where = "".join(f", {name} {value}" for name, value in position._asdict().items() if value is not None)
    with suppress(OSError, FolderLost):  # a full disk, or another run's folder: the run ends all the same
        create_parent_folder(path)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"process {os.getpid()}{where}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def set_group_timeout(limit: float) -> None:
    """Give the process group a timeout that is longer than the watchdog's `limit`."""
    # Public from torch 2.15 on; without either, only the message of a timeout is worse.
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None:
        set_timeout(timedelta(seconds=limit + MARGIN))


def _write_to_stderr(text: str) -> None:
    """Write to stderr from any thread."""
    # Not through Python's own buffer, which the thread that hangs may have locked.
    with suppress(OSError):
        os.write(STDERR, f"{escape_unprintable(text)}\n".encode())


def end_hung_process(reason: str) -> None:
    """End this process, from the thread that watches it."""
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    try:
        _write_to_stderr(f"{who}{reason}\n  do: start it again with the same command to continue")
    finally:
        # Not sys.exit: the main thread does not come back to handle it.
        os._exit(HUNG)
