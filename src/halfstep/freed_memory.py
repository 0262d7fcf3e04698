"""How a process of ours keeps the memory of its tensors, where it trains on the main processor."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's mallopt."""
_KEPT, _LARGEST_REUSED = 2**31 - 1, 2**25
"""The most that mallopt takes."""


def keep_freed_memory() -> None:
    """Let the tensors of a step have the pages of the step before.

    glibc gives large blocks back to the system at once, and the next step pays for every page of them again. Asked for
    before anything large is allocated; a C library without these knobs is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_REUSED)
        mallopt(_TRIM_THRESHOLD, _KEPT)
