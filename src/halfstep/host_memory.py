"""Host memory: how much there is for this process, and how a process that halfstep starts allocates it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of version 2, then of version 1: the folder, the limit, and the bytes in use."""


def read_total_memory() -> int:
    """Return the memory of this machine in bytes, or the limit of the container or job where that is lower."""
    return min(_read_physical_memory(), *(limit for limit, _ in _iterate_group_limits()), 2**62)


def read_free_memory() -> int | None:
    """Return the bytes that are free for this process; None if they are unknown."""
    known = [limit - used for limit, used in _iterate_group_limits()]
    with contextlib.suppress(OSError, ValueError, IndexError, ImportError):
        known.append(_read_available_memory())
    return max(0, min(known)) if known else None


def _read_physical_memory() -> int:
    # psutil comes with an extra. Windows has no os.sysconf.
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(psutil.virtual_memory().total)


def _read_available_memory() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _iterate_group_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each control group that this process is in."""
    for folder, limit, used in _FILES:
        for group in _iterate_own_groups(CGROUP / folder):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                most = int((group / limit).read_text())
                yield most, int((group / used).read_text()) - _read_reclaimable_bytes(group)


def _iterate_own_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of those around it."""
    own = Path()
    with contextlib.suppress(OSError, IndexError):
        own = Path(_OWN_GROUP.read_text().splitlines()[-1].split(":", 2)[2].strip("/\n "))
    for group in (own, *own.parents):
        yield root / group


def _read_reclaimable_bytes(group: Path) -> int:
    """Return the bytes of files in memory that the kernel gives back when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_KEPT, _LARGEST_REUSED = 2**31 - 1, 2**25
"""The largest values that mallopt accepts."""


def keep_freed_memory() -> None:
    """Make glibc keep the pages that a step frees for the next step.

    By default glibc returns large blocks to the system at once, and the next step pays a page fault for every page of
    them. Call it before anything large is allocated. A C library without these parameters is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED)
        mallopt(_TRIM_THRESHOLD, _KEPT)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable garbage collection around imports.

    Imports create a million objects and free almost none, and the collector scans them again and again: without it,
    torch and its dependencies load in two thirds of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
