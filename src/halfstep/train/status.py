"""Keep the status of each rank in the run's folder: where it is while it runs, and how it ended.

torchrun turns every exit code into 1, and a rank that is killed says nothing: the files tell a person, a supervisor and
the next attempt what happened. A restarted run decides from them whether a restart can help.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from halfstep import distributed
from halfstep.deadline import run_within_deadline
from halfstep.errors import (
    CONFIGURATION,
    DATA,
    GAVE_UP,
    HUNG,
    INCOMPATIBLE,
    INTERRUPTED,
    OUT_OF_MEMORY,
    REFUSED,
    SOFTWARE,
    TRY_AGAIN,
    USAGE,
    FolderLost,
    HalfstepError,
    NotRestarted,
)
from halfstep.files import read_json, replace_file, replace_file_unflushed, write_json
from halfstep.launch_variables import read_count_variable
from halfstep.out_of_memory import is_out_of_memory
from halfstep.peers import compute_boot_container_id
from halfstep.recipe.changes import RECIPE
from halfstep.status_files import ENDED, RUNNING, RankStatusRecord, name_status_file, parse_status_rank, read_status
from halfstep.train.microbatches import find_largest_divisor

RESTARTABLE = (TRY_AGAIN, HUNG)
"""Exit codes after which the same command resumes the run."""
INCURABLE = (USAGE, DATA, REFUSED, CONFIGURATION, INCOMPATIBLE, GAVE_UP)
"""Exit codes after which a restart ends in the same way."""
MOST_FRUITLESS = 3
"""Restarts in a row without a newer checkpoint after which the next one gives up."""
LONGEST_TRACEBACK, LONGEST_REASON, LONGEST_JOB = 16_384, 1_000, 200
RESERVED = 4096
"""Bytes that a status file has at least, so that the end of a run fits into it on a full disk."""
WRITTEN_WITHIN = 5.0
"""Seconds that the beginning and the end of a run wait for its status to be written; a disk may not answer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Launch:
    """One attempt of a run on all ranks."""

    token: str
    """Tells the files of this attempt from those of others."""
    restarts: int = 0
    """How often torchrun or Slurm restarted the run."""
    fruitless: int = 0
    """Restarts in a row that found no newer checkpoint than the attempt before."""
    checkpoint: int = -1
    """The step of the newest checkpoint at the beginning; -1 for none."""
    batch_size: int = 0
    """Samples of a micro-batch in the recipe; 0 if that is not known."""
    divided_by: int = 1
    """The parts that each of these micro-batches is taken in, since memory ran out."""


def count_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun or Slurm restarted this run; 0 for a command that a person typed."""
    return max(read_count_variable(name, environment) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def can_be_restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or Slurm starts this run again where it fails, as far as their variables tell."""
    return count_restarts(environment) > 0 or read_count_variable("TORCHELASTIC_MAX_RESTARTS", environment) > 0


_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME")
"""The variables of Slurm and of torchrun, and the one that a Kubernetes manifest gives a pod by convention."""


def find_job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what the scheduler calls this job; None for a command that a person typed."""
    # torchrun calls a job without a name `none`.
    named = (environment.get(name, "") for name in _JOBS)
    return next((name[:LONGEST_JOB] for name in named if name not in ("", "none")), None)


def begin_attempt(folder: Path, newest: int, restarts: int, batch_size: int, accepted: Collection[str] = ()) -> Launch:
    """Return this attempt; raise NotRestarted, with the code of the last ending, where a restart cannot help.

    `newest` is the step of the newest checkpoint, -1 for none, and `batch_size` the recipe's. Where memory ran out, a
    restart halves the micro-batch, and later launches keep that, until a person accepts another recipe. Only rank 0
    calls it, before any rank has written.
    """
    last = read_last_statuses(folder)
    if not last or not restarts:
        parts = 1 if RECIPE in accepted else _read_previous_parts(last, batch_size)
        return Launch(secrets.token_hex(8), restarts, 0, newest, batch_size, parts)
    for rank, status in last.items():
        if status.code in INCURABLE:
            raise _not_restarted_error(_format_rank_reason(rank, last), status.code, "fix this, and start it again")
    return Launch(
        secrets.token_hex(8),
        restarts,
        _count_fruitless_restarts(folder, last, newest),
        newest,
        batch_size,
        _compute_microbatch_parts(last, batch_size),
    )


def _count_fruitless_restarts(folder: Path, last: Mapping[int, RankStatusRecord], newest: int) -> int:
    """Return how many restarts in a row found no newer checkpoint; raise NotRestarted if they are too many."""
    before, fruitless = last[0].checkpoint, last[0].fruitless or 0
    was_stopped = all(status.code == TRY_AGAIN for status in last.values())
    if newest > (-1 if before is None else before):
        fruitless = 0
    # A run that was asked to stop did not fail, and one that ran out of memory is not repeated: it is divided further.
    elif not was_stopped and _find_out_of_memory(last) is None:
        fruitless += 1
    if fruitless > MOST_FRUITLESS:
        raise _gave_up_error(folder, last)
    return fruitless


def _find_out_of_memory(last: Mapping[int, RankStatusRecord]) -> int | None:
    """Return the first rank that ended for want of memory."""
    return next((rank for rank, status in last.items() if status.code == OUT_OF_MEMORY), None)


def _compute_microbatch_parts(last: Mapping[int, RankStatusRecord], batch_size: int) -> int:
    """Return the parts of a micro-batch: those of the attempt before, and twice as many where memory ran out."""
    parts, rank = _read_previous_parts(last, batch_size), _find_out_of_memory(last)
    if rank is None:
        return parts
    size = batch_size // parts
    if size == 1:
        given = f"{_format_rank_reason(rank, last)}; micro-batches are of one sample already, and cannot be halved"
        do = "add train.checkpoint_activations=true, or use smaller images, a smaller model or more ranks"
        raise _not_restarted_error(given, OUT_OF_MEMORY, do)
    return batch_size // find_largest_divisor(size, size // 2)


def _read_previous_parts(last: Mapping[int, RankStatusRecord], batch_size: int) -> int:
    """Return the parts that the attempt before divided micro-batches of this size in; 1 for another size."""
    status = last.get(0, RankStatusRecord())
    parts = status.divided_by or 0
    # The file may be of another program: nothing in it is taken for granted.
    if status.batch_size != batch_size or not 0 < parts <= batch_size:
        return 1
    return parts if batch_size % parts == 0 else 1


def read_last_statuses(folder: Path, token: str | None = None) -> dict[int, RankStatusRecord]:
    """Return the statuses of one attempt by rank: of `token`, or of the last one that rank 0 took part in."""
    first = read_status(folder, 0)
    if token is None and first is not None:
        token = first.launch
    found: dict[int, RankStatusRecord] = {}
    with contextlib.suppress(OSError):
        for rank in sorted(rank for entry in folder.iterdir() if (rank := parse_status_rank(entry.name)) is not None):
            status = read_status(folder, rank)
            if status is not None and token is not None and status.launch == token:
                found[rank] = status
    return found if 0 in found else {}


def _gave_up_error(folder: Path, last: Mapping[int, RankStatusRecord]) -> NotRestarted:
    """Return the error after too many restarts, and tell a supervisor that the run is not restartable."""
    codes = {rank: one.code for rank, one in last.items() if one.code}
    # The rank that failed by itself, not those that lost it.
    rank = min(codes, key=lambda rank: (codes[rank] in RESTARTABLE, rank), default=None)
    reason = "it was killed" if rank is None else _format_rank_reason(rank, last)
    code = SOFTWARE if rank is None else codes[rank]
    given = f"{MOST_FRUITLESS} restarts in a row brought no newer checkpoint; the last attempt ended: {reason}"
    end = {"state": ENDED, "code": code, "reason": given, "restartable": False}
    with contextlib.suppress(OSError):
        write_json(folder / name_status_file(0), {**(read_json(folder / name_status_file(0)) or {}), **end})
    return _not_restarted_error(given, code, "fix the first of these failures, and run the same command again")


def _not_restarted_error(given: str, code: int, do: str) -> NotRestarted:
    error = NotRestarted(given, allowed="a restart that can end differently from the previous attempt", do=do)
    error.exit_code = code
    return error


def _format_rank_reason(rank: int, statuses: Mapping[int, RankStatusRecord]) -> str:
    who = f"rank {rank}: " if len(statuses) > 1 else ""
    return f"{who}{str(statuses[rank].reason)[:LONGEST_REASON]}"


class RankStatus:
    """The status file of this rank. Written whole each time, from any thread; nothing is written after its end."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder, self.launch, self.rank = folder, launch, distributed.rank()
        facts = asdict(launch)
        self._last = RankStatusRecord(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=compute_boot_container_id(),
            job=find_job_id(),
            rank=self.rank,
            since=_format_utc_now(),
            world=distributed.count_ranks(),
            launch=facts.pop("token"),
            **facts,
        )
        self._changing = threading.Lock()
        self._beat = 0
        """The number of writes so far: a reader on another host compares it, and no clocks."""
        self.on_end: Callable[[int], None] = lambda code: None
        """Called with the exit code after it was written."""

    def running(self, step: int, phase: str, collectives: int | None = None, answered: bool | None = None) -> None:
        """Write where this rank is. Not flushed: the next write is seconds away."""
        position = replace(self._last, step=step, phase=phase, collectives=collectives, answered=answered)
        self._write(replace(position, state=RUNNING))

    def ended(self, code: int, reason: str, trace: str | None = None, within: float = WRITTEN_WITHIN) -> None:
        """Write the exit code, the reason and the traceback of this rank's end; only the first end counts.

        A disk that does not answer is given up after `within` seconds.
        """

        def write() -> None:
            end = replace(self._last, state=ENDED, code=code, reason=reason, traceback=trace)
            self._write(replace(end, restartable=code in RESTARTABLE))
            self.on_end(code)

        run_within_deadline(within, write)

    def _write(self, status: RankStatusRecord) -> None:
        with self._changing:
            # Without the folder there is no place to write.
            if self._last.state == ENDED or not self.folder.is_dir():
                return
            self._last = status
            self._beat += 1
            # A failing disk must not mask the original error. Where the folder is another run's, nothing is
            # written: the run ends at its next step.
            with contextlib.suppress(OSError, FolderLost):
                _replace_status_file(self.folder, self.rank, replace(status, time=_format_utc_now(), beat=self._beat))


def _format_status_json(status: RankStatusRecord) -> str:
    known = {name: value for name, value in asdict(status).items() if value is not None}
    return json.dumps({"job": None, **known}, indent=1, sort_keys=True)


def _replace_status_file(folder: Path, rank: int, status: RankStatusRecord) -> None:
    """Replace a status file; on a full disk, overwrite what the earlier one of this attempt occupies."""
    try:
        with (replace_file if status.state == ENDED else replace_file_unflushed)(
            folder / name_status_file(rank)
        ) as draft:
            draft.write_text(f"{_format_status_json(status):<{RESERVED - 1}}\n", encoding="utf-8")
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _overwrite_status_file(folder, rank, status)


def _overwrite_status_file(folder: Path, rank: int, status: RankStatusRecord) -> None:
    earlier = read_status(folder, rank)
    if earlier is None or earlier.launch != status.launch:
        return
    short = replace(status, traceback=None, reason=status.reason and status.reason[:LONGEST_REASON])
    handle = os.open(folder / name_status_file(rank), os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        size = os.fstat(handle).st_size
        text = _format_status_json(short).encode()
        if len(text) < size:
            os.write(handle, text.ljust(size - 1) + b"\n")  # in one call: a reader sees all of it or nothing
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def record_rank_status(status: RankStatus) -> Iterator[None]:
    """Write that this rank runs, and the exit code and the reason when the block ends."""
    run_within_deadline(WRITTEN_WITHIN, lambda: status.running(step=0, phase="starting"))
    code, reason, trace = 0, "finished", None
    try:
        yield
    except BaseException as error:
        code, reason = resolve_exit_code(error), str(error).split("\n")[0] or type(error).__name__
        if code == SOFTWARE:
            trace = traceback.format_exc()[-LONGEST_TRACEBACK:]
        raise
    finally:
        status.ended(code, reason, trace=trace, within=WRITTEN_WITHIN)


def resolve_exit_code(error: BaseException) -> int:
    """Return the exit code of a run that this error ends."""
    if isinstance(error, HalfstepError):
        return error.exit_code
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else SOFTWARE


def _format_utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
