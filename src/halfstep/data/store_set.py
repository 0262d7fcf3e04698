"""Shards in an object store: find them with their index, index them by ranges, and fetch chunks of them. No torch.

The functions with a `request` run in the store's process, or in a data worker.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from halfstep.data.chunk_cache import ChunkCache
from halfstep.data.file_lock import lock_path
from halfstep.data.file_state import FileState
from halfstep.data.sealed_pages import seal_pages
from halfstep.data.shard_index import (
    SUFFIX,
    ShardIndex,
    ShardSet,
    find_newer_shards,
    is_row_held,
    open_index,
    open_usable_index,
    remove_stale_files,
)
from halfstep.data.shard_patterns import expand_shard_pattern, is_shard_pattern
from halfstep.data.shard_rows import ShardRows
from halfstep.data.shard_scan import build_shard_error, list_unread_names, scan_tar
from halfstep.data.tar_members import FEW, DamagedTar, TarReader
from halfstep.errors import BadData
from halfstep.files import find_cache_folder, replace_file_unflushed, replace_storage_errors
from halfstep.store.address import StoreAddress, parse_address
from halfstep.store.objects import PART, ObjectFacts, Store, StoredObject

AT_ONCE = 4
"""Chunks that are fetched at a time."""
TRIES = 3
"""How often a chunk with wrong bytes is read."""
MOST_COMPARED = 8
"""Shards of which some samples are read to judge an index that is older than they are."""
UNSURE = ".unsure"
"""The end of the name of a chunk with wrong bytes: its samples are compared as they are read."""
UNSURE_FOR = 600.0
"""Seconds after which such a chunk is fetched again when it is announced: the cause may have been the network."""


@dataclass(frozen=True)
class StoredShards(ShardSet):
    """The shards of a set in a store."""

    store: Store
    objects: list[StoredObject]
    place: StoreAddress
    """The address that was given."""
    index_name: str
    index: StoredObject | None
    """The index next to the shards, if there is one."""

    @property
    def device(self) -> str:
        """The address."""
        return str(self.store.address)

    @property
    def requests(self) -> int:
        """The range reads that an index of the shards takes."""
        return sum(-(-one.size // PART) for one in self.objects)

    @contextmanager
    def open_tar(self, shard: int) -> Iterator[TarReader]:
        """Open a shard for a few reads."""
        one = self.objects[shard]
        yield TarReader(lambda at, size: self.store.read(one.key, at, min(size, one.size - at), one.tag), one.size, FEW)

    def scan(self, number: int, is_stopped: Callable[[], bool]) -> ShardRows:
        """Read a shard once, range by range; raise BadData if it cannot be used."""
        one = self.objects[number]

        @lru_cache(2)
        def block(at: int) -> bytes:
            return self.store.read(one.key, at, min(PART, one.size - at), one.tag)

        def read_at(at: int, size: int) -> bytes:
            blocks = range(at // PART * PART, min(at + size, one.size), PART)
            start = at - at // PART * PART
            return b"".join(map(block, blocks))[start : start + size]

        try:
            return scan_tar(TarReader(read_at, one.size), posixpath.basename(one.key), is_stopped)
        except DamagedTar as error:
            raise build_shard_error(f"{self.store.address}/{one.key}", str(error)) from None


def find_shards(place: StoreAddress, patience: float) -> StoredShards:
    """Return the shards at an address: those below it, or below `train` where there is one; a .tar, or a pattern.

    Raises BadData if there are none.
    """
    named: list[str] = []
    folder, index_name = place.prefix, f"halfstep{SUFFIX}"
    if is_shard_pattern(place.prefix) or place.prefix.endswith(".tar"):
        named = expand_shard_pattern(place.prefix) if is_shard_pattern(place.prefix) else [place.prefix]
        folder = posixpath.commonpath([posixpath.dirname(name) for name in named])
        index_name = f"{posixpath.basename(place.prefix)}{SUFFIX}"
    store = Store(place._replace(prefix=folder), patience)
    found = {one.key: one for one in store.list()}
    if not named and any(key.startswith("train/") for key in found):
        return find_shards(place._replace(prefix=f"{folder}/train".strip("/")), patience)
    names = [name[len(folder) :].lstrip("/") for name in named]
    names = names or sorted(key for key in found if key.lower().endswith(".tar") and "/." not in f"/{key}")
    missing = [name for name in names if name not in found]
    if missing or not names:
        raise BadData(
            f"{store.address}/{missing[0]} does not exist" if missing else f"{store.address} contains no .tar",
            allowed="an address of .tar shards, of one of them, or a pattern such as train-{000..003}.tar",
            do="check data.path",
        )
    objects = [found[name] for name in names]
    states = [FileState(one.size, int(one.modified.timestamp() * 1e9), _hash_tag(one.tag), 0) for one in objects]
    unread = [] if named else list_unread_names(found, names)
    return StoredShards(Path(), names, states, unread, store, objects, place, index_name, found.get(index_name))


def _hash_tag(tag: str) -> int:
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "little")


def _build_index_error(shards: StoredShards, found: str) -> BadData:
    return BadData(
        f"{shards.store.address} has {found}",
        allowed="shards with an index, which names the bytes of each sample",
        do=f"halfstep data index {shards.place}",
    )


def _download_index(shards: StoredShards) -> Path:
    """Download the index next to the shards, unless the cache has it; raise BadData if there is no usable one."""
    index = shards.index
    if index is None:
        raise _build_index_error(shards, f"no index {shards.index_name}")
    digest = blake2b(f"{shards.key()} {index.tag}".encode(), digest_size=16).hexdigest()
    kept = find_cache_folder() / "shards" / f"{digest}{SUFFIX}"
    room = f"a folder that this user can write, with room for {index.size:,} bytes"
    do = "make room there, or set XDG_CACHE_HOME to another disk"
    with replace_storage_errors(f"the index cannot be stored in {kept.parent}", allowed=room, do=do), lock_path(kept):
        if open_usable_index(kept, shards) is None:
            with replace_file_unflushed(kept) as draft, draft.open("wb") as file:
                for part in shards.store.ranges(index.key, ObjectFacts(index.size, index.tag, index.modified)):
                    file.write(part)
            remove_stale_files(kept)
    if (found := open_usable_index(kept, shards)) is None:
        kept.unlink(missing_ok=True)
        raise BadData(
            f"{shards.store.address}/{index.key} is damaged, or the index of other shards",
            allowed="the index of the shards next to it",
            do=f"halfstep data index {shards.place}",
        )
    # The name of the copy stands for the index and for every shard: once compared, it is not compared again.
    compared = kept.with_suffix(".compared")
    newer = find_newer_shards(shards, int(index.modified.timestamp() * 1e9))
    if newer and not compared.exists():
        some = newer[:: -(-len(newer) // MOST_COMPARED)]
        other = next((one for one in some if not shards.holds(found, one)), None)
        if other is not None:
            kept.unlink(missing_ok=True)
            raise _build_index_error(
                shards, f"an index that is older than {shards.names[other]}, which has other samples"
            )
        with suppress(OSError):
            compared.touch()
    with suppress(OSError):
        os.utime(kept)  # it is in use
    return kept


class StoreRequest(TypedDict):
    """The part of every request that names the store."""

    address: str
    patience: float


class FoundSet(NamedTuple):
    """The reply of `open_set`."""

    address: str
    """Where the shards are."""
    index_path: str
    """The local copy of the index."""
    tags: list[str]
    classes: list[str]
    """The contents of `classes.txt` next to the shards and one folder up, their bytes as latin-1."""
    unread: list[str]
    """The names of other archives next to the shards."""


def open_set(request: StoreRequest) -> FoundSet:
    """Find the shards at an address, and copy their index to this machine."""
    shards = find_shards(parse_address(request["address"], "data.path"), request["patience"])
    path, address = _download_index(shards), shards.store.address
    whole = Store(address._replace(prefix=""), request["patience"])
    first = posixpath.dirname(posixpath.join(address.prefix, shards.names[0]))
    listed = dict.fromkeys(posixpath.join(folder, "classes.txt") for folder in (first, posixpath.dirname(first)))
    texts = [whole.read_whole(key) for key in listed if (facts := whole.size_and_tag(key)) and facts.size < 2**20]
    return FoundSet(
        *(str(address), str(path), [one.tag for one in shards.objects], [one.decode("latin-1") for one in texts]),
        shards.unread,
    )


class Chunk(NamedTuple):
    """A range of a shard, which is read at once."""

    shard: int
    start: int
    size: int
    tag: str
    name: str
    """The name in the cache."""
    samples: list[int]
    """The samples that are whole in it."""


class ChunksRequest(StoreRequest):
    """The request of `fetch_chunks`."""

    index: str
    folder: str
    """The cache."""
    limit: int
    verify: bool
    chunks: list[Any]
    """The fields of each Chunk."""


def fetch_chunks(request: ChunksRequest) -> None:
    """Read chunks into the cache, several at a time; every sample is compared with its digest before."""
    store, index = _open_store(request["address"], request["patience"]), _open_cached_index(request["index"])
    with suppress(OSError):
        os.utime(request["index"])  # it is in use: `remove_stale_files` removes indexes that nothing has used for long
    cache = ChunkCache(Path(request["folder"]), request["limit"])
    chunks = [Chunk(*one) for one in request["chunks"]]
    if len(chunks) == 1:
        _fetch_chunk(store, index, cache, chunks[0], request["verify"])
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda chunk: _fetch_chunk(store, index, cache, chunk, request["verify"]), chunks))


def _fetch_chunk(store: Store, index: ShardIndex, cache: ChunkCache, chunk: Chunk, verify: bool) -> None:
    if cache.touch(chunk.name):
        return
    with lock_path(cache.folder / chunk.name):
        if cache.touch(chunk.name) or cache.is_recent(chunk.name + UNSURE, UNSURE_FOR):
            return
        for _ in range(TRIES if verify else 1):
            content = store.read(index.names[chunk.shard], chunk.start, chunk.size, chunk.tag)
            is_right = not verify or _has_right_digests(memoryview(content), index, chunk)
            if is_right:
                break
        name = chunk.name if is_right else chunk.name + UNSURE
        cache.keep(name, seal_pages(content, name))


def _has_right_digests(content: memoryview, index: ShardIndex, chunk: Chunk) -> bool:
    def read(at: int, size: int) -> bytes:
        return bytes(content[at - chunk.start : at - chunk.start + size])

    return all(is_row_held(index.row(number), read) for number in chunk.samples)


class RangeRequest(StoreRequest):
    """The request of `read_range`."""

    key: str
    start: int
    size: int
    tag: str


def read_range(request: RangeRequest) -> str:
    """Return a few bytes of a shard as latin-1."""
    store = _open_store(request["address"], request["patience"])
    return store.read(request["key"], request["start"], request["size"], request["tag"]).decode("latin-1")


@lru_cache(4)
def _open_store(address: str, patience: float) -> Store:
    return Store(parse_address(address, "data.path"), patience)


@lru_cache(4)
def _open_cached_index(path: str) -> ShardIndex:
    return open_index(Path(path))
