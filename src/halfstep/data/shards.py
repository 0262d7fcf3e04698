"""Read WebDataset shards by number through an index of offsets, so that order and resume work as for folders."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tarfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.data.dataset import BadSample, Files, Sample
from halfstep.data.folders import same_size
from halfstep.data.image_files import MOST_BYTES, SUFFIXES, existing, files
from halfstep.data.image_io import MaskClasses, Palette, mask_of, read_image
from halfstep.errors import BadData
from halfstep.files import cache_folder, write_text

# -- shard index ------------------------------------------------------------------------------------------------------
# Index the samples of a tar file once, and cache the index; nothing is unpacked.


LAYOUT = "a plain, whole .tar of 0001.jpg with 0001.cls, or 0001.jpg with 0001.mask.png"
MOST_MEMBERS = 2_000_000
LARGEST_LABEL = 1_000_000
"""A larger label is a date or an id: the model would have an output for every number below it."""
LARGEST_INDEX = 2**29
"""Bytes; a shard with the maximum of members and keys of usual length needs about half of it."""
MASKS = (".mask.png", ".seg.png")
_LABEL = ".cls"
_NONE = -1
_VERSION = 2


class ShardRow(NamedTuple):
    """A sample: its key, offset and size of image and mask, and its label; -1 for what is missing."""

    key: str
    image: int
    image_size: int
    mask: int
    mask_size: int
    label: int


def index_of(shard: Path) -> list[ShardRow]:
    """Return the samples of a shard in order; raise BadData where it is no tar, or a sample has no image."""
    status = shard.stat()
    # The inode, not the path: a set that is moved within its file system keeps its index.
    facts = (shard.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, _VERSION)
    digest = blake2b(repr(facts).encode("ascii", "backslashreplace"), digest_size=16).hexdigest()
    kept = cache_folder() / "shards" / f"{digest}.json"
    rows = _read(kept)
    if rows is None:
        rows = list(_scanned(shard))
        _keep(kept, rows, shard)
    return rows


def _read(kept: Path) -> list[ShardRow] | None:
    try:
        return _rows(json.loads(kept.read_text(encoding="utf-8"))) if kept.stat().st_size <= LARGEST_INDEX else None
    except (OSError, ValueError):
        return None


def _keep(kept: Path, rows: list[ShardRow], shard: Path) -> None:
    text = json.dumps(_columns(rows))
    if len(text) > LARGEST_INDEX:
        warnings.warn(
            f"the index of {shard} has {len(text):,} bytes, more than {LARGEST_INDEX:,}: it is not kept, and each run "
            "reads the whole shard before it begins; use shorter names in it, or more and smaller shards",
            stacklevel=2,
        )
        return
    with suppress(OSError):  # a full or read-only cache costs time, not the run
        write_text(kept, text)


def _columns(rows: list[ShardRow]) -> dict[str, str]:
    """Return one string per column: a tenth of the JSON size of a list of lists."""
    return {name: "\n".join(str(row[i]) for row in rows) for i, name in enumerate(ShardRow._fields)}


def _rows(columns: Any) -> list[ShardRow] | None:
    try:
        keys, *numbers = (columns[name].split("\n") for name in ShardRow._fields)
        return [ShardRow(key, *map(int, row)) for key, *row in zip(keys, *numbers, strict=True)]
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def scan_tar(shard: Path, allowed: str, note: Callable[[tarfile.TarFile, tarfile.TarInfo], None]) -> None:
    """Call `note` with each file of a plain tar; raise BadData, with what is `allowed`, where it cannot be used."""
    try:
        # "r:" reads plain tar files only: a compressed one has no offsets to seek to.
        with tarfile.open(shard, "r:") as archive:
            for count, member in enumerate(archive):
                if count >= MOST_MEMBERS:
                    raise tarfile.TarError(f"more than {MOST_MEMBERS:,} members")
                if member.isfile():
                    note(archive, member)
                # tarfile keeps every member it has seen: with two million, that is too much memory.
                archive.members = []  # type: ignore[attr-defined]
    # tarfile passes some damaged headers on as ValueError or OverflowError.
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError) as error:
        raise _not_a_shard(shard, str(error) or type(error).__name__, allowed) from error


def read_part(path: Path, start: int, size: int, name: str, what: str = "sample") -> bytes:
    """Read a part of a shard. It is opened each time: a handle shared by processes would share its position."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise BadSample(name, error.strerror or type(error).__name__) from error
    if len(content) < size:
        raise BadSample(name, f"the shard ends before the {what} does")
    return content


def _scanned(shard: Path) -> Iterator[ShardRow]:
    rows: dict[str, dict[str, int]] = {}
    scan_tar(shard, LAYOUT, functools.partial(_note, rows))
    for key, found in rows.items():
        if "image" not in found:
            raise _not_a_shard(shard, f"the sample {key!r} has no image ({', '.join(SUFFIXES)})")
        yield ShardRow(key, *(found.get(name, _NONE) for name in ShardRow._fields[1:]))
    if not rows:
        raise _not_a_shard(shard, "no sample in it")


def _note(rows: dict[str, dict[str, int]], archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Add a member to its sample by WebDataset's convention: the key ends at the first dot of the file name."""
    folder, _, file = member.name.rpartition("/")
    stem, dot, rest = file.partition(".")
    kind = (dot + rest).lower()
    key = f"{folder}/{stem}" if folder else stem
    # The index has one key per line.
    if not stem or "\n" in key:
        return
    found = rows.setdefault(key, {})
    if kind in MASKS:
        found.update(mask=member.offset_data, mask_size=member.size)
    elif kind in SUFFIXES:
        found.update(image=member.offset_data, image_size=member.size)
    elif kind == _LABEL:
        found["label"] = _label(archive, member)


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    # A class number has at most 20 characters: anything longer is not read.
    content = archive.extractfile(member) if 0 < member.size <= 20 else None
    text = content.read().decode("ascii", "replace").strip() if content else ""
    if not text.isdecimal():
        raise tarfile.TarError(f"{member.name} holds no class number")
    if int(text) > LARGEST_LABEL:
        raise tarfile.TarError(f"{member.name} holds the class number {int(text)}, more than {LARGEST_LABEL:,}")
    return int(text)


def _not_a_shard(shard: Path, reason: str, allowed: str = LAYOUT) -> BadData:
    return BadData(
        f"the shard {shard} cannot be used: {reason}",
        allowed=allowed,
        do="write the shard again; unpack it first if it is compressed",
    )


# -- shards -----------------------------------------------------------------------------------------------------------


MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Shards:
    """A source of `image`, and of those `parts` that the shards have: `label`, `mask`.

    `root` is a folder of .tar files, one file, or a pattern such as `train-{000..003}.tar`. Raises BadData where a
    shard cannot be used.
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
        self.channels, self.mask_classes, self.parts = channels, MaskClasses(classes, ignore_index, palette), parts
        self.paths = shard_paths(root)
        self._root = os.path.commonpath([path.parent for path in self.paths])
        self._rows = [index_of(path) for path in self.paths]
        self._ends = list(accumulate(len(rows) for rows in self._rows))
        self._alike()
        self.classes = self._class_names()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample where it cannot be read, BadData where its mask does not fit."""
        path, row = self._at(index)
        name = self.name(index)
        image = read_image(_bytes(path, row.image, row.image_size, name), self.channels, name)
        rest = self.without_image(index)
        if "mask" in rest:
            same_size(image.shape[-2:], rest["mask"].shape, name)
        return {"image": image, **rest}

    def without_image(self, index: int) -> Sample:
        """Return the label or mask."""
        path, row = self._at(index)
        name = self.name(index)
        rest = {}
        if row.label >= 0 and "label" in self.parts:
            rest["label"] = torch.tensor(row.label)
        if row.mask >= 0 and "mask" in self.parts:
            rest["mask"] = mask_of(_bytes(path, row.mask, row.mask_size, name), self.mask_classes, name)
        return rest

    def name(self, index: int) -> str:
        """Return the shard and key for display."""
        path, row = self._at(index)
        return f"{path}/{row.key}"

    def key(self, index: int) -> str:
        """Return the name of the shard and the key."""
        path, row = self._at(index)
        return f"{path.name}/{row.key}"

    def files_of(self, index: int) -> Files:
        """Return the shard."""
        path, _ = self._at(index)
        return [(path.relative_to(self._root).as_posix(), path)]

    def _at(self, index: int) -> tuple[Path, ShardRow]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._ends, index)
        before = self._ends[shard - 1] if shard else 0
        return self.paths[shard], self._rows[shard][index - before]

    def _alike(self) -> None:
        """Raise BadData unless all samples have the same parts: a batch cannot have labels for some."""
        kinds = {
            self._kind(row): (path, row) for path, rows in zip(self.paths, self._rows, strict=True) for row in rows
        }
        if len(kinds) > 1:
            (one, a), (other, b) = list(kinds.values())[:2]
            raise BadData(
                f"{one}/{a.key} and {other}/{b.key} differ in having a label or a mask",
                allowed="samples that all have the same parts",
                do="write the shards again, or give data.path only those that belong together",
            )

    def _kind(self, row: ShardRow) -> tuple[bool, bool]:
        return "label" in self.parts and row.label >= 0, "mask" in self.parts and row.mask >= 0

    def _class_names(self) -> list[str]:
        """Return the lines of `classes.txt` beside the shards or one folder up; else the numbers."""
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
    """Return the sorted shards of a folder, a file or a pattern; raise BadData where there is none."""
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
    """Return the number of shards; infinity where a number is absurdly long, and 0 where a range is empty."""
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
    # The first number's width decides the padding, as in the shell.
    numbers = [[str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] for first, last in ranges]
    return [
        between[0] + "".join(number + after for number, after in zip(chosen, between[1:], strict=True))
        for chosen in product(*numbers)
    ]


def _bytes(path: Path, start: int, size: int, name: str) -> bytes:
    if size > MOST_BYTES:
        raise BadSample(name, f"{size:,} bytes, more than {MOST_BYTES:,}")
    return read_part(path, start, size, name)
