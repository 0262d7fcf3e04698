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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

import torch

from halfstep.data.dataset import BadSample, Files, Sample
from halfstep.data.file_state import FileState, RecordedFile, block_starts, change_since, content_digest
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
_VERSION = 3
_LONGEST_LABEL = 20
"""Bytes of a label's file: anything longer is no class number, and is not read."""
_NEAR = 4096
"""Bytes between the parts of a sample, such as tar headers, that are read along with them."""


class ShardRow(NamedTuple):
    """A sample: its key, offset and size of image, mask and label, and its label; -1 for what is missing."""

    key: str
    image: int
    image_size: int
    mask: int
    mask_size: int
    label_at: int
    label_size: int
    label: int


class ShardFile:
    """A shard whose offsets are known; each read compares the file with the one that was scanned."""

    def __init__(self, path: Path, file: RecordedFile) -> None:
        self.path, self._file = path, file

    def read(self, parts: Sequence[tuple[int, int]], name: str, what: str = "sample") -> list[bytes]:
        """Read parts by offset and size; raise BadSample where they cannot be read, or the shard is another one."""
        try:
            # Opened each time: a handle shared by processes would share its position.
            with open(self.path, "rb", buffering=0) as file:
                self._refuse_changed(FileState.of(os.fstat(file.fileno())), name)
                return _read_parts(file.fileno(), parts)
        except OSError as error:
            raise BadSample(name, error.strerror or type(error).__name__) from error
        except EOFError:
            raise BadSample(name, f"the shard ends before the {what} does") from None

    def _refuse_changed(self, now: FileState, name: str) -> None:
        if now == self._file.state:
            return
        if change := change_since(self._file, now, self.path):
            raise BadSample(name, change.replace("its file", "its shard"))
        # Its content was compared, which need not be done again.
        self._file = self._file._replace(state=now)


class IndexedShard(ShardFile):
    """A shard with the index of its samples."""

    def __init__(self, path: Path, file: RecordedFile, rows: list[ShardRow]) -> None:
        super().__init__(path, file)
        self.rows = rows


def _read_parts(handle: int, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    """Read parts of a file, in one go where they lie side by side; raise EOFError where it ends before."""
    first, end = min(start for start, _ in parts), max(start + size for start, size in parts)
    if end - first <= sum(size for _, size in parts) + _NEAR:
        content = os.pread(handle, end - first, first)
        found = [content[start - first : start - first + size] for start, size in parts]
    else:
        found = [os.pread(handle, size, start) for start, size in parts]
    if any(len(part) < size for part, (_, size) in zip(found, parts, strict=True)):
        raise EOFError
    return found


def recorded(shard: Path) -> RecordedFile:
    """Return the state of a shard, with a digest of a few of its blocks; raise BadData where it cannot be read."""
    try:
        state = FileState.of(shard.stat())
        return RecordedFile(state, content_digest(shard, block_starts(state.size, whole=False)), whole=False)
    except OSError as error:
        raise _not_a_shard(shard, error.strerror or type(error).__name__) from error


def index_of(shard: Path) -> IndexedShard:
    """Return the samples of a shard in order; raise BadData where it is no tar, or a sample has no image."""
    status = shard.stat()
    state = FileState.of(status)
    # The inode, not the path: a set that is moved within its file system keeps its index. The time of the change, which
    # nobody can set: a shard that was written in place may have its old size and modification time.
    facts = (shard.name, status.st_dev, *state, _VERSION)
    digest = blake2b(repr(facts).encode("ascii", "backslashreplace"), digest_size=16).hexdigest()
    kept = cache_folder() / "shards" / f"{digest}.json"
    found = _read(kept, state)
    if found is None:
        file = recorded(shard)
        rows = list(_scanned(shard))
        _keep(kept, rows, file.content, shard)
        return IndexedShard(shard, file, rows)
    rows, content = found
    return IndexedShard(shard, RecordedFile(state, content, whole=False), rows)


def _read(kept: Path, state: FileState) -> tuple[list[ShardRow], str] | None:
    """Return a cached index, and the digest of the shard's content; None where it is not one that was written here."""
    try:
        columns = json.loads(kept.read_text(encoding="utf-8")) if kept.stat().st_size <= LARGEST_INDEX else {}
        if columns.pop("digest") != _digest(columns):
            return None
        rows = _rows(columns)
        return (rows, columns["content"]) if all(_is_possible(row, state.size) for row in rows) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _digest(columns: Mapping[str, str]) -> str:
    text = json.dumps(columns, sort_keys=True)
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def _is_possible(row: ShardRow, size: int) -> bool:
    """Return whether a shard of so many bytes can hold a sample: an index is a file that others may write."""
    parts = ((row.image, row.image_size), (row.mask, row.mask_size), (row.label_at, row.label_size))
    inside = all((at, length) == (_NONE, _NONE) or (at >= 0 <= length and at + length <= size) for at, length in parts)
    return inside and row.image >= 0 and _NONE <= row.label <= LARGEST_LABEL


def _keep(kept: Path, rows: list[ShardRow], content: str, shard: Path) -> None:
    columns = _columns(rows) | {"content": content}
    text = json.dumps(columns | {"digest": _digest(columns)})
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


def _rows(columns: Mapping[str, str]) -> list[ShardRow]:
    keys, *numbers = (columns[name].split("\n") for name in ShardRow._fields)
    return [ShardRow(key, *map(int, row)) for key, *row in zip(keys, *numbers, strict=True)]


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
        content = archive.extractfile(member) if 0 < member.size <= _LONGEST_LABEL else None
        label = _label(content.read() if content else b"", member.name)
        found.update(label=label, label_at=member.offset_data, label_size=member.size)


def _label(content: bytes, name: str) -> int:
    text = content.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise tarfile.TarError(f"{name} holds no class number")
    if int(text) > LARGEST_LABEL:
        raise tarfile.TarError(f"{name} holds the class number {int(text)}, more than {LARGEST_LABEL:,}")
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

    notices_changes = True

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
        self._shards = [index_of(path) for path in self.paths]
        self._ends = list(accumulate(len(shard.rows) for shard in self._shards))
        self._alike()
        self.classes = self._class_names()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample where it cannot be read, BadData where its mask does not fit."""
        _, row = self._at(index)
        image, rest = self._read(index, (row.image, row.image_size))
        found = read_image(image, self.channels, self.name(index))
        if "mask" in rest:
            same_size(found.shape[-2:], rest["mask"].shape, self.name(index))
        return {"image": found, **rest}

    def without_image(self, index: int) -> Sample:
        """Return the label or mask."""
        return self._read(index)[1]

    def _read(self, index: int, image: tuple[int, int] | None = None) -> tuple[bytes, Sample]:
        """Read the bytes of the image, if it is asked for, and the label or mask, from the shard at once."""
        shard, row = self._at(index)
        name = self.name(index)
        has_label, has_mask = self._kind(row)
        parts = [image] if image else []
        parts += [(row.label_at, row.label_size)] * has_label + [(row.mask, row.mask_size)] * has_mask
        if not parts:
            return b"", {}
        if (size := max(size for _, size in parts)) > MOST_BYTES:
            raise BadSample(name, f"{size:,} bytes, more than {MOST_BYTES:,}")
        content = shard.read(parts, name)
        picture = content.pop(0) if image else b""
        rest = {}
        if has_label:
            rest["label"] = torch.tensor(_checked_label(content.pop(0), row, name))
        if has_mask:
            rest["mask"] = mask_of(content.pop(0), self.mask_classes, name)
        return picture, rest

    def name(self, index: int) -> str:
        """Return the shard and key for display."""
        shard, row = self._at(index)
        return f"{shard.path}/{row.key}"

    def key(self, index: int) -> str:
        """Return the name of the shard and the key."""
        shard, row = self._at(index)
        return f"{shard.path.name}/{row.key}"

    def files_of(self, index: int) -> Files:
        """Return the shard."""
        shard, _ = self._at(index)
        return [(shard.path.relative_to(self._root).as_posix(), shard.path)]

    def _at(self, index: int) -> tuple[IndexedShard, ShardRow]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._shards[number], self._shards[number].rows[index - before]

    def _alike(self) -> None:
        """Raise BadData unless all samples have the same parts: a batch cannot have labels for some."""
        kinds = {self._kind(row): (shard.path, row) for shard in self._shards for row in shard.rows}
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
        most = max(row.label for shard in self._shards for row in shard.rows)
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


def _checked_label(content: bytes, row: ShardRow, name: str) -> int:
    """Return the label that the shard holds; raise BadData where its index has another."""
    try:
        label = _label(content, name)
    except tarfile.TarError:
        label = _NONE
    if label != row.label:
        raise BadData(
            f"{name} has the label {label if label >= 0 else content!r} in its shard, and {row.label} in the cached "
            "index of it: the shard was written again, and kept its size and times",
            allowed="shards that do not change after they were indexed",
            do=f"rm -r {cache_folder() / 'shards'}, and start the same command again",
        )
    return label
