"""A step that is saved again takes the place of the first, which is removed to make room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.checkpoint import commit
from halfstep.checkpoint.paths import CheckpointDir, Disk, list_generations, name_next_generation

WHAT = "a repeated save of a step is written into its existing folder"
ROWS = ("F27",)


def apply() -> None:
    finish = commit._commit_draft

    def in_place(generation: CheckpointDir, manifest: Any, disk: Disk) -> None:
        commit.remove_checkpoint_folder(generation.path, disk)
        finish(generation, manifest, disk)

    def same(folder: Path, attempt: int) -> CheckpointDir:
        there = [one for one in list_generations(folder) if one.attempt == attempt]
        return there[0] if there else name_next_generation(folder, attempt)

    commit._commit_draft = in_place
    commit.name_next_generation = same  # type: ignore[attr-defined]
