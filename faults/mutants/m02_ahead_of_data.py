"""Old checkpoints are removed, and the new one is reported as saved, while its data waits to be flushed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from halfstep.checkpoint import commit
from halfstep.checkpoint.paths import Disk
from halfstep.checkpoint.sealed import SealedFile, write_sealed

WHAT = "a save is reported, and old ones are removed, before its data is on the disk"
ROWS = ("F19", "F26")
_waiting: list[tuple[Disk, int]] = []


class _Later(Disk):
    """Flushes when the next save begins."""

    def __init__(self, disk: Disk) -> None:
        self.create, self.write = disk.create, disk.write  # type: ignore[method-assign]
        self._disk = disk

    def flush(self, file: int) -> None:
        _waiting.append((self._disk, file))

    def close(self, file: int) -> None:
        pass


def apply() -> None:
    create = commit._create_draft

    def flushing_the_last(*given: object) -> int:
        while _waiting:
            disk, file = _waiting.pop()
            disk.flush(file)
            disk.close(file)
        return create(*given)  # type: ignore[arg-type]

    def unflushed(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> SealedFile:
        return write_sealed(_Later(disk), path, pieces)

    commit._create_draft = flushing_the_last
    commit.write_sealed = unflushed  # type: ignore[attr-defined]
