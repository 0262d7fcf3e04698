"""Copy the checkpoints of a run to an object store while it trains, and restore it on a machine that has none."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, Disk, list_generations
from halfstep.errors import (
    CANNOT_CREATE,
    FolderLost,
    FolderTaken,
    HalfstepError,
    NoCheckpoint,
    StoreFailed,
    format_error_reason,
)
from halfstep.files import parse_known_fields, read_json, replace_storage_errors, write_json
from halfstep.journal.events import Journal
from halfstep.journal.jsonl import JOURNAL, LOG
from halfstep.launch_variables import read_launched_rank
from halfstep.status_line import Now
from halfstep.store.address import check_obstore_installed, parse_address
from halfstep.store.process import BUG, LOST, StoreProcess
from halfstep.train.remote_generations import (
    BEST,
    DAMAGED,
    KEPT_ALL,
    LEASE,
    TAKEN,
    KnownLaunch,
    Lease,
    RestoreResult,
    UploadRequest,
)
from halfstep.train.run_folder import RECIPE, RESTORING

GENERATIONS = "halfstep.train.remote_generations"
WARNED_AFTER = 300.0
"""Seconds without an upload after which the run warns."""
AT_START = 15.0
"""Seconds for which a run with local checkpoints asks for its store before it starts without."""
AT_END = 5.0
"""Seconds to take back the claim of a launch that could not start."""
PAUSES = (1.0, 5.0, 15.0, 30.0)
"""Seconds between two attempts to upload; the last one stays."""


@dataclass(frozen=True)
class LeaseFile:
    """The content of remote.json in the run's folder."""

    remote: str = ""
    run: str = ""
    number: int = 0


class RemoteCheckpoints:
    """The copy of a run's checkpoints in a store. Only rank 0 has one. Uploads happen in a thread and a process."""

    def __init__(self, address: str, *, patience: float, keep: int, wait: float) -> None:
        check_obstore_installed()
        self.address = str(parse_address(address, "checkpoint.remote"))
        self.wait, self._patience, self._keep = wait, patience, keep
        self._process = StoreProcess()
        self._folder, self._launch = Path(), ""
        self._known: KnownLaunch | None = None
        self._lease: Lease | None = None
        self._skipped: list[str] = []
        self._withdrawn: list[str] = []
        self._changed = threading.Condition()
        self._wanted: CheckpointDir | None = None
        self._since = 0.0
        self._uploaded: str | None = None
        self._failure: StoreFailed | None = None
        self._has_warned, self._keeps_all, self._is_over = False, False, False
        self._notes: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._upload_all, name="halfstep uploads", daemon=True)
        self.disk = RemoteDisk(self)
        """Writes the local checkpoints."""
        self.beat: Callable[[], None] = lambda: None
        """Called while the end of the run waits for an upload."""

    def fill(self, folder: Path, now: Now) -> bool:
        """Restore the run into a folder that holds none, and return whether the store has one."""
        draft = folder / RESTORING
        if (folder / RECIPE).exists():
            shutil.rmtree(draft, ignore_errors=True)  # of a restore that was killed in its last moment
            return False
        if draft.exists():
            # Of a restore that was killed: everything is downloaded again.
            for name in (CHECKPOINTS, JOURNAL, LOG, BEST, LEASE):
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        now(f"asking {self.address} for a checkpoint, for at most {self._patience:.0f} s")
        request = {"address": self.address, "patience": self._patience, "folder": str(folder.absolute())}
        try:
            found = RestoreResult.of(self._process.call(f"{GENERATIONS}:restore", request))
        except StoreFailed as failure:
            shutil.rmtree(draft, ignore_errors=True)
            kind = {DAMAGED: NoCheckpoint, TAKEN: FolderTaken}.get(failure.kind)
            raise kind(failure.given, allowed=failure.allowed, do=failure.do) if kind else failure from None
        self._known, self._skipped = found.known, list(found.skipped)
        self._notes += [(f"{self.address}/{key} is skipped: {why}", "warning") for key, why in found.skipped.items()]
        if found.name is not None:
            self._notes.append((f"restored {found.name} from {self.address}", "info"))
        elif (folder / RECIPE).exists():
            self._notes.append(
                (f"the run in {self.address} has no checkpoint yet: it starts from the beginning", "info")
            )
        return (folder / RECIPE).exists()

    def claim(self, folder: Path, launch: str) -> None:
        """Make this launch the owner of the place; raise FolderTaken if it is another run's.

        Where the run has local checkpoints and the store does not answer, the claim is made with the first upload.
        """
        self._folder, self._launch = folder, launch
        kept = parse_known_fields(LeaseFile, read_json(folder / LEASE))
        if kept.run:  # also at another address than before
            self._known = KnownLaunch(kept.run, kept.number)
        # Before the claim: a launch that is killed after it must be recognized by the next one.
        with replace_storage_errors(
            f"{folder / LEASE} cannot be written", allowed="a disk with room", do="make room there"
        ):
            self._keep_known(self._known or KnownLaunch(secrets.token_hex(8), 0))
        has_own = bool(list_generations(folder / CHECKPOINTS))
        try:
            self._take(min(self._patience, AT_START) if has_own else self._patience)
        except StoreFailed as failure:
            if failure.kind == TAKEN:
                raise FolderTaken(failure.given, allowed=failure.allowed, do=failure.do) from None
            if not has_own:
                raise
            self._failure = failure
            self._notes.append((f"{format_error_reason(failure)}; the run continues with local checkpoints", "warning"))

    def _keep_known(self, known: KnownLaunch) -> None:
        self._known = known
        write_json(self._folder / LEASE, asdict(LeaseFile(self.address, known.run, known.number)))

    def _take(self, patience: float) -> Lease:
        assert self._known is not None
        known = asdict(self._known)
        request = {"address": self.address, "patience": patience, "launch": self._launch, "known": known}
        request["recipe"] = (self._folder / RECIPE).read_text(encoding="utf-8")
        lease = Lease(**{**self._process.call(f"{GENERATIONS}:claim", request), "patience": self._patience})
        self._keep_known(KnownLaunch(lease.run, lease.number))
        if not lease.conditional:
            text = f"{self.address} ignores conditions on writes: unique names alone keep launches apart"
            self._notes.append((text, "warning"))
        self._lease = lease
        return lease

    def upload(self, generation: CheckpointDir, withdrawn: Sequence[str] = ()) -> None:
        """Upload a checkpoint in the background; an older one that still waits is skipped.

        The copies of `withdrawn` ones, which the run has set aside, are removed.
        """
        with self._changed:
            if self._wanted is None:
                self._since = time.monotonic()
            self._wanted = generation
            self._withdrawn += withdrawn
            self._changed.notify_all()
        if not self._thread.is_alive() and not self._is_over:
            self._thread.start()

    def report(self, journal: Journal) -> None:
        """Write to the journal what happened since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
            is_late = self._wanted is not None and time.monotonic() - self._since > WARNED_AFTER
            if is_late and not self._has_warned:
                self._has_warned = True
                why = format_error_reason(self._failure) if self._failure else "the upload takes longer than that"
                notes.append((f"no checkpoint could be uploaded for {WARNED_AFTER / 60:.0f} minutes: {why}", "warning"))
        for text, level in notes:
            journal.note(text, level)

    def check(self) -> None:
        """Raise FolderLost if a later launch of this run owns the place."""
        if self._failure is not None and self._failure.kind == TAKEN:
            raise FolderLost(
                self._failure.given,
                allowed="one launch of a run at a time",
                do="leave the run to the later launch, which continues from the last commit",
                exit_code=CANNOT_CREATE,
            )

    def close(self, journal: Journal) -> None:
        """Wait for the last upload, at most `checkpoint.remote_wait` seconds, and name the missing checkpoint."""
        until = time.monotonic() + self.wait
        with self._changed:
            while self._wanted is not None and not self._is_over and time.monotonic() < until:
                self._changed.wait(0.5)
                self.beat()
            missing, self._is_over = self._wanted, True
            self._changed.notify_all()
        self._process.close()
        self.report(journal)
        if missing is not None:
            why = format_error_reason(self._failure) if self._failure else f"not finished within {self.wait:.0f} s"
            there = f"the newest there is {self._uploaded}" if self._uploaded else "this launch has uploaded none"
            again = "the same command uploads it"
            journal.note(f"{missing.name} is missing in {self.address}: {why}; {there}; {again}", "warning")

    def complete(self, folder: Path, now: Now) -> str | None:
        """Upload the newest checkpoint of a finished run, if the store lacks it; return what happened, or None."""
        newest = next(iter(list_generations(folder / CHECKPOINTS)), None)
        if newest is None:
            return None
        now(f"comparing {newest.name} with {self.address}, for at most {self.wait:.0f} s")
        try:
            self.claim(folder, secrets.token_hex(8))
        except HalfstepError as error:
            return f"{newest.name} is not uploaded: {format_error_reason(error)}"
        self.upload(newest)
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is None or self._is_over, self.wait)
            if self._wanted is not None:
                why = format_error_reason(self._failure) if self._failure else f"not finished within {self.wait:.0f} s"
                return f"{newest.name} is missing in {self.address}: {why}"
        return f"{newest.name} is uploaded to {self.address} now" if self._uploaded else None

    def stop(self) -> None:
        """End the process, however the run ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._lease is not None and not (self._folder / RECIPE).exists():
            # The folder of a launch that could not start is removed, and the corrected command may follow.
            with contextlib.suppress(StoreFailed):
                self._process.call(f"{GENERATIONS}:release", {**asdict(self._lease), "patience": AT_END})
        self._process.close()

    def _upload_all(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._is_over)
                generation, withdrawn = self._wanted, list(self._withdrawn)
                if self._is_over or generation is None:
                    return
            try:
                lease = self._lease or self._take(self._patience)
                uploaded = self._process.call(f"{GENERATIONS}:upload", self._request(lease, generation, withdrawn))
            except FolderLost:
                with self._changed:
                    self._is_over = True  # the run's next save tells
                return
            except (OSError, StoreFailed) as error:
                # An OSError: no memory for the process, or no room for the run's own files.
                failure = error if isinstance(error, StoreFailed) else StoreFailed(str(error), kind=BUG)
                if failure.kind == KEPT_ALL:
                    self._warn_of_kept(failure)
                    self._done(generation, withdrawn, generation.name)
                    continue
                if self._is_over:
                    return
                self._failure = failure if failure.kind != LOST else self._failure
                with self._changed:
                    self._is_over |= failure.kind == TAKEN
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_over, PAUSES[min(failures, len(PAUSES) - 1)])
                failures += 1
                continue
            failures = 0
            self._done(generation, withdrawn, uploaded)

    def _warn_of_kept(self, failure: StoreFailed) -> None:
        with self._changed:
            if not self._keeps_all:
                text = f"older checkpoints in the store stay until the next upload: {failure.given}; a removal needs "
                text += "the permission Delete"
                self._notes.append((text, "warning"))
            self._keeps_all = True

    def _request(self, lease: Lease, generation: CheckpointDir, withdrawn: list[str]) -> UploadRequest:
        return {
            "lease": asdict(lease),
            "folder": str(self._folder.absolute()),
            "name": generation.name,
            "keep": self._keep,
            "skipped": self._skipped,
            "withdrawn": withdrawn,
        }

    def _done(self, generation: CheckpointDir, withdrawn: list[str], uploaded: str | None) -> None:
        with self._changed:
            self._failure, self._uploaded = None, uploaded or self._uploaded
            self._withdrawn = self._withdrawn[len(withdrawn) :]
            self._since = time.monotonic()
            if self._wanted is generation:
                self._wanted = None
            if self._has_warned:
                self._has_warned = False
                self._notes.append((f"{self.address} has {generation.name}: uploads work again", "info"))
            self._changed.notify_all()


class RemoteDisk(Disk):
    """A disk on which no save starts after a later launch has taken the run's place in the store."""

    def __init__(self, remote: RemoteCheckpoints) -> None:
        self._remote = remote

    def make_folder(self, path: Path) -> None:
        """Create a folder; raise FolderLost if the run is another launch's."""
        self._remote.check()
        super().make_folder(path)


@contextlib.contextmanager
def open_remote_checkpoints(recipe: Any) -> Iterator[RemoteCheckpoints | None]:
    """Yield the store copy of a run on rank 0, with its process started; None on other ranks and without a store."""
    options = recipe.checkpoint
    if options.remote is None or read_launched_rank().rank > 0:
        yield None
        return
    remote = RemoteCheckpoints(
        options.remote, patience=recipe.store.patience, keep=options.keep, wait=options.remote_wait
    )
    try:
        yield remote
    finally:
        remote.stop()
