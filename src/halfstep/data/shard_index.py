"""An index of shards: one sealed file that is memory-mapped, with a few numbers for each sample and no object.

The file has the rows of each shard as columns, with a digest for each page of rows; a table of the shards; their names;
and a footer. The seal is the digest of table and names. The table has a digest of each shard's page digests, so that
the seal stands for every number in the file, and through the digests of the samples for every byte of them. The seal is
checked when the file is opened, a page when one of its rows is first used. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from halfstep.data.file_state import FileState
from halfstep.data.shard_scan import LARGEST_LABEL, NONE, Column, ShardRows, scan_shard
from halfstep.data.tar_members import BLOCK
from halfstep.errors import BadData
from halfstep.files import cache_folder, draft_of, renaming, replacing
from halfstep.status_line import OnProgress

PAGE = 512
"""Rows that are sealed and verified together."""
MOST_THREADS = 8
SUFFIX = ".index"
KEEP_INDEXES = 4
"""Indexes of one set in the cache: of its state now, and of earlier ones."""
KEEP_PARTS = 14 * 86_400
"""Seconds after which the part of an interrupted scan is removed."""
_VERSION = 1
_MAGIC = b"halfstep index 1"
_PART_MAGIC = b"halfstep part  1"
_FOOTER = struct.Struct("<QQQQ32s16s")
_SEAL = 16
"""Bytes of a digest within the file; the footer has 32."""
_TABLE = np.dtype(
    [("rows", "<u4"), ("kinds", "<u4"), ("at", "<u8"), ("bytes", "<u8"), ("largest", "<i8"), ("digest", f"V{_SEAL}")]
)
_PART = struct.Struct("<16sQQQqQ")
SOME_LABELS, SOME_UNLABELLED, SOME_MASKS, SOME_UNMASKED = 1, 2, 4, 8
LABEL_BEFORE, LABEL_AFTER, DISTANCE = 16, 32, 256
"""Where every label of a shard lies: some blocks before the image, or after it. The factor of the number of blocks."""
LABEL_COLUMN = 64
"""The labels of a shard lie anywhere, and have a column for it."""
_OFFSET, _SIZE, _LABEL, _PLACE, _DIGEST = range(5)
_USUAL = ("<u4", "<u4", "<i4", "<u4", "<u8")
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


class NoIndex(Exception):
    """A file that is no index, or a damaged one."""


class _Place(NamedTuple):
    """A column of a shard: its type, its bytes per sample, and those of the columns before it."""

    kind: str
    width: int
    before: int


@cache
def _columns(kinds: int) -> tuple[_Place, ...]:
    types = [*_USUAL, *(["<u4", "<u4"] if kinds & SOME_MASKS else []), *(["<u4"] if kinds & LABEL_COLUMN else [])]
    widths = [int(one[-1]) for one in types]
    return tuple(_Place(one, int(one[-1]), sum(widths[:number])) for number, one in enumerate(types))


def _width(kinds: int) -> int:
    return sum(one.width for one in _columns(kinds))


def _seal(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=_SEAL).digest()


class ShardIndex:
    """An open index; raises NoIndex where it is damaged."""

    def __init__(self, file: IO[bytes], path: Path | None) -> None:
        self.path = path
        """Where the index is; None for one that could not be kept."""
        try:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise NoIndex(str(error)) from None
        at, shards, names, samples, seal, magic = self._footer()
        if not magic == self._map[
            : len(_MAGIC)
        ] == _MAGIC or at + shards * _TABLE.itemsize + names + _FOOTER.size != len(self._map):
            raise NoIndex("it is cut off, or of another version")
        content = self._map[at : len(self._map) - _FOOTER.size]
        if sha256(content).digest() != seal:
            raise NoIndex("its seal is broken")
        self.seal = seal.hex()
        self.table = np.frombuffer(content, _TABLE, shards)
        self.names = [os.fsdecode(name) for name in content[shards * _TABLE.itemsize :].split(b"\0")]
        rows = self.table["rows"].astype(np.int64)
        # Arrays of Python's: a number of NumPy's takes ten times as long to get at.
        self.ends = array("q", np.cumsum(rows).tobytes())
        """One past the last sample of each shard."""
        self._rows, self._kinds = array("q", rows.tobytes()), array("q", self.table["kinds"].astype(np.int64).tobytes())
        self._at = array("q", self.table["at"].astype(np.int64).tobytes())
        self._pages = array("q", np.cumsum([0, *-(-rows // PAGE)]).tobytes())
        self._is_verified = bytearray(self._pages[-1])
        self._check_table(at, samples)

    def _footer(self) -> tuple[Any, ...]:
        if len(self._map) < _FOOTER.size + len(_MAGIC):
            raise NoIndex("it is too short")
        return _FOOTER.unpack(self._map[-_FOOTER.size :])

    def _check_table(self, at: int, samples: int) -> None:
        """Raise NoIndex for numbers that no scan gives: a seal only proves that nothing changed since it was made."""
        table = self.table
        widths = np.array([_width(int(kinds)) for kinds in np.unique(table["kinds"])])
        width = widths[np.searchsorted(np.unique(table["kinds"]), table["kinds"])]
        rows = table["rows"].astype(np.int64)
        ends = table["at"].astype(np.int64) + rows * width + -(-rows // PAGE) * _SEAL
        sound = len(self.names) == len(table) and samples == len(self) > 0 and int(rows.min()) > 0
        if not (sound and int(ends.max()) <= at and int(table["largest"].max()) <= LARGEST_LABEL):
            raise NoIndex("its table is impossible")

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (_open, (self.path,)) if self.path is not None else (_from_bytes, (self._map[:],))

    def find(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its number in the shard."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self.ends, index)
        return shard, index - self.first(shard)

    def first(self, shard: int) -> int:
        """Return the number of the first sample of a shard."""
        return self.ends[shard - 1] if shard else 0

    def row(self, index: int) -> SampleRow:
        """Return the row of a sample; raise BadData where its page is damaged."""
        shard, number = self.find(index)
        if not self._is_verified[self._pages[shard] + number // PAGE]:
            self._verify(shard, number // PAGE)
        rows, kinds, at = self._rows[shard], self._kinds[shard], self._at[shard]
        one = [
            _CODES[kind].unpack_from(self._map, at + rows * before + number * width)[0]
            for kind, width, before in _columns(kinds)
        ]
        image, size, label = one[_OFFSET] * BLOCK, one[_SIZE], one[_LABEL]
        mask, mask_size = (one[5], one[6]) if kinds & SOME_MASKS else (_NOTHING, NONE)
        label_at = NONE
        if label >= 0:
            if kinds & LABEL_COLUMN:
                label_at = one[-1] * BLOCK
            else:
                label_at = image - -size // BLOCK * BLOCK if kinds & LABEL_AFTER else image
                label_at += kinds // DISTANCE * BLOCK * (1 if kinds & LABEL_AFTER else -1)
        at = NONE if mask == _NOTHING else mask * BLOCK
        return SampleRow(shard, image, size, label, label_at, at, mask_size if at >= 0 else NONE, one[_DIGEST])

    def column(self, shard: int, number: int) -> Column:
        """Return a column of a shard, every page verified."""
        rows, kinds, at, _, _, _ = self.table[shard].item()
        for page in range(-(-rows // PAGE)):
            self._verify(shard, page)
        kind, _, before = _columns(kinds)[number]
        return np.frombuffer(self._map, kind, rows, at + rows * before)

    def labels(self, shard: int) -> Column:
        """Return the labels of a shard; -1 for none."""
        return self.column(shard, _LABEL)

    def places(self, shard: int) -> Column:
        """Return the positions of the samples of a shard, 32 bits of each."""
        return self.column(shard, _PLACE)

    def digests(self, shard: int) -> Column:
        """Return the digests of the samples of a shard."""
        return self.column(shard, _DIGEST)

    def has_masks(self, shard: int) -> Column:
        """Return which samples of a shard have a mask."""
        kinds, rows = int(self.table["kinds"][shard]), int(self.table["rows"][shard])
        return self.column(shard, 5) != _NOTHING if kinds & SOME_MASKS else np.zeros(rows, bool)

    def start_of_headers(self, shard: int, image: int) -> int:
        """Return a byte of a shard where headers start, at most those of one sample before the image at `image`."""
        offsets = self.column(shard, _OFFSET)
        before = np.flatnonzero(offsets < image // BLOCK)
        if not len(before):
            return 0
        nearest = before[np.argmax(offsets[before])]
        return (int(offsets[nearest]) - -int(self.column(shard, _SIZE)[nearest]) // BLOCK) * BLOCK

    def content(self, shard: int) -> str:
        """Return 32 hex digits that stand for every row of a shard."""
        return bytes(self.table["digest"][shard]).hex()

    def _verify(self, shard: int, page: int) -> None:
        first = self._pages[shard]
        if self._is_verified[first + page]:
            return
        rows, kinds, at, _, _, digest = self.table[shard].item()
        end = at + rows * _width(kinds)
        pages = self._map[end : end + (self._pages[shard + 1] - first) * _SEAL]
        found = _page_digest(memoryview(self._map)[at:end], rows, kinds, page)
        if _seal(pages) != digest or found != pages[page * _SEAL : (page + 1) * _SEAL]:
            first_row, last_row = page * PAGE, min(rows, (page + 1) * PAGE) - 1
            raise BadData(
                f"the index {self.path} is damaged: samples {first_row:,} to {last_row:,} of {self.names[shard]}",
                allowed="an unchanged index",
                do=f"rm {self.path}, and start the same command again",
            )
        self._is_verified[first + page] = 1


_CODES = {"<u4": struct.Struct("<I"), "<i4": struct.Struct("<i"), "<u8": struct.Struct("<Q")}


def _page_digest(content: memoryview | bytes, rows: int, kinds: int, page: int) -> bytes:
    found = blake2b(digest_size=_SEAL)
    for _, width, before in _columns(kinds):
        start = rows * before
        found.update(content[start + page * PAGE * width : start + min(rows, (page + 1) * PAGE) * width])
    return found.digest()


def _open(path: Path) -> ShardIndex:
    with open(path, "rb") as file:
        return ShardIndex(file, path)


def _from_bytes(content: bytes) -> ShardIndex:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return ShardIndex(file, None)


# -- a shard of an index ----------------------------------------------------------------------------------------------


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
        return _seal(self.content[self.rows * _width(self.kinds) :])


def pack(rows: ShardRows) -> PackedShard:
    """Return the rows as bytes, with a digest for each page."""
    has_label, has_mask = rows.label >= 0, rows.mask >= 0
    kinds = SOME_LABELS * has_label.any() | SOME_UNLABELLED * (~has_label).any()
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
    columns = [_blocks(rows.image), rows.image_size, rows.label, rows.place, rows.digest]
    columns += [_blocks(rows.mask), np.where(has_mask, rows.mask_size, 0)] if kinds & SOME_MASKS else []
    columns += [_blocks(rows.label_at)] if kinds & LABEL_COLUMN else []
    types = _columns(int(kinds))
    content = b"".join(column.astype(kind).tobytes() for column, (kind, _, _) in zip(columns, types, strict=True))
    pages = (_page_digest(content, len(rows), int(kinds), page) for page in range(-(-len(rows) // PAGE)))
    return PackedShard(len(rows), int(kinds), rows.size_of_shard, int(rows.label.max()), b"".join([content, *pages]))


def digests_in(shard: PackedShard) -> Column:
    """Return the digests of the samples of a packed shard."""
    return _column_in(shard, _DIGEST)


def labels_in(shard: PackedShard) -> Column:
    """Return the labels of a packed shard."""
    return _column_in(shard, _LABEL)


def _column_in(shard: PackedShard, number: int) -> Column:
    kind, _, before = _columns(shard.kinds)[number]
    return np.frombuffer(shard.content, kind, shard.rows, shard.rows * before)


def _blocks(offsets: Column) -> Column:
    return np.where(offsets >= 0, offsets // BLOCK, _NOTHING)


# -- building ---------------------------------------------------------------------------------------------------------
# Scan the shards of a set in parallel. The rows of each finished shard are a part file in the cache, so that an
# interrupted scan continues where it was; the parts are joined at the end.


class ShardSet(NamedTuple):
    """The shards of a set: names below a folder, and the state of each file."""

    root: Path
    names: list[str]
    states: list[FileState]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> ShardSet:
        """Return the shards at these paths; raise OSError where one is not there."""
        root = Path(os.path.commonpath([path.parent for path in paths]))
        names = [path.relative_to(root).as_posix() for path in paths]
        return cls(root, names, [FileState.of(path.stat()) for path in paths])

    def key(self, shards: Sequence[int] | None = None) -> str:
        """Return the cache key of some shards, or of all."""
        # The inode, not the path: a set that is moved within its file system keeps its index. The time of the change,
        # which nobody can set: a shard that was written in place may have its old size and modification time.
        found = blake2b(f"{_VERSION} {os.stat(self.root).st_dev}".encode(), digest_size=16)
        for number in range(len(self.names)) if shards is None else shards:
            facts = (self.names[number], *self.states[number])
            found.update(repr(facts).encode("ascii", "backslashreplace"))
        return found.hexdigest()

    def matches(self, index: ShardIndex) -> bool:
        """Return whether an index has these shards, of these sizes."""
        return index.names == self.names and index.table["bytes"].tolist() == [one.size for one in self.states]


def cached_path(shards: ShardSet) -> Path:
    """Return where the cache has the index of these shards."""
    return cache_folder() / "shards" / f"{shards.key()}{SUFFIX}"


def beside(root: str | Path, shards: ShardSet) -> Path:
    """Return where `halfstep data index` writes the index of a folder, a file or a pattern."""
    name = "halfstep" if os.path.isdir(root) else Path(root).name
    return shards.root / f"{name}{SUFFIX}"


def usable(path: Path, shards: ShardSet) -> ShardIndex | None:
    """Return the index at a path; None where it is damaged, missing or of other shards."""
    try:
        index = _open(path)
    except (OSError, NoIndex):
        return None
    return index if shards.matches(index) else None


def existing_index(root: str | Path, shards: ShardSet) -> ShardIndex | None:
    """Return the index of a set that the cache has, or the one next to the shards; None where there is none."""
    if index := usable(cached_path(shards), shards):
        return index
    path = beside(root, shards)
    with suppress(OSError):
        # A shard that was written later may have kept its size: a tar is padded.
        if path.stat().st_mtime_ns >= max(state.modified for state in shards.states):
            return usable(path, shards)
    return None


def build_index(shards: ShardSet, on_progress: OnProgress) -> ShardIndex:
    """Build the index of a set in the cache. One process of a machine builds it, and the others wait for it."""
    kept = cached_path(shards)
    with _alone(kept):
        if index := usable(kept, shards):
            return index
        _sweep(kept)
        try:
            with renaming(kept) as draft:
                build(shards, draft, on_progress)
            _forget_older(kept, shards)
        except OSError:  # a full or read-only cache costs time, not the run
            with tempfile.NamedTemporaryFile() as file:
                build(shards, Path(file.name), on_progress)
                return ShardIndex(file.file, None)
    return _open(kept)


def write_index(root: str | Path, shards: ShardSet, on_progress: OnProgress) -> ShardIndex:
    """Write the index of a set next to its shards, and return it; raise OSError where it cannot be written."""
    path = beside(root, shards)
    with _alone(cached_path(shards)), replacing(path) as draft:
        _sweep(path, but=draft)
        if kept := usable(cached_path(shards), shards):
            shutil.copyfile(kept.path or "", draft)
        else:
            build(shards, draft, on_progress)
    return _open(path)


def build(shards: ShardSet, path: Path, on_progress: OnProgress) -> None:
    """Write the index of these shards; raise BadData where one cannot be used."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(shards.names)))
    try:
        write_packed(path, shards.names, _counted(_in_order(pool, shards, stop), shards, on_progress))
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    for number in range(len(shards.names)):
        with suppress(OSError):
            _part_path(shards, number).unlink()


def write_packed(path: Path, names: Sequence[str], shards: Iterable[PackedShard]) -> None:
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


def _counted(found: Iterator[PackedShard], shards: ShardSet, on_progress: OnProgress) -> Iterator[PackedShard]:
    total, done = sum(state.size for state in shards.states), 0
    for shard in found:
        done += shard.size
        on_progress(done // 10**6, total // 10**6)
        yield shard


def _in_order(pool: ThreadPoolExecutor, shards: ShardSet, stop: threading.Event) -> Iterator[PackedShard]:
    """Yield the rows of each shard; few wait in memory while an earlier one is read."""
    # Threads: hashing and reading release the interpreter's lock.
    waiting: deque[Future[PackedShard]] = deque()
    for number in range(len(shards.names)):
        waiting.append(pool.submit(_packed, shards, number, stop))
        if len(waiting) >= 4 * MOST_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _part_path(shards: ShardSet, number: int) -> Path:
    return cache_folder() / "shards" / "parts" / f"{shards.key([number])}.part"


def _packed(shards: ShardSet, number: int, stop: threading.Event) -> PackedShard:
    part = _part_path(shards, number)
    if (found := _read_part(part)) is not None:
        return found
    shard = shards.root / shards.names[number]
    found = pack(scan_shard(shard, stop.is_set))
    if FileState.of(shard.stat()) != shards.states[number]:
        raise BadData(
            f"the shard {shard} was written while it was indexed",
            allowed="shards that are complete",
            do="start the same command again when the shard is complete",
        )
    with suppress(OSError), renaming(part) as draft:
        draft.write_bytes(_part_content(found))
    return found


def _part_content(shard: PackedShard) -> bytes:
    head = _PART.pack(_PART_MAGIC, shard.rows, shard.kinds, shard.size, shard.largest, len(shard.content))
    return head + shard.content + _seal(head + shard.content)


def _read_part(path: Path) -> PackedShard | None:
    """Return the rows of a shard that was scanned before; None where the file is missing or torn."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _PART.size + _SEAL or _seal(content[:-_SEAL]) != content[-_SEAL:]:
        return None
    magic, rows, kinds, size, largest, length = _PART.unpack_from(content)
    if magic != _PART_MAGIC or length != len(content) - _PART.size - _SEAL:
        return None
    return PackedShard(rows, kinds, size, largest, content[_PART.size : -_SEAL])


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of this machine build an index; without a lock where the system or the disk has none."""
    handle, lock = None, path.with_suffix(".lock")
    with suppress(OSError, ImportError):
        import fcntl

        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(handle)


def _sweep(path: Path, but: Path | None = None) -> None:
    """Remove what killed processes left: drafts of this file, and parts that nothing has continued for long."""
    old = time.time() - KEEP_PARTS
    with suppress(OSError):
        drafts = [one for one in path.parent.iterdir() if draft_of(one.name) == path.name and one != but]
        parts = [one for one in (cache_folder() / "shards" / "parts").glob("*.part") if one.stat().st_mtime < old]
        for one in drafts + parts:
            one.unlink()


def _forget_older(path: Path, shards: ShardSet) -> None:
    """Remove all but the newest indexes of shards of these names; by the last one, changed samples are named."""
    same = []
    with suppress(OSError):
        for one in path.parent.glob(f"*{SUFFIX}"):
            with suppress(OSError, NoIndex):
                if _open(one).names == shards.names:
                    same.append((one.stat().st_mtime_ns, one))
        for _, one in sorted(same)[:-KEEP_INDEXES]:
            one.unlink()


def index_with_seal(seal: str, places: Sequence[Path]) -> ShardIndex | None:
    """Return the index whose seal starts with these digits, of those in the cache and at `places`."""
    with suppress(OSError):
        for path in (*places, *(cache_folder() / "shards").glob(f"*{SUFFIX}")):
            with suppress(OSError, NoIndex):
                if (index := _open(path)).seal.startswith(seal):
                    return index
    return None
