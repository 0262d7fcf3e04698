"""The thread that writes swallows its error, and the save is reported as done."""

from __future__ import annotations

from typing import Any

from halfstep.checkpoint import commit
from halfstep.checkpoint.commit import NotCommitted
from halfstep.checkpoint.paths import name_next_generation

WHAT = "an error in the writer thread is ignored"
ROWS = ("F23", "F24")


def apply() -> None:
    committing = commit.commit_checkpoint

    def swallowing(folder: Any, snapshot: Any, **more: Any) -> Any:
        try:
            return committing(folder, snapshot, **more)
        except NotCommitted:
            return name_next_generation(folder, snapshot.attempt)

    commit.commit_checkpoint = swallowing  # type: ignore[assignment]
