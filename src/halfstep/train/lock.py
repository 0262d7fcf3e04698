"""One process a folder: a lock that the system takes back when its holder dies, however it dies."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

from halfstep.errors import FolderTaken, WrongUse

LOCK = ".lock"
LONGEST = 4096
"""Bytes that are read of a lock file: somebody else may have written it."""
TRIES = 5
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What a system says whose lock another process has."""
OWN = "add --new for a folder of its own"


class FolderLock:
    """A folder that no other process can lock. Held until `release`, or until the process is gone."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Let others have it. The file stays: one that is removed can be locked twice, under its old and new self."""
        with _changing:
            descriptor, self._descriptor = self._descriptor, None
            _held.discard(self)
            if descriptor is None:
                return
            _write(descriptor, b"")
            # Not by closing alone: a process that is being forked right now has the descriptor for a moment.
            _fcntl().flock(descriptor, _fcntl().LOCK_UN)
            os.close(descriptor)

    def _forget(self) -> None:
        """In a forked child. It shares the lock with its parent: unlocking would take it from both."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock(folder: Path) -> FolderLock:
    """The lock of a folder that exists, or FolderTaken with the words of the process that has it."""
    path = folder / LOCK
    _fcntl()
    try:
        with _changing:
            taken = _take(path)
            _held.add(taken)
            return taken
    except OSError as error:
        raise FolderTaken(
            f"{folder} cannot be locked: {error.strerror or error}",
            allowed="a folder on a file system with locks, that this user can write to",
            do="give run.dir=PATH, a place of your own",
        ) from None


def _take(path: Path) -> FolderLock:
    for _ in range(TRIES):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{LOCK} is not a file")
            _lock_now(path.parent, descriptor)
            # Somebody may have cleared the folder since it was opened: then what is locked is a file without a name.
            if _is_still(path, descriptor):
                _write(descriptor, _words())
                return FolderLock(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, f"{LOCK} is removed again and again")


def _lock_now(folder: Path, descriptor: int) -> None:
    try:
        _fcntl().flock(descriptor, _fcntl().LOCK_EX | _fcntl().LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise _taken(folder, descriptor) from None
        raise


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _words() -> bytes:
    """For people. No decision may depend on it: numbers of processes are given again, and files outlive them."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode() + b"\n"


def _write(descriptor: int, words: bytes) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, words, 0)
    except OSError:  # a full disk: the lock holds without words
        pass


def _taken(folder: Path, descriptor: int) -> FolderTaken:
    holder, kill = _holder(descriptor)
    stop = f"stop it ({kill}), " if kill else ""
    return FolderTaken(
        f"{folder} is in use by {holder}", allowed="one process a folder", do=f"wait for it, {stop}or {OWN}"
    )


def _holder(descriptor: int) -> tuple[str, str]:
    """Who has the lock, and what ends it; without the second where that cannot be said."""
    for _ in range(TRIES):
        match _written(descriptor):
            case {"pid": int(pid), "host": str(host), "since": str(since)} if _is_plain(host, since):
                here = host == socket.gethostname()
                if here and pid == os.getpid():
                    return f"this process (another run in it, since {since})", ""
                return f"process {pid} on {host} since {since}", f"kill {pid}" if here else f"kill {pid} on {host}"
        time.sleep(0.01)  # a holder writes its words just after it got the lock
    return "another process", ""


def _written(descriptor: int) -> object:
    try:
        return json.loads(os.pread(descriptor, LONGEST, 0))
    except (OSError, ValueError, RecursionError):
        return None


def _is_plain(*words: str) -> bool:
    return all(word.isprintable() and 0 < len(word) <= 255 for word in words)


def _fcntl() -> ModuleType:
    try:
        import fcntl
    except ImportError:
        raise WrongUse(
            "this system has no flock: two runs could write to one folder, and training cannot keep them apart",
            allowed="Linux or macOS",
            do="train in WSL, or in a container",
        ) from None
    return fcntl


_held: set[FolderLock] = set()
_changing = threading.RLock()
"""Held while a lock is taken or released, so that no process is forked between a descriptor and the note of it."""


def _in_child() -> None:
    """A forked process, as those that read samples are, would keep the lock of a run that was killed."""
    for one in _held:
        one._forget()
    _held.clear()
    _changing.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_in_child)
