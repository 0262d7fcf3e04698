"""WebDataset shards, read by number through an index of offsets: order and position are what they are for folders."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate, product
from pathlib import Path

import torch

from halfstep.errors import BadData
from halfstep.train.data.listing import existing, files
from halfstep.train.data.masks import Meaning, Palette, mask_of
from halfstep.train.data.pairs import same_size
from halfstep.train.data.reading import MOST_BYTES, read_image
from halfstep.train.data.shard_index import Row, index_of
from halfstep.train.data.source import BadSample, Files, Sample

MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Shards:
    """`image`, and of `parts` those that the shards have: `label`, `mask`.

    `root` is a folder of .tar files, one of them, or a pattern such as `train-{000..003}.tar`.
    """

    def __init__(
        self,
        root: str | Path,
        channels: int = 3,
        classes: int = 2,
        ignore_index: int | None = None,
        palette: Palette | None = None,
        parts: Collection[str] = ("label", "mask"),
    ) -> None:
        self.channels, self.meaning, self.parts = channels, Meaning(classes, ignore_index, palette), parts
        self.paths = shard_paths(root)
        self._root = os.path.commonpath([path.parent for path in self.paths])
        self._rows = [index_of(path) for path in self.paths]
        self._ends = list(accumulate(len(rows) for rows in self._rows))
        self._alike()
        self.classes = self._class_names()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Sample:
        path, row = self._at(index)
        name = self.name(index)
        image = read_image(_bytes(path, row.image, row.image_size, name), self.channels, name)
        rest = self.without_image(index)
        if "mask" in rest:
            same_size(image.shape[-2:], rest["mask"].shape, name)
        return {"image": image, **rest}

    def without_image(self, index: int) -> Sample:
        path, row = self._at(index)
        name = self.name(index)
        rest = {}
        if row.label >= 0 and "label" in self.parts:
            rest["label"] = torch.tensor(row.label)
        if row.mask >= 0 and "mask" in self.parts:
            rest["mask"] = mask_of(_bytes(path, row.mask, row.mask_size, name), self.meaning, name)
        return rest

    def name(self, index: int) -> str:
        path, row = self._at(index)
        return f"{path}/{row.key}"

    def key(self, index: int) -> str:
        path, row = self._at(index)
        return f"{path.name}/{row.key}"

    def files_of(self, index: int) -> Files:
        path, _ = self._at(index)
        return [(path.relative_to(self._root).as_posix(), path)]

    def _at(self, index: int) -> tuple[Path, Row]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._ends, index)
        before = self._ends[shard - 1] if shard else 0
        return self.paths[shard], self._rows[shard][index - before]

    def _alike(self) -> None:
        """What one sample has of what is read, all have: a batch cannot have a label for some."""
        kinds = {self._kind(row): (path, row) for path, rows in self._each() for row in rows}
        if len(kinds) > 1:
            (one, a), (other, b) = list(kinds.values())[:2]
            raise BadData(
                f"{one}/{a.key} and {other}/{b.key} differ in having a label or a mask",
                allowed="samples that all have the same parts",
                do="write the shards again, or give data.path only those that belong together",
            )

    def _kind(self, row: Row) -> tuple[bool, bool]:
        return "label" in self.parts and row.label >= 0, "mask" in self.parts and row.mask >= 0

    def _each(self) -> list[tuple[Path, list[Row]]]:
        return list(zip(self.paths, self._rows, strict=True))

    def _class_names(self) -> list[str]:
        """The lines of `classes.txt`, beside the shards or one folder up; else the numbers themselves."""
        most = max(row.label for rows in self._rows for row in rows)
        for folder in (self.paths[0].parent, self.paths[0].parent.parent):
            listed = folder / "classes.txt"
            if listed.is_file() and listed.stat().st_size < 2**20:
                names = _lines(listed)
                if len(names) > most:
                    return names
        return [str(number) for number in range(most + 1)]


def _lines(listed: Path) -> list[str]:
    try:
        lines = listed.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadData(
            f"{listed} is not UTF-8: {error.reason} at byte {error.start}",
            allowed="the names of the classes, one a line, in UTF-8",
            do="save the file as UTF-8, or remove it",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def shard_paths(root: str | Path) -> list[Path]:
    """The shards that a folder, a file or a pattern stands for, sorted; BadData where there is none."""
    given = Path(root)
    if _RANGE.search(str(root)):
        paths = [Path(name) for name in _expanded(str(root))]
    elif given.is_file():
        paths = [given]
    else:
        folder = existing(given, "the folder of shards")
        paths = [folder / name for name in files(folder, (".tar",))]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise BadData(
            f"{missing[0]} is not there" if missing else f"{root} holds no .tar file",
            allowed="a folder of .tar files, one of them, or a pattern such as train-{000..003}.tar",
            do="check data.path",
        )
    return paths


def _count(ranges: list[tuple[str, str]]) -> float:
    """How many shards; infinitely many where a number has more digits than any file's, and none where one is empty."""
    if max(len(number) for both in ranges for number in both) > 18:
        return math.inf
    return math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges)


def _expanded(pattern: str) -> list[str]:
    parts = _RANGE.split(pattern)
    between, ranges = parts[::3], list(zip(parts[1::3], parts[2::3], strict=True))
    if not 1 <= _count(ranges) <= MOST_SHARDS:
        raise BadData(
            f"the pattern {pattern} counts {', '.join(f'from {first} to {last}' for first, last in ranges)}",
            allowed=f"upwards, at most {MOST_SHARDS:,} shards in all",
            do="correct data.path",
        )
    numbers = [[str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] for first, last in ranges]
    return [
        between[0] + "".join(number + after for number, after in zip(chosen, between[1:], strict=True))
        for chosen in product(*numbers)
    ]


def _bytes(path: Path, start: int, size: int, name: str) -> bytes:
    """A part of a file. Opened anew each time: a handle that processes share would share its position, too."""
    if size > MOST_BYTES:
        raise BadSample(name, f"{size:,} bytes, more than {MOST_BYTES:,}")
    try:
        with open(path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise BadSample(name, error.strerror or type(error).__name__) from error
    if len(content) < size:
        raise BadSample(name, "the shard ends before the sample does")
    return content
