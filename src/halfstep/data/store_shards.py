"""Read shards in an object store: chunks are ranges, kept in a cache on the disk, and fetched ahead.

A process that has used obstore cannot fork: the trainer asks a separate process, and a worker makes its own requests.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from halfstep.data import store_set
from halfstep.data.chunk_cache import ChunkCache
from halfstep.data.dataset import BadSample, Sample, Subset
from halfstep.data.image_files import MOST_BYTES
from halfstep.data.layout import Rule
from halfstep.data.node_share import ask_once_per_node
from halfstep.data.sealed_pages import DamagedPages, SealedPages
from halfstep.data.shard_bytes import Part, merge_near_parts
from halfstep.data.shard_index import SampleRow, open_index
from halfstep.data.shard_rows import ShardRows
from halfstep.data.shard_scan import LONGEST_LABEL, build_shard_error, scan_tar
from halfstep.data.shards import OTHER_BYTES, IndexSubset, SampleBytes, Shards, parse_class_names
from halfstep.data.store_set import UNSURE, Chunk, FoundSet
from halfstep.data.tar_members import AT_ONCE, DamagedTar, TarReader
from halfstep.errors import BadData, BadRecipe, StorageFailed, StoreFailed
from halfstep.files import find_cache_folder
from halfstep.store.address import check_obstore_installed, parse_address
from halfstep.store.failures import CHANGED, MISSING
from halfstep.store.objects import PATIENCE
from halfstep.store.process import LOST, StoreProcess

CACHE = 20.0
"""Gigabytes of chunks on the disk of a node."""
LEAST_CHUNKS = 3
"""Chunks that the cache has room for at least: one that is read, one that is fetched, and one of validation."""
TRIES = 5
SEALED = 1
"""The version of a chunk in the cache."""
_MOST_KNOWN = 512


class StoreShards(Shards):
    """A source of shards at an address such as `s3://BUCKET/PREFIX`, which `halfstep data index` has indexed."""

    usual_window = "auto"
    is_local = False
    near = 2**20

    def __init__(
        self, root: str, *given: Any, patience: float = PATIENCE, cache: float = CACHE, **options: Any
    ) -> None:
        self.patience = patience
        self.cache = ChunkCache(find_cache_folder() / "chunks", int(cache * 1e9))
        super().__init__(root, *given, **options)

    def _open(self, root: str | Path) -> None:
        check_obstore_installed()
        self.address = str(parse_address(str(root), "data.path"))
        found = FoundSet(*ask_once_per_node(self.address, lambda: self._ask("open_set")))
        self.unread = found.unread
        self.address, self._tags, self._listed = found.address, found.tags, found.classes
        self.index = open_index(Path(found.index_path))
        self.root = Path(found.index_path).parent
        self._sides: list[Sequence[int]] = [range(len(self.index))]
        """The numbers of the samples that are read together: all of them, or those of training and of validation."""
        self._known: dict[tuple[int, int], list[Chunk]] = {}
        self._forgotten: set[str] = set()
        """The chunks that were fetched once more since a sample of them was unusable."""
        self._per_group, self._largest = self.chunk, 2 * self.chunk * self.bytes_per_sample
        """Samples that are read together, and bytes of a range: a few samples in it are those of the other side."""
        needed = LEAST_CHUNKS * self.chunk * self.bytes_per_sample
        if self.cache.limit < needed:
            raise BadRecipe(
                f"store.cache={self.cache.limit / 1e9:g}, but {LEAST_CHUNKS} chunks take {needed:,} bytes",
                allowed=f"store.cache of at least {needed / 1e9:.2g} (gigabytes)",
                do=f"write store.cache={max(1.0, needed / 1e9):.2g}",
            )

    def _ask(self, function: str, **more: Any) -> Any:
        """Return the result of a function of `store_set`."""
        request = {"address": self.address, "patience": self.patience, **more}
        if get_worker_info() is not None:
            return getattr(store_set, function)(request)
        try:
            return _ensure_store_process().call(f"{store_set.__name__}:{function}", request)
        except StoreFailed as failure:
            if failure.kind == LOST:  # it was killed, and the next call starts another one
                return _ensure_store_process().call(f"{store_set.__name__}:{function}", request)
            kind = {BadData.id: BadData, StorageFailed.id: StorageFailed}.get(failure.kind)
            raise kind(failure.given, allowed=failure.allowed, do=failure.do) if kind else failure from None

    def _class_lists(self) -> Iterator[list[str]]:
        for text in self._listed:
            yield parse_class_names(text.encode("latin-1"), f"{self.address}: classes.txt")

    # -- chunks -------------------------------------------------------------------------------------------------------

    def most_open(self, nodes: int, ranks: int) -> int:
        """Return the bytes of chunks that may be open at once: half of the cache, since the next ones are fetched."""
        # Digests, parts of chunks at the ends of lanes, and chunks of validation take the rest.
        return self.cache.room() * 49 // 100 * nodes

    def divide(self, fraction: float, rule: Rule) -> tuple[Subset, Subset]:
        """Return the samples for training, and those for validation."""
        both = super().divide(fraction, rule)
        if isinstance(both[0], IndexSubset):
            self._sides = [side.numbers for side in both]
        return both

    def announce(self, chunks: Sequence[tuple[int, int]], number: Callable[[int], int]) -> None:
        """Fetch the chunks of an order."""
        found: dict[str, Chunk] = {}
        for first, stop in chunks:
            (side, begin), (_, end) = self._place(number(first)), self._place(number(stop - 1))
            found |= {one.name: one for at in range(begin, end + 1) for one in self._chunks(side, at)}
        self._fetch(list(found.values()))

    def _fetch(self, chunks: list[Chunk]) -> None:
        options = {"folder": str(self.cache.folder), "limit": self.cache.limit, "verify": self._verify_every > 0}
        self._ask("fetch_chunks", index=str(self.index.path), chunks=chunks, **options)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the side of a sample, and the number of its group there."""
        for side, numbers in enumerate(self._sides):
            try:
                return side, numbers.index(index) // self._per_group
            except ValueError:
                continue
        raise IndexError(index)

    def _chunks(self, side: int, group: int) -> list[Chunk]:
        """Return the chunks of a group of samples: one, unless they are in two shards or far apart."""
        if (side, group) not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            numbers = self._sides[side][group * self._per_group : (group + 1) * self._per_group]
            self._known[side, group] = self._chunks_of({n: self.index.row(n) for n in numbers})
        return self._known[side, group]

    def _chunks_of(self, rows: dict[int, SampleRow]) -> list[Chunk]:
        by_shard: dict[int, dict[int, list[Part]]] = {}
        for number, row in rows.items():
            # Also the parts that are not used: the digest stands for all.
            every = [(row.image, row.image_size), (row.label_at, LONGEST_LABEL + 1), (row.mask, row.mask_size)]
            by_shard.setdefault(row.shard, {})[number] = [(at, size) for at, size in every if at >= 0]
        found = []
        for shard, parts in by_shard.items():
            small = (one for ones in parts.values() for one in ones if one[1] <= MOST_BYTES)
            for start, size in merge_near_parts(small, self.near, self._largest):
                inside = [n for n, ones in parts.items() if all(_is_within_range(one, start, size) for one in ones)]
                first = self.index.first(shard)
                sealed = (SEALED, self._verify_every > 0)  # those of earlier versions have no digests
                facts = (self.index.content(shard), start, size, sealed, [n - first for n in inside])
                name = blake2b(repr(facts).encode(), digest_size=16).hexdigest()
                found.append(Chunk(shard, start, size, self._tags[shard], name, inside))
        return found

    # -- samples ------------------------------------------------------------------------------------------------------

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read nothing: chunks are kept."""
        return iter(())

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample if it cannot be read, BadData where its mask does not fit."""
        return self._read_twice(index, super().read)

    def without_image(self, index: int) -> Sample:
        """Return the label or mask."""
        return self._read_twice(index, super().without_image)

    def _read_twice(self, index: int, read: Callable[[int], Sample]) -> Sample:
        """Read a sample; where it is unusable and its chunk was not compared with the index, fetch that once more."""
        try:
            return read(index)
        except (BadSample, BadData):
            if self._verify_every or not self._forget_chunks(index):
                raise
        return read(index)

    def _forget_chunks(self, index: int) -> bool:
        """Remove the chunks of a sample from the cache; return False if this process has removed them before."""
        names = {one.name for one in self._chunks(*self._place(index))} - self._forgotten
        self._forgotten |= names
        for name in names:
            if (handle := self.cache.open(name)) is not None:
                self.cache.remove(name, handle)
                os.close(handle)
        return bool(names)

    def _content(self, index: int, row: SampleRow, wanted: tuple[bool, bool, bool], doubts: list[str]) -> SampleBytes:
        self._check_sizes(index, row, wanted)
        parts = [(row.image, row.image_size), (row.label_at, LONGEST_LABEL + 1), (row.mask, row.mask_size)]
        try:
            found = [
                self._bytes(index, row, part, doubts) if use else None for part, use in zip(parts, wanted, strict=True)
            ]
        except StoreFailed as failure:
            if failure.kind in (CHANGED, MISSING):
                raise BadSample(self.name(index), "its shard was replaced or removed") from None
            raise
        return SampleBytes(*found)

    def _bytes(self, index: int, row: SampleRow, part: Part, doubts: list[str]) -> bytes:
        chunks = self._chunks(*self._place(index))
        chunk = next(one for one in chunks if one.shard == row.shard and _is_within_range(part, one.start, one.size))
        if self._verify_every and index not in chunk.samples:
            doubts.append(OTHER_BYTES)
        for _ in range(TRIES):
            for name in (chunk.name, chunk.name + UNSURE):
                if (handle := self.cache.open(name)) is None:
                    continue
                try:
                    sealed = SealedPages(partial(_read_at, handle), os.fstat(handle).st_size, name)
                    content = sealed.read(part[0] - chunk.start, part[1])
                    doubts += [OTHER_BYTES] * name.endswith(UNSURE)
                    return content
                except (DamagedPages, OSError):  # the disk has other bytes, or cannot read them
                    self.cache.remove(name, handle)
                finally:
                    os.close(handle)
            self._fetch([chunk])
        return self._read_range(row.shard, *part)

    def _read_range(self, shard: int, at: int, size: int) -> bytes:
        """Return bytes of a shard, past the cache."""
        found = self._ask("read_range", key=self.index.names[shard], start=at, size=size, tag=self._tags[shard])
        return bytes(found.encode("latin-1"))

    @contextmanager
    def _tar(self, shard: int, at_once: int) -> Iterator[TarReader]:
        size = int(self.index.table["bytes"][shard])

        def read_at(at: int, count: int) -> bytes:
            try:
                return self._read_range(shard, at, min(count, size - at))
            except StoreFailed as failure:
                raise OSError(failure.given) from None

        yield TarReader(read_at, size, at_once)

    def scan(self, shard: int, is_stopped: Callable[[], bool]) -> ShardRows:
        """Read a shard whole; raise BadData if it cannot be used."""
        try:
            with self._tar(shard, AT_ONCE) as tar:
                return scan_tar(tar, posixpath.basename(self.index.names[shard]), is_stopped)
        except (OSError, DamagedTar) as error:
            raise build_shard_error(self.where(shard), str(error)) from None

    @property
    def place(self) -> str:
        """The address of the shards."""
        return self.address

    def where(self, shard: int) -> str:
        """Return the address of a shard."""
        return f"{self.address}/{self.index.names[shard]}"


def _read_at(handle: int, at: int, size: int) -> bytes:
    return os.pread(handle, size, at)


def _is_within_range(part: Part, start: int, size: int) -> bool:
    return start <= part[0] and part[0] + part[1] <= start + size


_started: tuple[tuple[int, int], StoreProcess] | None = None


def _ensure_store_process() -> StoreProcess:
    """Return the process for requests of this one; another one where the credentials in the environment changed."""
    global _started
    now = os.getpid(), hash(frozenset(os.environ.items()))
    if _started is None or _started[0] != now:
        if _started is not None and _started[0][0] == now[0]:
            _started[1].close()
        _started = now, StoreProcess()
    return _started[1]
