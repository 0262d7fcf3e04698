"""A cache of chunks on the disk of a node, for all of its processes: named by digest, limited in size. No torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halfstep.errors import StorageFailed
from halfstep.files import flush

LOCK = ".lock"
KEPT_FREE = 2**30
"""Bytes of the disk that are left to others."""
WAIT = 60.0
"""Seconds to wait for chunks that are open."""
MANY = 100
"""Chunks above which a tenth of the cache is removed at a time: each removal looks at every file."""


class ChunkCache:
    """Chunks in a folder. A chunk is complete or missing; the oldest ones are removed, and never one that is open."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def open(self, name: str) -> int | None:
        """Open a chunk, which stays until it is closed; return None if it is missing."""
        try:
            handle = os.open(self.folder / name, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.failed(error.strerror or type(error).__name__) from None
        _lock_handle(handle, exclusive=False)
        return handle

    def touch(self, name: str) -> bool:
        """Make a chunk the newest one; return False if it is missing."""
        try:
            os.utime(self.folder / name)
        except FileNotFoundError:
            return False
        except OSError:  # a cache that this user may read alone
            return os.path.exists(self.folder / name)
        return True

    def is_recent(self, name: str, seconds: float) -> bool:
        """Return whether a chunk is there that was added within so many seconds."""
        try:
            return time.time() - os.stat(self.folder / name).st_mtime < seconds
        except OSError:
            return False

    def keep(self, name: str, content: bytes) -> None:
        """Add a chunk, and remove the oldest ones that it has no room with; raise StorageFailed if it has none."""
        try:
            with self._lock_cache() as lock:
                noted = os.pread(lock, 20, 0)
                used = int(noted) if noted.isdigit() else self.used()  # zeros after a power cut
                if used + len(content) > self._most(used):
                    used = self._make_room(len(content))
                # Before the chunk: a process that is killed in between counts too much, until the next removal.
                os.pwrite(lock, b"%020d" % (used + len(content)), 0)
                draft = self.folder / f".{name}"
                draft.write_bytes(content)
                flush(draft)  # after a power cut, a chunk of zeros would be read
                os.replace(draft, self.folder / name)
        except OSError as error:
            raise self.failed(error.strerror or type(error).__name__) from None

    def remove(self, name: str, handle: int) -> None:
        """Remove a damaged chunk that was opened, unless another process has replaced it already."""
        path = self.folder / name
        with suppress(OSError):  # a cache that this user may read alone: the chunk is read from the store each time
            if os.fstat(handle).st_ino != path.stat().st_ino:
                return
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()

    def room(self) -> int:
        """Return the bytes that the cache can have: the limit, or what the disk allows."""
        return self._most(self.used())

    def used(self) -> int:
        """Return the bytes of all chunks."""
        return sum(size for _, size, _ in self._chunks())

    def _most(self, used: int) -> int:
        folder = next(one for one in (self.folder, *self.folder.parents) if one.is_dir())
        return min(self.limit, used + max(0, shutil.disk_usage(folder).free - KEPT_FREE))

    def _make_room(self, size: int) -> int:
        """Remove the oldest chunks, and return the bytes of the others."""
        until = time.monotonic() + WAIT
        for draft in self.folder.glob(".*"):
            draft.unlink()  # of a process that was killed: the others wait for the lock
        while True:
            chunks = sorted(self._chunks())
            used = sum(one for _, one, _ in chunks)
            most = self._most(used)
            wanted = most - size - (most // 10 if len(chunks) > MANY else 0)
            for _, one, path in chunks:
                if used <= wanted:
                    break
                used -= one if _remove_unless_open(path) else 0
            if used + size <= most:
                return used
            if not used or time.monotonic() > until:
                free = f"{max(most, 0):,} bytes are allowed or free, besides {KEPT_FREE:,} for others"
                raise self.failed(f"{free}, and {used:,} of them are being read")
            time.sleep(0.02)

    def _chunks(self) -> list[tuple[int, int, Path]]:
        found = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if not entry.name.startswith(".") and not entry.name.endswith(LOCK):
                        found.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)))
        return found

    @contextmanager
    def _lock_cache(self) -> Iterator[int]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Never removed: with a second file of this name, two processes could write at once.
        handle = os.open(self.folder / f"size{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock_handle(handle, exclusive=True)
            yield handle
        finally:
            os.close(handle)

    def failed(self, why: str) -> StorageFailed:
        """Return the error for a chunk that cannot be kept."""
        return StorageFailed(
            f"a chunk cannot be stored in {self.folder}: {why}",
            allowed="a folder that this user can write, with room for three chunks",
            do="make room there, set XDG_CACHE_HOME to another disk, or increase store.cache",
        )


def _lock_handle(handle: int, *, exclusive: bool, wait: bool = True) -> bool:
    with suppress(ImportError, OSError):  # Windows, and file systems without locks
        import fcntl

        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


def _remove_unless_open(path: Path) -> bool:
    """Remove a chunk unless it is open."""
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            if not _lock_handle(handle, exclusive=True, wait=False):
                return False
            path.unlink()
            path.with_suffix(LOCK).unlink(missing_ok=True)
        finally:
            os.close(handle)
    return True
