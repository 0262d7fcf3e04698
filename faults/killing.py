"""A disk on which a process ends with SIGKILL, at a point of a save that has a name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from halfstep.checkpoint.paths import DRAFT, Disk
from halfstep.checkpoint.sealed import MANIFEST


class Point(NamedTuple):
    """Before or after an operation on something whose name ends like this."""

    when: str
    operation: str
    ends: str


POINTS = {
    "in the middle of the tensors": Point("after", "write", ".safetensors"),
    "before the tensors are flushed": Point("before", "flush", ".safetensors"),
    "after the tensors are flushed": Point("after", "flush", ".safetensors"),
    "before the manifest": Point("before", "create", MANIFEST),
    "after the manifest is flushed": Point("after", "flush", MANIFEST),
    "after the draft's names are flushed": Point("after", "flush_folder", DRAFT),
    "before the rename": Point("before", "rename", DRAFT),
    "after the rename": Point("after", "rename", DRAFT),
    "after the rename is flushed": Point("after", "flush_folder", "checkpoints"),
    "after an old one lost its name": Point("after", "lose name", DRAFT),
    "in the middle of removing an old one": Point("after", "remove", ""),
    "before its empty folder is removed": Point("before", "remove_folder", DRAFT),
}


class KillAt(Disk):
    """Made in one process and used in another, so it holds nothing but plain data."""

    def __init__(self, point: Point, save: int) -> None:
        self._point, self._save = point, save
        self._saves = 0
        self._files: dict[int, str] = {}

    def _at(self, operation: str, name: str, do: Callable[[], None]) -> None:
        hit = self._saves >= self._save and operation == self._point.operation and name.endswith(self._point.ends)
        if hit and self._point.when == "before":
            _die()
        do()
        if hit:
            _die()

    def make_folder(self, path: Path) -> None:
        self._saves += path.name.endswith(DRAFT)
        self._at("make_folder", path.name, lambda: Disk.make_folder(self, path))

    def create(self, path: Path) -> int:
        self._at("create", path.name, lambda: None)
        file = super().create(path)
        self._files[file] = path.name
        return file

    def write(self, file: int, content: bytes | memoryview) -> None:
        self._at("write", self._files[file], lambda: Disk.write(self, file, content))

    def flush(self, file: int) -> None:
        self._at("flush", self._files[file], lambda: Disk.flush(self, file))

    def flush_folder(self, path: Path) -> None:
        self._at("flush_folder", path.name, lambda: Disk.flush_folder(self, path))

    def rename(self, old: Path, new: Path) -> None:
        commits = old.name.endswith(DRAFT)
        self._at("rename" if commits else "lose name", f"{new.name}{DRAFT}", lambda: Disk.rename(self, old, new))

    def remove(self, file: Path) -> None:
        self._at("remove", file.name, lambda: Disk.remove(self, file))

    def remove_folder(self, path: Path) -> None:
        self._at("remove_folder", path.name, lambda: Disk.remove_folder(self, path))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
