"""The thread that writes swallows its error, and the save is reported as done."""

from __future__ import annotations

from typing import Any

from halfstep.checkpoint import commit
from halfstep.checkpoint.commit import NotCommitted
from halfstep.checkpoint.paths import following

WHAT = "an error in the writer thread is ignored"
ROWS = ("F23", "F24")


def apply() -> None:
    committing = commit.commit

    def swallowing(folder: Any, snapshot: Any, **more: Any) -> Any:
        try:
            return committing(folder, snapshot, **more)
        except NotCommitted:
            return following(folder, snapshot.attempt)

    commit.commit = swallowing  # type: ignore[assignment]
