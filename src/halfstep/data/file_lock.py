"""Lock a file for the processes of a machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """Let one process of this machine write a file; without a lock where the system or the disk has none."""
    with ExitStack() as stack:
        with suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path.with_suffix(".lock"), "wb")), fcntl.LOCK_EX)
        yield
