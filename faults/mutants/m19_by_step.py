"""The newest checkpoint is taken to be the one with the highest step, also after a rollback."""

from __future__ import annotations

from pathlib import Path

from halfstep.checkpoint import commit, reading
from halfstep.checkpoint.paths import CheckpointDir, list_generations

WHAT = "checkpoints are sorted by step, not by the time of the save"
ROWS = ("F27",)


def apply() -> None:
    def by_step(folder: Path) -> list[CheckpointDir]:
        return sorted(list_generations(folder), key=lambda one: one.attempt, reverse=True)

    commit.list_generations = by_step  # type: ignore[attr-defined]
    reading.list_generations = by_step  # type: ignore[attr-defined]
