"""An index of shards: one sealed file that is read by offset, with a few numbers for each sample and no object.

The file has the rows of each shard as columns, with a digest for each page of rows; a table of the shards; their names;
and a footer. The seal is the digest of table and names. The table has a digest of each shard's page digests, so that
the seal stands for every number in the file, and through the digests of the samples for every byte of them. The seal is
checked when the file is opened, a page when one of its rows is first used. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.data.file_bytes import FileBytes
from halfstep.data.file_lock import lock_path
from halfstep.data.file_state import FileState
from halfstep.data.image_files import MOST_BYTES
from halfstep.data.node_share import ask_once_per_node
from halfstep.data.shard_rows import LARGEST_LABEL, MASK_PERSON, NONE, PARQUET, Column, ShardRows
from halfstep.data.shard_scan import LONGEST_LABEL, has_sample_after, parse_padded_label, scan_shard
from halfstep.data.tar_members import BLOCK, DamagedTar, TarReader, compute_bytes_digest, open_tar
from halfstep.data.tar_members import FEW as FEW_BYTES
from halfstep.errors import BadData, StorageFailed
from halfstep.files import find_cache_folder, find_draft_target, replace_file, replace_file_unflushed
from halfstep.status_line import OnProgress

PAGE = 512
"""Rows that are sealed and verified together."""
IN_MEMORY = 2**24
"""Bytes of an index that is read into memory as a whole; 600,000 samples have a larger one."""
_FEW = 16
"""Samples below which NumPy takes as long as Python."""
_COMPARED, _MOST_COMPARED = 4, 64
"""Samples of a shard, and shards, that are compared with an index which is older than they are."""
MOST_THREADS = 8
SUFFIX = ".index"
KEEP_DRAFT = 3600
"""Seconds without a write after which a draft is removed: a process of another machine may be writing it."""
KEEP = 30 * 86_400
"""Seconds after which an index in the cache, or the part of an interrupted scan, is removed unless it is used."""
_VERSION = 1
_MAGIC = b"halfstep index 1"
_FOOTER = struct.Struct("<QQQQ32s16s")
_WORD, _LABEL, _DIGEST = (struct.Struct(f"<{code}") for code in "IiQ")
_SEAL = 16
"""Bytes of a digest within the file; the footer has 32."""
_TABLE = np.dtype(
    [("rows", "<u4"), ("kinds", "<u4"), ("at", "<u8"), ("bytes", "<u8"), ("largest", "<i8"), ("digest", f"V{_SEAL}")]
)
SOME_LABELS, SOME_UNLABELED, SOME_MASKS, SOME_UNMASKED = 1, 2, 4, 8
LABEL_BEFORE, LABEL_AFTER, DISTANCE = 16, 32, 256
"""Where every label of a shard lies: some blocks before the image, or after it. The factor of the number of blocks."""
LABEL_COLUMN = 64
"""The labels of a shard lie anywhere, and have a column for it."""
OFFSET, SIZE, LABEL, PLACE, DIGEST = range(5)
"""The columns of every shard."""
_NOTHING = 2**32 - 1
"""The block number of a mask or label that is not there."""


class SampleRow(NamedTuple):
    """What the index has of a sample: offsets and sizes in bytes, -1 for a missing part."""

    shard: int
    image: int
    image_size: int
    label: int
    label_at: int
    mask: int
    mask_size: int
    digest: int


class InvalidIndex(Exception):
    """A file that is no index, or a damaged one."""


@cache
def _list_columns(kinds: int) -> tuple[tuple[struct.Struct, int], ...]:
    """Return the columns of a shard, each with the bytes per sample of those before it."""
    codes = "IIiIQ" + "II" * bool(kinds & SOME_MASKS) + "I" * bool(kinds & LABEL_COLUMN)
    found = [struct.Struct(f"<{code}") for code in codes]
    return tuple((one, sum(before.size for before in found[:number])) for number, one in enumerate(found))


def _compute_row_width(kinds: int) -> int:
    return sum(one.size for one, _ in _list_columns(kinds))


def _compute_seal(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=_SEAL).digest()


class PackedShard(NamedTuple):
    """The rows of a shard as the index has them, and its line of the table."""

    rows: int
    kinds: int
    size: int
    largest: int
    """The largest label."""
    content: bytes

    @property
    def digest(self) -> bytes:
        """The digest of the page digests, and so of all rows."""
        return _compute_seal(self.content[self.rows * _compute_row_width(self.kinds) :])

    def column(self, number: int) -> Column:
        """Return a column."""
        one, before = _list_columns(self.kinds)[number]
        return np.frombuffer(self.content, one.format, self.rows, self.rows * before)


class ShardIndex:
    """An index: the content of its file, and where it is; raises InvalidIndex if it is damaged.

    A small index is read into memory; of a larger one the numbers of a sample are read when they are requested.
    """

    def __init__(self, content: FileBytes | bytes, path: Path | None) -> None:
        self.path = path
        """Where the index is; None for one that could not be kept."""
        self._file = content if isinstance(content, FileBytes) else None
        self._content = b"" if isinstance(content, FileBytes) else content
        self.size = content.size if isinstance(content, FileBytes) else len(content)
        """Bytes of the file."""
        if self.size < _FOOTER.size + len(_MAGIC):
            raise InvalidIndex("it is too short")
        self._footer = self._read(self.size - _FOOTER.size, _FOOTER.size)
        at, shards, names, samples, seal, magic = _FOOTER.unpack(self._footer)
        length = at + shards * _TABLE.itemsize + names + _FOOTER.size
        if not magic == self._read(0, len(_MAGIC)) == _MAGIC or length != self.size:
            raise InvalidIndex("it is truncated, or of another version")
        last = self._read(at, self.size - _FOOTER.size - at)
        if sha256(last).digest() != seal:
            raise InvalidIndex("its checksum is wrong")
        self.seal = seal.hex()
        self.table = np.frombuffer(last, _TABLE, shards)
        self.names = [os.fsdecode(name) for name in last[shards * _TABLE.itemsize :].split(b"\0")]
        rows = self.table["rows"].astype(np.int64)
        # Arrays of Python's: a number of NumPy's takes ten times as long to get at.
        self.ends = array("q", np.cumsum(rows).tobytes())
        """One past the last sample of each shard."""
        self._rows, self._kinds = array("q", rows.tobytes()), array("q", self.table["kinds"].astype(np.int64).tobytes())
        self._at = array("q", self.table["at"].astype(np.int64).tobytes())
        self._pages = array("q", np.cumsum([0, *-(-rows // PAGE)]).tobytes())
        self._is_verified = bytearray(self._pages[-1])
        self._check_table(at, samples)

    def _check_table(self, at: int, samples: int) -> None:
        """Raise InvalidIndex for numbers that no scan gives: a seal only proves that nothing changed after it."""
        table = self.table
        widths = np.array([_compute_row_width(int(kinds)) for kinds in np.unique(table["kinds"])])
        width = widths[np.searchsorted(np.unique(table["kinds"]), table["kinds"])]
        rows = table["rows"].astype(np.int64)
        ends = table["at"].astype(np.int64) + rows * width + -(-rows // PAGE) * _SEAL
        sound = len(self.names) == len(table) and samples == len(self) > 0 and int(rows.min()) > 0
        if not (sound and int(ends.max()) <= at and int(table["largest"].max()) <= LARGEST_LABEL):
            raise InvalidIndex("its table is inconsistent")

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (open_index, (self.path,)) if self.path is not None else (ShardIndex, (self._read(0, self.size), None))

    def _read(self, at: int, size: int) -> bytes:
        return self._content[at : at + size] if self._file is None else self._file.read(at, size)

    def _check_in_place(self) -> None:
        """Raise StorageFailed if another index was written over this one."""
        if self._file is not None and self._read(self.size - _FOOTER.size, _FOOTER.size) != self._footer:
            raise self._file.failed("it is another index now")

    def find(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its number in the shard."""
        shard = bisect_right(self.ends, index)
        if index < 0 or shard == len(self.ends):
            raise IndexError(index)
        return shard, index - self.ends[shard - 1] if shard else index

    def first(self, shard: int) -> int:
        """Return the number of the first sample of a shard."""
        return self.ends[shard - 1] if shard else 0

    def row(self, index: int) -> SampleRow:
        """Return the row of a sample; raise BadData if its page is damaged."""
        shard, number = self.find(index)
        self._check_in_place()
        if not self._is_verified[self._pages[shard] + number // PAGE]:
            self._verify(shard, number // PAGE)
        rows, kinds, at, read = self._rows[shard], self._kinds[shard], self._at[shard] + 4 * number, self._read
        (image,), (size,) = _WORD.unpack(read(at, 4)), _WORD.unpack(read(at + 4 * rows, 4))
        (label,), (digest,) = (
            _LABEL.unpack(read(at + 8 * rows, 4)),
            _DIGEST.unpack(read(at + 16 * rows + 4 * number, 8)),
        )
        image *= BLOCK
        mask, mask_size, label_at = NONE, NONE, NONE
        if kinds & SOME_MASKS:
            (block,) = _WORD.unpack(read(at + 24 * rows, 4))
            if block != _NOTHING:
                mask, (mask_size,) = block * BLOCK, _WORD.unpack(read(at + 28 * rows, 4))
        if label >= 0:
            if kinds & LABEL_COLUMN:
                (block,) = _WORD.unpack(read(at + (_compute_row_width(kinds) - 4) * rows, 4))
                label_at = block * BLOCK
            elif kinds & LABEL_AFTER:
                label_at = image - -size // BLOCK * BLOCK + kinds // DISTANCE * BLOCK
            else:
                label_at = image - kinds // DISTANCE * BLOCK
        return SampleRow(shard, image, size, label, label_at, mask, mask_size, digest)

    def rows(self, numbers: Sequence[int]) -> list[SampleRow]:
        """Return the rows of samples; those of plain sets in memory, with at most a label, without a call for each."""
        is_plain = self._file is None and not (self.table["kinds"] & (SOME_MASKS | LABEL_COLUMN)).any()
        if len(numbers) < _FEW or not is_plain:
            return [self.row(number) for number in numbers]
        index, ends = np.array(numbers), np.frombuffer(self.ends, np.int64)
        if index.min() < 0 or index.max() >= len(self):
            raise IndexError(numbers)
        shard = np.searchsorted(ends, index, "right")
        number = index - np.where(shard > 0, ends[shard - 1], 0)
        of_shards = (self._rows, self._kinds, self._at, self._pages)
        rows, kinds, at, pages = (np.frombuffer(one, np.int64)[shard] for one in of_shards)
        for one in np.flatnonzero(np.frombuffer(self._is_verified, np.uint8)[pages + number // PAGE] == 0):
            self._verify(int(shard[one]), int(number[one]) // PAGE)
        # Every column starts at a multiple of four bytes.
        words, at = np.frombuffer(self._content, "<u4", self.size // 4), at // 4 + number
        image, size, label = (words[at + rows * one].astype(np.int64) for one in (OFFSET, SIZE, LABEL))
        image, label, distance = image * BLOCK, label.astype(np.int32), kinds // DISTANCE * BLOCK
        label_at = image + np.where(kinds & LABEL_AFTER, -(-size // BLOCK) * BLOCK + distance, -distance)
        low, high = (words[at + rows * DIGEST + number + one].astype(np.uint64) for one in (0, 1))
        none, digest = np.full(len(index), NONE), low | high << np.uint64(32)
        columns = (shard, image, size, label, np.where(label >= 0, label_at, NONE), none, none, digest)
        return [SampleRow(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

    def sample(self, shard: int) -> list[SampleRow]:
        """Return a few rows of a shard, from its first sample to its last, without large ones."""
        first, last = self.first(shard), self.ends[shard] - 1
        numbers = sorted({first + (last - first) * one // (_COMPARED - 1) for one in range(_COMPARED)})
        return [row for row in map(self.row, numbers) if max(row.image_size, row.mask_size) <= MOST_BYTES]

    def packed(self, shard: int) -> PackedShard:
        """Return the rows of a shard, every page verified."""
        self._check_in_place()
        rows, kinds, at, size, largest, _ = self.table[shard].item()
        pages = self._pages[shard + 1] - self._pages[shard]
        for page in range(pages):
            self._verify(shard, page)
        content = self._read(at, rows * _compute_row_width(kinds) + pages * _SEAL)
        return PackedShard(rows, kinds, size, largest, content)

    def content(self, shard: int) -> str:
        """Return 32 hex digits that stand for every row of a shard."""
        return bytes(self.table["digest"][shard]).hex()

    def _verify(self, shard: int, page: int) -> None:
        first = self._pages[shard]
        if self._is_verified[first + page]:
            return
        rows, kinds, at, _, _, digest = self.table[shard].item()
        pages = self._read(at + rows * _compute_row_width(kinds), (self._pages[shard + 1] - first) * _SEAL)
        found = _compute_page_digest(lambda start, size: self._read(at + start, size), rows, kinds, page)
        if _compute_seal(pages) != digest or found != pages[page * _SEAL : (page + 1) * _SEAL]:
            first_row, last_row = page * PAGE, min(rows, (page + 1) * PAGE) - 1
            raise BadData(
                f"the index {self.path} is damaged: samples {first_row:,} to {last_row:,} of {self.names[shard]}",
                allowed="an unchanged index",
                do=f"rm {self.path}, and start the same command again",
            )
        self._is_verified[first + page] = 1


def _compute_page_digest(read: Callable[[int, int], bytes], rows: int, kinds: int, page: int) -> bytes:
    """Return the digest of a page of a shard; `read` returns the bytes at an offset in the columns of the shard."""
    found, first = blake2b(digest_size=_SEAL), page * PAGE
    for one, before in _list_columns(kinds):
        found.update(read(rows * before + first * one.size, (min(rows, first + PAGE) - first) * one.size))
    return found.digest()


def open_index(path: Path) -> ShardIndex:
    """Return the index at a path; raise OSError, StorageFailed or InvalidIndex where it cannot be opened."""
    file = FileBytes(path, "the index")
    return ShardIndex(file.read(0, file.size) if file.size <= IN_MEMORY else file, path)


def pack_shard_rows(rows: ShardRows) -> PackedShard:
    """Return the rows as bytes, with a digest for each page."""
    has_label, has_mask = rows.label >= 0, rows.mask >= 0
    kinds = SOME_LABELS * has_label.any() | SOME_UNLABELED * (~has_label).any()
    kinds |= SOME_MASKS * has_mask.any() | SOME_UNMASKED * (~has_mask).any()
    if has_label.any():
        image, size, label_at = rows.image[has_label], rows.image_size[has_label], rows.label_at[has_label]
        before, after = (image - label_at) // BLOCK, (label_at - image) // BLOCK + -size // BLOCK
        for layout, distance in ((LABEL_BEFORE, before), (LABEL_AFTER, after)):
            if 0 < distance[0] < 1000 and (distance == distance[0]).all():
                kinds |= layout | int(distance[0]) * DISTANCE
                break
        else:
            kinds |= LABEL_COLUMN
    columns = [_convert_to_blocks(rows.image), rows.image_size, rows.label, rows.place, rows.digest]
    columns += [_convert_to_blocks(rows.mask), np.where(has_mask, rows.mask_size, 0)] if kinds & SOME_MASKS else []
    columns += [_convert_to_blocks(rows.label_at)] if kinds & LABEL_COLUMN else []
    kinds_of = zip(columns, _list_columns(int(kinds)), strict=True)
    content = b"".join(column.astype(one.format).tobytes() for column, (one, _) in kinds_of)
    numbers = range(-(-len(rows) // PAGE))
    pages = (
        _compute_page_digest(lambda at, size: content[at : at + size], len(rows), int(kinds), page) for page in numbers
    )
    return PackedShard(len(rows), int(kinds), rows.size_of_shard, int(rows.label.max()), b"".join([content, *pages]))


def _convert_to_blocks(offsets: Column) -> Column:
    return np.where(offsets >= 0, offsets // BLOCK, _NOTHING)


# -- building ---------------------------------------------------------------------------------------------------------
# Scan the shards of a set in parallel. The rows of each finished shard are a part file in the cache, so that an
# interrupted scan continues where it was; the parts are joined at the end.


def _read_shard_state(path: Path) -> FileState:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is no file", str(path))
    return FileState.of(status)


def is_row_held(row: SampleRow, read: Callable[[int, int], bytes]) -> bool:
    """Return whether a shard has the image, the mask and the label of a row; `read` returns its bytes at an offset."""
    found = compute_bytes_digest(read(row.image, row.image_size))
    if row.mask >= 0:
        found ^= compute_bytes_digest(read(row.mask, row.mask_size), MASK_PERSON)
    return found == row.digest and (
        row.label < 0 or parse_padded_label(read(row.label_at, LONGEST_LABEL + 1)) == row.label
    )


@dataclass(frozen=True)
class ShardSet:
    """The shards of a set: names below a folder, and the state of each file."""

    root: Path
    names: list[str]
    states: list[FileState]
    unread: list[str]
    """The names of other archives next to the shards."""

    @classmethod
    def of(cls, paths: Sequence[Path], unread: Sequence[str] = ()) -> ShardSet:
        """Return the shards at these paths; raise OSError if one is not there, or is no file."""
        root = Path(os.path.commonpath([path.parent for path in paths]))
        names = [path.relative_to(root).as_posix() for path in paths]
        states = ask_once_per_node([str(root), *names], lambda: [_read_shard_state(path) for path in paths])
        return cls(root, names, [FileState(*state) for state in states], [*unread])

    def key(self, *numbers: int) -> str:
        """Return the cache key of some shards, or of all."""
        # The inode, not the path: a set that is moved within its file system keeps its index. The time of the change,
        # which nobody can set: a shard that was written in place may have its old size and modification time.
        found = blake2b(f"{_VERSION} {self.device}".encode(), digest_size=16)
        for number in numbers or range(len(self.names)):
            facts = (self.names[number], *self.states[number])
            found.update(repr(facts).encode("ascii", "backslashreplace"))
        return found.hexdigest()

    @property
    def device(self) -> int | str:
        """The file system, or the store, in which the state of a shard means this shard."""
        return os.stat(self.root).st_dev

    def scan(self, number: int, is_stopped: Callable[[], bool]) -> ShardRows:
        """Read a shard once; raise BadData if it cannot be used, or changes meanwhile."""
        shard = self.root / self.names[number]
        found = scan_shard(shard, is_stopped)
        if FileState.of(shard.stat()) != self.states[number]:
            raise BadData(
                f"the shard {shard} was modified during indexing",
                allowed="shards that are complete",
                do="start the same command again when the shard is complete",
            )
        return found

    def holds(self, index: ShardIndex, shard: int) -> bool:
        """Return whether a shard has what an index of it says: some samples of a tar, and all of another file."""
        try:
            if self.names[shard].endswith(PARQUET):
                return pack_shard_rows(self.scan(shard, lambda: False)).digest.hex() == index.content(shard)
            last = index.row(index.ends[shard] - 1)
            end = max(last.image + last.image_size, last.mask + last.mask_size, last.label_at + 1)
            with self.open_tar(shard) as tar:
                # A tar is padded: a sample may have been appended without a change of its size.
                return all(is_row_held(row, tar.read) for row in index.sample(shard)) and not has_sample_after(tar, end)
        except (OSError, BadData, DamagedTar):
            return False

    def open_tar(self, shard: int) -> AbstractContextManager[TarReader]:
        """Open a shard for a few reads."""
        return open_tar(self.root / self.names[shard], FEW_BYTES)

    def matches(self, index: ShardIndex) -> bool:
        """Return whether an index has these shards, of these sizes."""
        return index.names == self.names and index.table["bytes"].tolist() == [one.size for one in self.states]


def resolve_cached_index_path(shards: ShardSet) -> Path:
    """Return where the cache has the index of these shards."""
    return find_cache_folder() / "shards" / f"{shards.key()}{SUFFIX}"


def resolve_index_path(root: str | Path, shards: ShardSet) -> Path:
    """Return where `halfstep data index` writes the index of a folder, a file or a pattern."""
    name = "halfstep" if os.path.isdir(root) else Path(root).name
    return shards.root / f"{name}{SUFFIX}"


def open_usable_index(path: Path, shards: ShardSet) -> ShardIndex | None:
    """Return the index at a path; None if it is damaged, missing or of other shards."""
    try:
        index = open_index(path)
    except (OSError, InvalidIndex, StorageFailed):
        return None
    return index if shards.matches(index) else None


def find_index(root: str | Path, shards: ShardSet) -> ShardIndex | None:
    """Return the index of a set that the cache has, or the one next to the shards; None if there is none."""
    if index := open_usable_index(kept := resolve_cached_index_path(shards), shards):
        with suppress(OSError):
            os.utime(kept)  # it is in use
        return index
    path = resolve_index_path(root, shards)
    if (index := open_usable_index(path, shards)) is None:
        return None
    with suppress(OSError):
        if not (newer := find_newer_shards(shards, path.stat().st_mtime_ns)):
            return index
        # A copy of a set has new times in any order. One process of a node compares it, and the others find the copy.
        with lock_path(kept):
            if found := open_usable_index(kept, shards):
                return found
            if not all(shards.holds(index, shard) for shard in newer):
                return None
            with suppress(OSError), replace_file_unflushed(kept) as draft:
                shutil.copyfile(path, draft)
        return open_usable_index(kept, shards) or index
    return None


def find_newer_shards(shards: ShardSet, modified: int) -> list[int]:
    """Return the shards that were written later than an index; of very many, some."""
    # A shard that was written later may have kept its size: a tar is padded.
    newer = [number for number, state in enumerate(shards.states) if state.modified > modified]
    return newer if len(newer) <= _MOST_COMPARED else newer[:: -(-len(newer) // _MOST_COMPARED)]


def build_index(shards: ShardSet, on_progress: OnProgress) -> ShardIndex:
    """Build the index of a set in the cache. One process of a machine builds it, and the others wait for it."""
    kept = resolve_cached_index_path(shards)
    with lock_path(kept):
        if index := open_usable_index(kept, shards):
            return index
        remove_stale_files(kept)
        try:
            with replace_file_unflushed(kept) as draft:
                scan_and_write_index(shards, draft, on_progress)
            return open_index(kept)
        except OSError:  # a full or read-only cache costs time, not the run
            with tempfile.NamedTemporaryFile() as file:
                scan_and_write_index(shards, Path(file.name), on_progress)
                index = open_index(Path(file.name))
                index.path = None
                return index


def write_index(root: str | Path, shards: ShardSet, on_progress: OnProgress) -> ShardIndex:
    """Write the index of a set next to its shards, and return it; raise OSError if it cannot be written.

    Several machines may do so at once: each has its own draft, and they all give the same index.
    """
    path, kept = resolve_index_path(root, shards), resolve_cached_index_path(shards)
    # This machine writes one draft at a time: one that is noted here was left by a killed process.
    note = kept.with_suffix(".draft")
    with lock_path(kept):
        with suppress(OSError):
            path.with_name(os.path.basename(note.read_text("utf-8"))).unlink()
        remove_stale_files(path)
        try:
            with replace_file(path) as draft:
                with suppress(OSError):
                    note.write_text(draft.name, "utf-8")
                if found := open_usable_index(kept, shards):
                    shutil.copyfile(found.path or "", draft)
                else:
                    scan_and_write_index(shards, draft, on_progress)
        except FileNotFoundError:
            # An earlier version on another machine removes every draft in the folder; its index is the same.
            if found := open_usable_index(path, shards):
                return found
            raise
        finally:
            with suppress(OSError):
                note.unlink()
    return open_index(path)


def scan_and_write_index(shards: ShardSet, path: Path, on_progress: OnProgress) -> None:
    """Write the index of these shards; raise BadData if one cannot be used."""
    with closing(_scan_shards(shards, on_progress)) as found:
        write_packed_shards(path, shards.names, found)
    for number in range(len(shards.names)):
        with suppress(OSError):
            _resolve_part_path(shards, number).unlink()


def write_packed_shards(path: Path, names: Sequence[str], shards: Iterable[PackedShard]) -> None:
    """Write the index of packed shards; the same shards give the same file."""
    table = np.zeros(len(names), _TABLE)
    with open(path, "wb") as file:
        file.write(_MAGIC)
        for number, shard in enumerate(shards):
            table[number] = (shard.rows, shard.kinds, file.tell(), shard.size, shard.largest, shard.digest)
            file.write(shard.content)
        at, listed = file.tell(), b"\0".join(os.fsencode(name) for name in names)
        content = table.tobytes() + listed
        samples = int(table["rows"].sum(dtype=np.int64))
        seal = sha256(content).digest()
        file.write(content + _FOOTER.pack(at, len(table), len(listed), samples, seal, _MAGIC))


def _scan_shards(shards: ShardSet, on_progress: OnProgress) -> Generator[PackedShard, None, None]:
    """Yield the rows of each shard; few wait in memory while an earlier one is read."""
    stop, total, done = threading.Event(), sum(state.size for state in shards.states), 0
    # Threads: hashing and reading release the interpreter's lock.
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(shards.names)))
    futures = (pool.submit(_load_or_pack_shard, shards, number, stop) for number in range(len(shards.names)))
    try:
        waiting = deque(islice(futures, 4 * MOST_THREADS))
        while waiting:
            shard = waiting.popleft().result()
            waiting.extend(islice(futures, 1))
            done += shard.size
            on_progress(done // 10**6, total // 10**6)
            yield shard
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _resolve_part_path(shards: ShardSet, number: int) -> Path:
    return find_cache_folder() / "shards" / "parts" / f"{shards.key(number)}.part"


def _load_or_pack_shard(shards: ShardSet, number: int, stop: threading.Event) -> PackedShard:
    part = _resolve_part_path(shards, number)
    # An index of one shard; one that is torn is made anew.
    with suppress(OSError, InvalidIndex, BadData, StorageFailed):
        return open_index(part).packed(0)
    found = pack_shard_rows(shards.scan(number, stop.is_set))
    with suppress(OSError), replace_file_unflushed(part) as draft:
        write_packed_shards(draft, [shards.names[number]], [found])
    return found


def remove_stale_files(path: Path) -> None:
    """Remove old drafts of this file, which killed processes left, and what nothing in the cache used for long."""
    with suppress(OSError):
        drafts = [one for one in path.parent.iterdir() if find_draft_target(one.name) == path.name]
        kept = [one for one in (find_cache_folder() / "shards").rglob("*") if one.is_file()]
        for files, age in ((drafts, KEEP_DRAFT), (kept, KEEP)):
            for one in files:
                with suppress(OSError):
                    if one.stat().st_mtime < time.time() - age:
                        one.unlink()


def find_index_by_seal(seal: str, places: Sequence[Path]) -> ShardIndex | None:
    """Return the index whose seal starts with these digits, of those in the cache and at `places`."""
    with suppress(OSError):
        for path in (*places, *(find_cache_folder() / "shards").glob(f"*{SUFFIX}")):
            with suppress(OSError, InvalidIndex, StorageFailed):
                if (index := open_index(path)).seal.startswith(seal):
                    return index
    return None
