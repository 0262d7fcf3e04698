"""The rename that commits a save is never flushed, nor is any other name."""

from __future__ import annotations

from typing import Any

from halfstep.train.checkpoint import commit
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.generation import Generation
from halfstep.train.checkpoint.manifest import MANIFEST
from halfstep.train.checkpoint.sealed import write_sealed

WHAT = "a save is reported before its name is on the disk"
ROWS = ("F19",)


def apply() -> None:
    def finish(generation: Generation, manifest: Any, disk: Disk) -> None:
        write_sealed(disk, generation.draft / MANIFEST, [manifest.text()])
        disk.flush_folder(generation.draft)
        disk.rename(generation.draft, generation.path)

    commit._finish = finish
