"""The rename that commits a save is never flushed, nor is any other name."""

from __future__ import annotations

from typing import Any

from halfstep.checkpoint import commit
from halfstep.checkpoint.paths import CheckpointDir, Disk
from halfstep.checkpoint.sealed import MANIFEST, write_sealed

WHAT = "a save is reported before its name is on the disk"
ROWS = ("F19",)


def apply() -> None:
    def finish(generation: CheckpointDir, manifest: Any, disk: Disk) -> None:
        write_sealed(disk, generation.draft / MANIFEST, [manifest.text()])
        disk.flush_folder(generation.draft)
        disk.rename(generation.draft, generation.path)

    commit._commit_draft = finish
