"""Count the CPU cores that a process may use."""

from __future__ import annotations

import os

from halfstep.launch_variables import read_launched_rank


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_cores_per_rank() -> int:
    """Return the cores of this host for each rank on it."""
    return max(1, count_cores() // (read_launched_rank().local_world_size or 1))
