"""Every state that a crash can leave files in: what was done is recorded, cut anywhere, and built again.

A killed process leaves all that it did. A loss of power leaves less, and how much less differs between file systems;
`MODELS` are the ends of that range. Signals cannot show a missing flush, and only some of the states occur by chance:
here all of them are built.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from halfstep.checkpoint.paths import CHECKPOINTS, Disk

RUN = Path("run") / CHECKPOINTS
"""Where the checkpoints are in a place."""
MODELS = ("killed", "names first", "zeros", "garbage", "flushed", "outer names first", "inner names first")
"""What is left: everything; all names, and of the data what was flushed, or as many zeros, or other bytes; only what
was flushed; and names that were not flushed only in the folder of generations, or only inside of these."""


@dataclass
class File:
    now: bytes = b""
    flushed: bytes = b""


@dataclass
class Folder:
    now: dict[str, Node] = field(default_factory=dict)
    flushed: dict[str, Node] = field(default_factory=dict)


Node: TypeAlias = "File | Folder"
Tree: TypeAlias = tuple[tuple[str, Any], ...]
"""Names in order, each with its bytes, or with a tree of its own."""


class Recording(Disk):
    """The real disk, which also writes down what was done; threads take turns."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self._turn = threading.Lock()
        self._opened = 0
        self._names: dict[int, int] = {}
        for name in ("make_folder", "flush_folder", "rename", "remove", "remove_folder"):
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Callable[..., None]:
        def noted(*paths: Path) -> None:
            with self._turn:
                getattr(Disk, name)(self, *paths)
                self.operations.append((name, *paths))

        return noted

    def create(self, path: Path) -> int:
        with self._turn:
            file = super().create(path)
            self._opened += 1
            self._names[file] = self._opened
            self.operations.append(("create", path, self._opened))
            return file

    def write(self, file: int, content: bytes | memoryview) -> None:
        with self._turn:
            super().write(file, content)
            self.operations.append(("write", self._names[file], bytes(content)))

    def flush(self, file: int) -> None:
        with self._turn:
            super().flush(file)
            self.operations.append(("flush", self._names[file]))


class Replay:
    """The same operations on a disk that knows what is flushed."""

    def __init__(self, place: Path, base: Folder) -> None:
        self.place, self.base = place, base
        self.files: dict[int, File] = {}

    def apply(self, operation: tuple[Any, ...]) -> None:
        getattr(self, operation[0])(*operation[1:])

    def _at(self, path: Path) -> Folder:
        folder = self.base
        for part in path.relative_to(self.place).parts:
            inner = folder.now[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder

    def make_folder(self, path: Path) -> None:
        self._at(path.parent).now[path.name] = Folder()

    def create(self, path: Path, number: int) -> None:
        self.files[number] = File()
        self._at(path.parent).now[path.name] = self.files[number]

    def write(self, number: int, content: bytes) -> None:
        self.files[number].now += content

    def flush(self, number: int) -> None:
        if number in self.files:  # others were made before this began
            self.files[number].flushed = self.files[number].now

    def flush_folder(self, path: Path) -> None:
        if path.is_relative_to(self.place):
            folder = self._at(path)
            folder.flushed = dict(folder.now)

    def rename(self, old: Path, new: Path) -> None:
        self._at(new.parent).now[new.name] = self._at(old.parent).now.pop(old.name)

    def remove(self, path: Path) -> None:
        self._at(path.parent).now.pop(path.name, None)

    def remove_folder(self, path: Path) -> None:
        del self._at(path.parent).now[path.name]


def on_disk(path: Path) -> Folder:
    """A folder as it is, all of it flushed."""
    entries: dict[str, Node] = {}
    for inner in path.iterdir():
        entries[inner.name] = on_disk(inner) if inner.is_dir() else File(inner.read_bytes(), inner.read_bytes())
    return Folder(entries, dict(entries))


def left(folder: Folder, model: str, depth: int = 0) -> Tree:
    """What a crash leaves of it."""
    inside = depth > len(RUN.parts)
    behind = {"flushed": True, "outer names first": inside, "inner names first": not inside}
    entries = folder.flushed if behind.get(model, False) else folder.now
    return tuple(
        (name, left(node, model, depth + 1) if isinstance(node, Folder) else _data(node, model))
        for name, node in sorted(entries.items())
    )


def _data(file: File, model: str) -> bytes:
    lost = len(file.now) - len(file.flushed)
    if model == "killed":
        return file.now
    if model == "zeros":
        return file.flushed + bytes(lost)
    return file.flushed + random.Random(lost).randbytes(lost) if model == "garbage" else file.flushed


def build(tree: Tree, path: Path) -> None:
    path.mkdir()
    for name, content in tree:
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            build(content, path / name)
