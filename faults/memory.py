"""How much memory a process took, measured where nothing else has taken any before."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def in_a_new_process(work: Callable[..., Any], *given: Any) -> Any:
    """What `work` returns. This process may have used more memory before, and would not show its growth."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(work, *given).result()


def highest() -> int:
    """The most bytes that this process ever held. Linux's own counter begins anew with a program, rusage's does not."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    # macOS counts in bytes, others in kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
