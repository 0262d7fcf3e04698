"""Tell whether a run's folder is still its own, before anything in it is written or deleted. Imports no torch.

The lock of a folder is a fact of the start: later the folder can be removed or moved, and another run can take its
name. Each process of a run therefore keeps the folder's `.lock` open, and compares it with the file that has this name
now, and the launch token in it with the run's own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from pathlib import Path

from halfstep import files
from halfstep.errors import CANNOT_CREATE, STORAGE, FolderLost, advise_adding_option
from halfstep.peers import RecordedProcess

LOCK = ".lock"
LONGEST = 4096
"""Bytes read from a lock file: another program may have written it."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)
"""Error numbers of a path that leads nowhere; any other may pass, as that of a network disk that is away."""


def read_holder(descriptor: int) -> RecordedProcess | None:
    """Return the holder that an open lock file names; None if it names none."""
    try:
        return RecordedProcess.read(json.loads(os.pread(descriptor, LONGEST, 0)))
    except (ValueError, RecursionError):
        return None


class FolderOwnership:
    """The claim of this process on a folder: an open `.lock`, and the launch token that is in it."""

    def __init__(
        self, folder: Path, descriptor: int, token: str, *, is_signed: bool, outlives_lock: bool = False
    ) -> None:
        """Claim `folder`.

        `is_signed`: the token could be written to the file, which a full disk refuses. `outlives_lock`: rank 0 has the
        lock, and may release it before this rank ends.
        """
        self.folder, self.token, self._outlives_lock = folder, token, outlives_lock
        self.lost: FolderLost | None = None
        """What the first check found that failed; all later ones fail likewise."""
        self._absolute = Path(os.path.abspath(folder))
        self._descriptor: int | None = descriptor
        self._is_signed = is_signed
        self._using = threading.Lock()
        """Held while the descriptor is used or closed: the number of a closed one may be another file's."""
        _owned.add(self)

    @classmethod
    def joined(cls, folder: Path, token: str) -> FolderOwnership | None:
        """Claim a folder that rank 0 of this launch has locked; None if its `.lock` is not seen here."""
        try:
            descriptor = _open_regular_file(folder / LOCK)
        except OSError:
            return None
        found = read_holder(descriptor)
        if found is not None and found.launch != token:
            os.close(descriptor)
            return None
        return cls(folder, descriptor, token, is_signed=found is not None, outlives_lock=True)

    def covers(self, path: Path) -> bool:
        """Return whether `path` is the folder or below it."""
        return any(
            claimed == tried or claimed in tried.parents
            for claimed in (self.folder, self._absolute)
            for tried in (path, Path(os.path.abspath(path)))
        )

    def check(self) -> None:
        """Raise FolderLost if the folder is gone or another run's, from then on; OSError where that is not known."""
        self.lost = self.lost or self._loss()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise FolderLost if an earlier check did, in any thread; the disk is not asked."""
        if self.lost is not None:
            raise self.lost.copy()

    def release(self) -> None:
        """Give the claim up; later checks find nothing."""
        _owned.discard(self)
        self._close()

    def _loss(self) -> FolderLost | None:
        path = self.folder / LOCK
        try:
            there = os.stat(path, follow_symlinks=False)
            with self._using:
                if self._descriptor is None:
                    return None
                is_own = _is_same_file(self._descriptor, there)
            holder = None
            if is_own and self._is_signed:
                # Opened by its name: a network disk asks its server then, and may show an old text to who has it open.
                holder = _read_lock_holder(path)
                # A released lock is empty until the next launch writes its token. The folder is still this launch's: a
                # rank that ends after rank 0, because both lost another one, records its own reason.
                is_released = holder is None and self._outlives_lock and there.st_size == 0
                is_own = is_released or (holder is not None and holder.launch == self.token)
            return None if is_own else _build_taken_error(self.folder, holder or _find_lock_holder(path))
        except OSError as error:
            if error.errno in _GONE:
                return _build_gone_error(self.folder, self._absolute)
            raise

    def _close(self) -> None:
        with self._using:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)


def _is_same_file(descriptor: int, there: os.stat_result) -> bool:
    try:
        return os.path.samestat(there, os.fstat(descriptor))
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed on another host of a network disk
            return False
        raise


def _read_lock_holder(path: Path) -> RecordedProcess | None:
    descriptor = _open_regular_file(path)
    try:
        return read_holder(descriptor)
    finally:
        os.close(descriptor)


def _find_lock_holder(path: Path) -> RecordedProcess | None:
    with contextlib.suppress(OSError):
        return _read_lock_holder(path)
    return None


def _open_regular_file(path: Path) -> int:
    """Open a regular file for reading; raise OSError for a link, a folder or a pipe, and never wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is not a file")
    return descriptor


def _build_taken_error(folder: Path, holder: RecordedProcess | None) -> FolderLost:
    by = f"it is that of {holder}" if holder is not None else f"its {LOCK} is not the one that this run wrote"
    return FolderLost(
        f"{folder} is no longer this run's folder: {by}. Nothing more was written to it",
        allowed="one run per folder; nothing else changes it until the run ends",
        do=f"{advise_adding_option('new')}, or give run.dir=FOLDER, to train in a separate folder",
        exit_code=CANNOT_CREATE,
    )


def _build_gone_error(folder: Path, absolute: Path) -> FolderLost:
    given = f"{folder / LOCK} is gone: the folder was removed, moved or cleared while the run trained"
    do = "restore the folder, and start the run with the same command: it resumes from its last checkpoint"
    if Path(os.path.abspath(folder)) != absolute:
        given = (
            f"{folder / LOCK} is gone: the working directory of the process is {Path.cwd()} now, the run is {absolute}"
        )
        do = f"start it with run.dir={absolute}: it resumes from its last checkpoint"
    elif folder.is_dir():
        given = f"{folder / LOCK} is gone: it was removed while the run trained"
        do = f"start the run with the same command: it resumes from its last checkpoint; leave {LOCK} to the run"
    return FolderLost(
        f"{given}. Nothing was created",
        allowed="a run folder that does not change until the run ends",
        do=do,
        exit_code=STORAGE,
    )


_owned: set[FolderOwnership] = set()
"""What this process has claimed."""


def find_ownership(path: Path) -> FolderOwnership | None:
    """Return the claim of this process on the folder that `path` is in; None if it has none."""
    found = (one for one in tuple(_owned) if one.covers(path))
    return max(found, key=lambda one: len(one.folder.parts), default=None)


def _release_in_child() -> None:
    """Give all claims up in a forked child, such as a data worker: an open `.lock` there would outlive the run."""
    for one in tuple(_owned):
        one._using = threading.Lock()  # another thread may have held it at the fork
        one._close()
    _owned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)

files.register_owner_search(find_ownership)
