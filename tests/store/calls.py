"""Functions that tests call in the store's process: the process of the tests forks, and must not use obstore."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.data.shard_index import scan_and_write_index
from halfstep.data.store_set import find_shards
from halfstep.errors import StoreFailed
from halfstep.store.address import parse_address
from halfstep.store.failures import MISSING
from halfstep.store.objects import Store
from halfstep.train.remote_generations import DamagedCheckpoint, list_commits, read_commit, read_owner

SIZE = 200_000


def content(size: int, seed: int = 0) -> bytes:
    """Bytes that differ from one another and from those of another seed."""
    block = hashlib.sha256(f"{seed}".encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def _store(request: Mapping[str, Any]) -> Store:
    return Store(parse_address(request["address"], "address"), request.get("patience", 30.0))


def put(request: Mapping[str, Any]) -> None:
    _store(request).put(request["key"], content(request["size"], request.get("seed", 0)))


def put_file(request: Mapping[str, Any]) -> None:
    with io.BytesIO(content(request["size"], request.get("seed", 0))) as file:
        _store(request).put(request["key"], file)


def create(request: Mapping[str, Any]) -> bool:
    return _store(request).create(request["key"], request["text"].encode())


def replace(request: Mapping[str, Any]) -> bool:
    return _store(request).replace(request["key"], request["text"].encode(), request["tag"])


def read(request: Mapping[str, Any]) -> str:
    """The digest of a range."""
    found = _store(request).read(request["key"], request["start"], request["size"], request.get("tag"))
    return hashlib.sha256(found).hexdigest()


def read_replaced(request: Mapping[str, Any]) -> None:
    """Read two ranges of an object that is replaced between them."""
    store = _store(request)
    facts = store.size_and_tag(request["key"])
    assert facts is not None
    store.read(request["key"], 0, 100, facts.tag)
    store.put(request["key"], content(facts.size, 1))
    store.read(request["key"], 100, 100, facts.tag)


def text(request: Mapping[str, Any]) -> str:
    return _store(request).read_whole(request["key"]).decode()


def text_or_nothing(request: Mapping[str, Any]) -> str:
    """An object as text, with all bytes that are none left out."""
    return _store(request).read_whole(request["key"]).decode("ascii", "ignore")


def tag(request: Mapping[str, Any]) -> str | None:
    facts = _store(request).size_and_tag(request["key"])
    return None if facts is None else facts.tag


def keys(request: Mapping[str, Any]) -> list[str]:
    return [one.key for one in _store(request).list(request.get("prefix", ""))]


def delete(request: Mapping[str, Any]) -> None:
    _store(request).delete(request["key"])


def conditions(request: Mapping[str, Any]) -> bool:
    return _store(request).honors_conditions()


def damage(request: Mapping[str, Any]) -> str:
    """Cut, flip or remove an object; return its content before, in hexadecimal digits."""
    store = _store(request)
    before = store.read_whole(request["key"])
    damaged = bytearray(before)
    if request["how"] == "flipped":
        damaged[len(damaged) // 2] ^= 1
    else:
        del damaged[len(damaged) // 2 :]
    if request["how"] == "missing":
        store.delete(request["key"])
    else:
        store.put(request["key"], bytes(damaged))
    return before.hex()


def put_back(request: Mapping[str, Any]) -> None:
    _store(request).put(request["key"], bytes.fromhex(request["content"]))


def commits(request: Mapping[str, Any]) -> list[str]:
    """The committed checkpoints, newest first."""
    store = _store(request)
    return [one.key for one in sorted(list_commits(store, read_owner(store)[0]), reverse=True)]


def audit(request: Mapping[str, Any]) -> dict[str, list[str]]:
    """Compare every byte behind every commit with its digests."""
    store, whole, torn = _store(request), [], []
    for one in list_commits(store, read_owner(store)[0]):
        try:
            commit = read_commit(store, one)
            seals = [(f"{one.key}/{name}", *seal) for name, seal in commit.files.items()]
            seals += [(f"{one.blocks_prefix}/{digest}", size, digest) for size, digest in commit.blocks]
            is_whole = all(_digest(store, key, size) == digest for key, size, digest in seals)
        except DamagedCheckpoint:
            is_whole = False
        except StoreFailed as failure:
            if failure.kind != MISSING:
                raise
            is_whole = False
        (whole if is_whole else torn).append(one.key)
    # Retention may have removed one meanwhile, its commit first: with no commit it is no checkpoint.
    left = {one.key for one in list_commits(store, read_owner(store)[0])} if torn else set()
    return {"whole": whole, "torn": [one for one in torn if one in left]}


def _digest(store: Store, key: str, size: int) -> str:
    facts, digest = store.size_and_tag(key), hashlib.sha256()
    if facts is None or facts.size != size:
        return ""
    for part in store.ranges(key, facts):
        digest.update(part)
    return digest.hexdigest()


def put_path(request: Mapping[str, Any]) -> None:
    with open(request["path"], "rb") as file:
        _store(request).put(request["key"], file)


def index_set(request: Mapping[str, Any]) -> None:
    """Write the index of shards as `halfstep data index` does."""
    shards = find_shards(parse_address(request["address"], "SRC"), request.get("patience", 30.0))
    with tempfile.NamedTemporaryFile() as file:
        scan_and_write_index(shards, Path(file.name), lambda done, of: None)
        shards.store.put(shards.index_name, Path(file.name).read_bytes())


def half_a_reply(request: Mapping[str, Any]) -> None:
    """Be killed in the middle of a reply."""
    pipes = [int(one) for one in os.listdir("/proc/self/fd") if int(one) > 2]
    os.write(next(one for one in pipes if os.readlink(f"/proc/self/fd/{one}").startswith("pipe")), b'{"done": "ha')
    os.kill(os.getpid(), signal.SIGKILL)
