"""A run that does not ask whether its folder is still its own, or a launch that does not ask whether another runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halfstep import files
from halfstep.errors import STORAGE, FolderLost
from halfstep.journal import events
from halfstep.ownership import FolderOwnership
from halfstep.train import run_folder


def _checked_at_the_start_only() -> None:
    FolderOwnership.check = lambda self: None  # type: ignore[method-assign]


def _made_anew() -> None:
    """A folder that is gone is created again, as `mkdir(parents=True)` does."""
    loss = FolderOwnership._loss

    def none_if_gone(self: FolderOwnership) -> FolderLost | None:
        found = loss(self)
        return None if found is not None and found.exit_code == STORAGE else found

    def with_parents(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)

    FolderOwnership._loss = none_if_gone  # type: ignore[method-assign]
    files.create_parent_folder = events.create_parent_folder = with_parents  # type: ignore[attr-defined]


def _any_token() -> None:
    """The file alone is compared: a second launch that was granted the lock too has the same one."""
    init = FolderOwnership.__init__

    def unsigned(self: FolderOwnership, folder: Path, descriptor: int, token: str, *, is_signed: bool) -> None:
        init(self, folder, descriptor, token, is_signed=False)

    FolderOwnership.__init__ = unsigned  # type: ignore[method-assign]


def _lock_alone() -> None:
    run_folder._refuse_running_here = lambda folder, descriptor: None
    run_folder.find_run_elsewhere = lambda folder: None


def _by_age() -> None:
    """A status of another host counts as dead at once: nobody waits for its next heartbeat."""
    run_folder._watch_heartbeat = lambda folder, before, now_does: None


@dataclass(frozen=True)
class Defect:
    WHAT: str
    ROWS: tuple[str, ...]
    apply: Callable[[], None]


MUTANTS = {
    "M51": Defect("the lock is compared with the folder only on acquisition", ("F41",), _checked_at_the_start_only),
    "M52": Defect("a removed folder is created again", ("F42",), _made_anew),
    "M53": Defect("the token in the lock is not compared", ("F41",), _any_token),
    "M54": Defect("every granted lock is trusted", ("F43",), _lock_alone),
    "M55": Defect("the heartbeat of a run on another host is not checked", ("F43",), _by_age),
}
