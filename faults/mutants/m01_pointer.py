"""A file says which checkpoint is the latest; it is removed and made anew, and readers know no other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.checkpoint import commit, reading
from halfstep.checkpoint.paths import CheckpointDir, Disk, list_generations

WHAT = "the pointer to the latest checkpoint is removed before the new one is written"
ROWS = ("F19", "F20")
POINTER = "latest"


def apply() -> None:
    finish = commit._commit_draft

    def and_point(generation: CheckpointDir, manifest: Any, disk: Disk) -> None:
        finish(generation, manifest, disk)
        pointer = generation.path.parent / POINTER
        disk.remove(pointer)
        file = disk.create(pointer)
        disk.write(file, generation.name.encode())
        disk.flush(file)
        disk.close(file)
        disk.flush_folder(pointer.parent)

    def pointed_at(folder: Path) -> list[CheckpointDir]:
        pointer = folder / POINTER
        latest = pointer.read_bytes() if pointer.is_file() else b""
        return [one for one in list_generations(folder) if one.name.encode() == latest]

    commit._commit_draft = and_point
    reading.list_generations = pointed_at  # type: ignore[attr-defined]
