"""Tune how a process that halfstep starts allocates host memory while it trains on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

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


# -- collecting -------------------------------------------------------------------------------------------------------
# Keep Python's garbage collector from scanning objects that are never freed.


@contextmanager
def nothing_collected() -> Iterator[None]:
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
