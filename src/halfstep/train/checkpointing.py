"""Take the checkpoints of a run, record them in the journal, and count failed saves."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from halfstep import distributed
from halfstep.checkpoint.commit import LEAVING, CheckpointSaver, NotCommitted, Ruined, SaveResult, set_aside_checkpoints
from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, Disk, list_generations
from halfstep.errors import (
    FolderLost,
    FolderTaken,
    HalfstepError,
    OutOfMemory,
    Stopped,
    StorageFailed,
    WeightsNotFinite,
    advise_adding_option,
)
from halfstep.files import check_ownership, write_text
from halfstep.journal import events
from halfstep.journal.events import Journal
from halfstep.ownership import LOCK, FolderOwnership, find_ownership
from halfstep.precision.environment import collect_environment
from halfstep.save_interval import SaveClock
from halfstep.train.replicas import Replicas
from halfstep.train.state import PARAMETERS, RunObjects, State

MOST_FAILURES = 3
"""Consecutive saves that may fail before the run ends: after that, too much work is at risk."""


# -- write test -------------------------------------------------------------------------------------------------------
# Find out before the first step, on every rank, whether a checkpoint can be written at all.


PROBE = "write-test"
SEEN = 10.0
"""Seconds until a file of one rank must be seen by the others: a network file system shows it late."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_folder_writable(folder: Path, live: RunObjects, launch: str | None = None) -> None:
    """Write a file on every rank, and compare the free space with a checkpoint; every rank calls it.

    Raises FolderTaken if a rank cannot write to the folder, or has another one under its name, and StorageFailed
    where there is no room; on all ranks, with the number of the rank. The other ranks of a `launch` claim the folder
    that its rank 0 has locked.
    """
    token: str = distributed.run_on_rank_zero(lambda: secrets.token_hex(8))
    mark = folder / f".{PROBE}.{token}"
    needed = int(distributed.sum_tensor_over_ranks(torch.tensor([estimate_checkpoint_size(live)])).item())
    try:
        distributed.run_on_rank_zero(lambda: _run_explaining_failures(folder, lambda: write_text(mark, token)))
        distributed.run_with_shared_errors(
            lambda: _run_explaining_failures(folder, lambda: _probe_run_folder(folder, mark, needed))
        )
        if launch is not None:
            distributed.run_with_shared_errors(lambda: _claim_launch_folder(folder, launch))
    finally:
        if distributed.rank() == 0:
            with contextlib.suppress(OSError):  # as of a file that a network disk holds; the next launch removes it
                Disk().remove(mark)


def estimate_checkpoint_size(live: RunObjects) -> int:
    """Return about how many bytes this rank writes for a checkpoint; those that other ranks write are not counted."""
    tensors = State.of(live).snapshot(live.progress.attempts, {}).tensors
    now = sum(tensor.nbytes for tensor in tensors.values())
    if live.progress.attempts:
        return now
    # Optimizers have no state before the first step: two numbers for each weight, as those of the Adam family.
    trained = {name for name, parameter in live.parts.model.named_parameters() if parameter.requires_grad}
    return now + 2 * sum(tensors[key].nbytes for name in trained if (key := f"{PARAMETERS}{name}") in tensors)


def _probe_run_folder(folder: Path, mark: Path, needed: int) -> None:
    until = time.monotonic() + SEEN
    while not mark.exists():
        if time.monotonic() > until:
            raise FolderTaken(
                f"{folder} is another folder here than on rank 0: a file of that rank is not in it",
                allowed="one folder that all ranks share",
                do="mount it on every machine, or give run.dir=FOLDER, one that they share",
            )
        time.sleep(0.05)
    own = folder / f".{PROBE}.{mark.suffix[1:]}.{distributed.rank()}"
    try:
        write_text(own, PROBE)
    finally:
        own.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageFailed(
            f"{free:,} bytes are free for {folder}, and a checkpoint takes about {needed:,}",
            allowed="room for one more checkpoint than the run keeps",
            do="make room, or give run.dir=FOLDER on another disk",
        )


def _claim_launch_folder(folder: Path, launch: str) -> None:
    """Claim the folder on a rank other than 0; raise FolderTaken if its lock is not that of this launch."""
    until = time.monotonic() + SEEN
    while find_ownership(folder) is None and FolderOwnership.joined(folder, launch) is None:
        if time.monotonic() > until:
            raise FolderTaken(
                f"{folder / LOCK} is not the lock of this launch here: another launch is using the folder",
                allowed="one launch per folder",
                do=f"stop the other one, or {advise_adding_option('new')} for a new folder",
            )
        time.sleep(0.05)
    check_ownership(folder)


def _run_explaining_failures(folder: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        kind = StorageFailed if error.errno in _FULL else FolderTaken
        raise kind(
            f"{folder} cannot be written to: {error.strerror or error}",
            allowed="a folder that every rank can write to, on a disk with room",
            do="make room, or give run.dir=FOLDER, another one",
        ) from error


# -- checkpoints ------------------------------------------------------------------------------------------------------


def build_nonfinite_weights_error(given: str) -> WeightsNotFinite:
    """Return the error of a run that has no finite weights to save."""
    return WeightsNotFinite(
        given,
        allowed="weights that are finite",
        do=f"{advise_adding_option('new')} to start again, with a lower optimizer.lr, or with train.clip_norm",
    )


class RemoteCopy(Protocol):
    """The copy of the checkpoints in an object store; see `halfstep.train.remote`."""

    wait: float
    """Seconds that `close` waits for the last copy."""

    def upload(self, generation: CheckpointDir, withdrawn: Sequence[str] = ()) -> None:
        """Copy a checkpoint in the background, and remove the copies of `withdrawn` ones."""
        ...

    def report(self, journal: Journal) -> None:
        """Write to the journal what happened since the last call."""
        ...

    def close(self, journal: Journal) -> None:
        """Wait for the last copy, for a limited time."""
        ...


class Checkpoints:
    """The checkpoints of one run. Every rank calls the same methods at the same steps."""

    def __init__(self, live: RunObjects, saver: CheckpointSaver, journal: Journal) -> None:
        self._live, self._saver, self._journal = live, saver, journal
        self.replicas = Replicas(live)
        self.clock = SaveClock(live.recipe.checkpoint.every_minutes, distributed.count_ranks())
        self._environment = collect_environment(live.parts.stepper.device)
        # Below every attempt: nothing was requested yet, also not at attempt 0.
        self._asked_for = -1
        self._held_back = False
        self.failures = 0
        self._failure = NotCommitted("the save did not start")
        self.last: SaveResult | None = None
        """The newest checkpoint on disk."""
        self.remote: RemoteCopy | None = None
        """The copy of the checkpoints in an object store; on rank 0 alone."""
        self.doubt = ""
        """For a run stopped while steps failed: the state that was saved or not saved, and why."""

    def save(self) -> None:
        """Save the state of the run between two steps; raise ReplicasDiffer if the ranks do not hold the same."""
        state = State.of(self._live)
        # First: a checkpoint of a state that is wrong on one rank would be resumed from.
        self.replicas.check(state)
        self._asked_for = self._live.progress.attempts
        self.clock.saved()
        self._saver.save(state.snapshot(self._asked_for, self._environment))

    def save_unless(self, alarmed: bool) -> None:
        """Save, unless `alarmed`: then the weights may be corrupt, and the previous checkpoint stays the newest."""
        if not alarmed:
            self._held_back = False
            self.save()
        # One note per alarm, not one per step that would have been saved.
        elif not self._held_back:
            self._held_back = True
            stays = f"{self.name} stays the newest" if self.name else "there is none yet"
            text = f"no checkpoint of step {self._live.progress.attempts} while steps fail: {stays}"
            self._journal.note(text, "warning")

    def set_aside(self, since: int, ruined: Ruined = lambda attempt: False) -> bool:
        """Retire the checkpoints taken at or after attempt `since` and the ruined ones; return whether any is left."""
        # A save in the background may still commit a generation that has to be retired.
        self.finish()
        if self.last is None or self.last.generation is None:
            return False
        before = list_generations(self.last.generation.path.parent)
        left = set_aside_checkpoints(self.last.generation.path.parent, since, ruined)
        if left is not None and left != self.last.generation:
            self._journal.note(f"{_name_saved_checkpoint(self.last)} is set aside: its weights are bad", "info")
            self.last = SaveResult(left.attempt, left, None, seconds=0.0, blocked=0.0, bytes=0)
            if self.remote is not None:
                self.remote.upload(left, [one.name for one in before if one.number > left.number])
        return left is not None

    def record_finished(self) -> None:
        """Record finished saves in the journal; raise StorageFailed or OutOfMemory after too many failures in a row."""
        self._record(self._saver.results())
        if self.remote is not None:
            self.remote.report(self._journal)

    def finish(self) -> None:
        """Wait for the save in progress, then record it like `record_finished`."""
        self._record(self._saver.finish())

    def resumed(self, generation: CheckpointDir) -> None:
        """Record that the run resumes from `generation`, which therefore needs no new save."""
        self._asked_for = generation.attempt
        self.last = SaveResult(generation.attempt, generation, None, seconds=0.0, blocked=0.0, bytes=0)
        if self.remote is not None:
            self.remote.upload(generation)

    @property
    def name(self) -> str | None:
        """The name of the newest checkpoint on disk, or None."""
        return None if self.last is None else _name_saved_checkpoint(self.last)

    def close(self, seconds: float = LEAVING) -> None:
        """Wait so long for the save in progress and record it. Called at the end of every run, also of a failed one."""
        self._saver.close(seconds)
        with contextlib.suppress(StorageFailed, OutOfMemory, FolderLost):  # the run already ends for another reason
            self._record(self._saver.results())
        if self.remote is not None:
            self.remote.close(self._journal)
        proposal = self.clock.proposal()
        if proposal is not None:
            self._journal.note(proposal, "info")

    def stop(self, signal: str, planned: int, alarmed: bool = False) -> None:
        """Save and end the run with Stopped; nothing is saved twice, or while the weights may be corrupt."""
        # With no checkpoint at all, doubtful weights are better than none: `doubt` records it.
        if self._asked_for != self._live.progress.attempts and not (alarmed and self._asked_for >= 0):
            self.save()
        if alarmed:
            self.finish()
            self.doubt = self._describe_doubt()
        self.stopped(signal, planned)

    def _describe_doubt(self) -> str:
        now = self._live.progress.attempts
        if self.last is None or self.last.attempt < now:
            return f"step {now:,} was not saved: steps fail, and its weights may be bad"
        return (
            f"{_name_saved_checkpoint(self.last)} was saved while steps failed, as there is no older one: its "
            "weights may be bad"
        )

    def stopped(self, signal: str, planned: int) -> None:
        """End the run with its last checkpoint: raise Stopped, or StorageFailed where that save failed."""
        self.finish()
        # The save of this stop failed if the newest checkpoint is older than the requested one.
        if self.last is None or self.last.attempt < self._asked_for:
            if self._failure.is_nonfinite:
                raise self._nonfinite_stop_error(signal, planned)
            raise StorageFailed(
                f"the run was asked to stop by {signal}, and its last state could not be saved: {self._failure}",
                allowed="a disk with room for a checkpoint",
                do="make room, and start the run again with the same command: it continues from an earlier checkpoint",
            )
        newest = f"{self.last.attempt:,} of {planned:,}: saved as {_name_saved_checkpoint(self.last)}"
        if self.doubt:
            newest = (
                f"{self._live.progress.attempts:,} of {planned:,}: {self.doubt}; the newest is "
                f"{_name_saved_checkpoint(self.last)}"
            )
        raise Stopped(f"stopped by {signal} at step {newest}", do="start it again with the same command to continue")

    def _nonfinite_stop_error(self, signal: str, planned: int) -> HalfstepError:
        """Return the error for weights that are non-finite: the disk is fine, and more room would not help."""
        at = f"stopped by {signal} at step {self._live.progress.attempts:,} of {planned:,}"
        if self.last is None:
            return build_nonfinite_weights_error(
                f"{at}, and nothing could be saved: the weights are not finite ({self._failure})"
            )
        return Stopped(
            f"{at}: the newest checkpoint is {_name_saved_checkpoint(self.last)}; "
            f"the state since then is not finite and was not kept ({self._failure})",
            do="start it again with the same command to continue; if it ends the same way, change the recipe",
        )

    def _record(self, results: Iterable[SaveResult]) -> None:
        for saved in results:
            if saved.failure is None:
                self.failures, self.last = 0, saved
                self.clock.timed(saved.blocked)
                self._journal.emit(
                    events.SAVED,
                    file=f"{CHECKPOINTS}/{_name_saved_checkpoint(saved)}",
                    kind="checkpoint",
                    attempt=saved.attempt,
                    seconds=saved.seconds,
                    blocked=saved.blocked,
                    bytes=saved.bytes,
                )
                if self.remote is not None and saved.generation is not None:
                    self.remote.upload(saved.generation)
            else:
                self._note_failed_save(saved)

    def _note_failed_save(self, saved: SaveResult) -> None:
        assert saved.failure is not None
        self._failure = saved.failure
        # A refused save is no storage failure: it does not count toward MOST_FAILURES.
        if saved.failure.folder_lost is not None:
            raise saved.failure.folder_lost
        if saved.failure.is_nonfinite:
            text = f"no checkpoint of step {saved.attempt}: {saved.failure}; the earlier ones remain"
            self._journal.emit(events.NOTE, text=text, level="warning")
            return
        self.failures += 1
        often = f"{self.failures} in a row, {MOST_FAILURES} end the run"
        text = f"no checkpoint of step {saved.attempt}: {saved.failure} ({often})"
        self._journal.emit(events.NOTE, text=text, level="warning", **{events.FAILED_SAVES: self.failures})
        if self.failures >= MOST_FAILURES:
            raise self._too_many_failures_error(saved)

    def _too_many_failures_error(self, saved: SaveResult) -> HalfstepError:
        """Return the error that ends a run which cannot save: the disk is at fault, or the host's memory."""
        given = (
            f"{self.failures} checkpoints in a row could not be written, the last of step {saved.attempt}: "
            f"{saved.failure}"
        )
        if saved.failure is not None and saved.failure.lacks_memory:
            return OutOfMemory(
                given,
                allowed="host memory for a copy of the state, in addition to the training and its workers",
                do="free memory, or start it with fewer train.num_workers: it continues from the last checkpoint",
            )
        return StorageFailed(
            given,
            allowed="a writable disk, with room for one more checkpoint than the run keeps",
            do="make room, and start the run again with the same command: it continues from the last checkpoint",
        )


def _name_saved_checkpoint(saved: SaveResult) -> str:
    return saved.generation.name if saved.generation is not None else "nothing"
