"""Let one rank of a node ask a file system or a store, and the other ranks of the launch take its reply. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import TypeVar

from halfstep.data.file_lock import lock_path
from halfstep.files import find_cache_folder, read_json, write_json
from halfstep.launch_variables import read_launched_rank

T = TypeVar("T")
VALID = 120.0
"""Seconds for which a reply is valid: the ranks of a launch open a set at the same time."""
_LAUNCH = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
"""The variables that differ between launches."""


def ask_once_per_node(question: object, ask: Callable[[], T]) -> T:
    """Return the reply of `ask`, plain data for JSON; of the ranks of a launch on this node, the first one calls it."""
    if (read_launched_rank().local_world_size or 1) == 1:
        return ask()
    launch = (os.getppid(), *(os.environ.get(name) for name in _LAUNCH), question)
    digest = blake2b(repr(launch).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    path = find_cache_folder() / "shards" / f"{digest}.reply"
    with lock_path(path):
        with suppress(OSError, TypeError, KeyError):
            if 0 <= time.time() - path.stat().st_mtime < VALID:
                found: T = read_json(path)["reply"]  # type: ignore[index]
                return found
        reply = ask()
        with suppress(OSError):  # without a cache, each rank asks
            write_json(path, {"reply": reply})
        return reply
