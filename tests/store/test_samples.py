"""Samples from an object store: the same as from local files, through a cache that keeps its limit."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from halfstep.data import shard_index, store_shards
from halfstep.data import shards as shards_module
from halfstep.data.chunk_cache import ChunkCache
from halfstep.data.dataset import BadSample, Samples, split_source
from halfstep.data.shard_check import describe_shard_change
from halfstep.data.shards import OTHER_BYTES, Shards
from halfstep.data.store_shards import StoreShards
from halfstep.errors import BadData, BadRecipe, StorageFailed, StoreFailed
from tests.store.conftest import InStore
from tests.support.commands import Command
from tests.support.indexed_task import launched, write_shards
from tests.support.store_proxy import Planned

SHARDS, EACH = 4, 300
GET = "GET"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("samples") / "set", SHARDS, EACH)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Chunks of 16 samples, a cache for each test, and no process left behind."""
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    if store_shards._started is not None:
        store_shards._started[1].close()
        store_shards._started = None


def uploaded(in_store: InStore, local: Path, index: bool = True) -> str:
    for path in sorted(local.glob("*.tar")):
        in_store("put_path", key=path.name, path=str(path))
    if index:
        in_store("index_set")
    in_store.proxy.seen.clear()
    return in_store.address


def trained(folder: Path, path: str | Path, kill_at: int | None = None, **settings: Any) -> dict[str, Any]:
    given = {"data.path": str(path), "data.window": 4, "train.seed": 7, "store.patience": 20.0, "train.steps": 130}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    found = launched(0, str(folder), given, kill_at=kill_at)
    lines = (
        [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()] if found["code"] == 0 else []
    )
    return {**found, "losses": [line["loss"] for line in lines if line["event"] == "step"], "lines": lines}


def assert_same(one: Path, other: Path) -> None:
    left, right = load_file(one / "last.safetensors"), load_file(other / "last.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_run_is_the_same_as_from_local_files(in_store: InStore, local: Path, tmp_path: Path, workers: int) -> None:
    """Ids, losses and weights, over an epoch's end, with a cache that holds a tenth of the set."""
    address = uploaded(in_store, local)
    settings = {"train__num_workers": workers, "run__log_every": 1}
    here = trained(tmp_path / "here", local, **settings)
    there = trained(tmp_path / "there", address, store__cache=0.0004, **settings)
    assert (here["code"], there["code"], there["said"]) == (0, 0, "")
    assert here["ids"] == there["ids"]
    assert len(here["ids"]) == 130
    assert here["losses"] == there["losses"]
    assert len(here["losses"]) == 130
    assert_same(tmp_path / "here", tmp_path / "there")
    assert "obstore" not in sys.modules, "the trainer forks, and must not use it"
    kept = list((tmp_path / "cache" / "halfstep" / "chunks").glob("[0-9a-f]*"))
    assert 0 < sum(path.stat().st_size for path in kept) <= 400_000
    # Each chunk is one range read, fetched once while it is open: not once for each sample.
    assert in_store.proxy.requests(GET, ".tar") < 130 * 8 / 2


@pytest.mark.wording
def test_the_command_builds_the_index_by_ranges_and_prints_the_cost_first(
    in_store: InStore, local: Path, tmp_path: Path
) -> None:
    address = uploaded(in_store, local, index=False)
    with pytest.raises(BadData, match="no index"):
        StoreShards(address)
    in_store.proxy.seen.clear()
    in_store.proxy.plan[:] = [Planned("PUT", "403*")]
    code, out, err = Command("data", "index", address).ended()
    assert (code, "is refused" in err, in_store.proxy.requests(GET, ".tar")) == (74, True, 0), err
    in_store.proxy.plan.clear()
    code, out, err = Command("data", "index", address, "--json").ended()
    assert code == 0, err
    size = sum(path.stat().st_size for path in local.glob("*.tar"))
    assert err.startswith(f"{SHARDS} shards in {address}: {SHARDS} range reads of {size:,} bytes")
    assert in_store.proxy.requests(GET, ".tar") == SHARDS, "the number that was printed"
    assert json.loads(out)["seal"] == Shards(local).index.seal
    source = StoreShards(address)
    assert source.index.seal == json.loads(out)["seal"]
    # A copy of the set has other times; a shard of other samples and the same size makes the index an old one.
    time.sleep(1.1)  # times in a store have seconds
    in_store("put_path", key="s-01.tar", path=str(local / "s-01.tar"))
    assert StoreShards(address).index.seal == source.index.seal
    other = tmp_path / "s-01.tar"
    other.write_bytes((local / "s-01.tar").read_bytes().replace(b"IDAT", b"iDAT"))
    in_store("put_path", key="s-01.tar", path=str(other))
    with pytest.raises(BadData, match=r"older than s-01\.tar"):
        StoreShards(address)


def test_samples_names_and_splits_are_those_of_local_files(in_store: InStore, local: Path, tmp_path: Path) -> None:
    address = uploaded(in_store, local)
    here, there = Shards(local), StoreShards(address)
    for number in (0, 299, 300, 1199):
        one, other = here.read(number), there.read(number)
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])
        assert here.key(number) == there.key(number)
    assert describe_shard_change(there, 1) == ""
    assert there.name(3) == f"{address}/s-00.tar/000003"
    for one, other in zip(split_source(here, 0.1), split_source(there, 0.1), strict=True):
        assert [one.numbers[n] for n in range(len(one))] == [other.numbers[n] for n in range(len(other))]
        assert one.chosen == other.chosen is not None
    train = split_source(there, 0.1)[0]
    assert [train.numbers.index(train.numbers[n]) for n in range(len(train))] == list(range(len(train)))


class Fault(NamedTuple):
    """A fault of the store, and how reading a sample ends: `ok`, `bad` (replaced and named), or a kind (exit 74)."""

    name: str
    plan: tuple[Planned, ...]
    outcome: str
    requests: int
    patience: float = 12.0


TAR = ".tar"
TABLE = [
    Fault("503 once", (Planned(GET, "503", TAR),), "ok", 2),
    Fault("500 once", (Planned(GET, "500", TAR),), "ok", 2),
    Fault("429 once", (Planned(GET, "429", TAR),), "ok", 2),
    Fault("404 once", (Planned(GET, "404", TAR),), "ok", 2),
    Fault("403 once", (Planned(GET, "403", TAR),), "ok", 2),
    Fault("503 for ever", (Planned(GET, "503*", TAR),), "unreachable", 60, 4.0),
    Fault("stall for ever", (Planned(GET, "stall*", TAR),), "unreachable", 20, 4.0),
    Fault("drip for ever", (Planned(GET, "drip*", TAR),), "unreachable", 20, 4.0),
    Fault("reset before the answer", (Planned(GET, "reset", TAR),), "ok", 2),
    Fault("reset in the body", (Planned(GET, "reset-in-body", TAR),), "ok", 2),
    Fault("close in the body", (Planned(GET, "close-in-body", TAR),), "ok", 2),
    Fault("stall in the body", (Planned(GET, "stall-in-body", TAR),), "ok", 2),
    Fault("length lies once", (Planned(GET, "length-lies", TAR),), "ok", 2),
    Fault("length lies for ever", (Planned(GET, "length-lies*", TAR),), "short", 20, 4.0),
    Fault("wrong bytes once", (Planned(GET, "wrong-bytes", TAR),), "ok", 2),
    Fault("wrong bytes for ever", (Planned(GET, "wrong-bytes*", TAR),), "bad", 6),
    Fault("range ignored", (Planned(GET, "whole*", TAR),), "no-ranges", 4, 4.0),
    Fault("object replaced between two ranges", (), "bad", 3),
]
"""The faults of writes meet the upload of the index, and a listing that lags the start: their tests are below."""
IN_CI = ("503 once", "wrong bytes once", "wrong bytes for ever", "object replaced between two ranges")


def cases() -> list[Any]:
    return [
        pytest.param(fault, id=fault.name.replace(" ", "-"), marks=[] if fault.name in IN_CI else pytest.mark.full)
        for fault in TABLE
    ]


@pytest.mark.parametrize("fault", cases())
def test_each_fault_of_a_read_ends_as_stated(in_store: InStore, local: Path, tmp_path: Path, fault: Fault) -> None:
    address = uploaded(in_store, local)
    source, began = StoreShards(address, patience=fault.patience), time.monotonic()
    if not fault.plan:
        source.content(200)
        in_store("put_path", key="s-00.tar", path=str(local / "s-01.tar"))
    in_store.proxy.seen.clear()
    in_store.proxy.plan[:] = fault.plan
    found, reason = [], ""
    # All samples of a chunk: one of them has the wrong byte.
    for number in range(16):
        try:
            found.append((number, source.content(number)))
            outcome = "ok"
        except BadSample as bad:
            outcome, reason = "bad", bad.reason
            if fault.name.startswith("wrong"):
                continue
            break
        except StoreFailed as failure:
            outcome, reason = failure.kind, str(failure)
            break
    outcome = "bad" if outcome == "ok" and len(found) < 16 else outcome
    assert outcome == fault.outcome
    if outcome == "bad":
        assert reason == (OTHER_BYTES if fault.plan else "its shard was replaced or removed")
    elif outcome != "ok":
        assert address in reason, "bucket and key are named"
    assert time.monotonic() - began < 2 * fault.patience + 10.0
    assert 1 <= in_store.proxy.requests(GET, TAR) <= fault.requests
    in_store.proxy.plan.clear()
    truth = Shards(local)
    assert all(content == truth.content(number) for number, content in found), "no wrong byte is read"
    assert len(found) in {"ok": (16,), "bad": (14, 15) if fault.plan else (0,)}.get(outcome, (0,))


@pytest.mark.full
@pytest.mark.parametrize("fault", ["done-then-reset", "done-then-503"])
def test_an_index_whose_answer_is_lost_is_there(in_store: InStore, local: Path, fault: str) -> None:
    address = uploaded(in_store, local, index=False)
    in_store.proxy.plan[:] = [Planned("PUT", fault, ".index")]
    in_store("index_set")
    assert not in_store.proxy.plan
    assert StoreShards(address).index.seal == Shards(local).index.seal


@pytest.mark.wording
def test_a_listing_that_lags_is_no_smaller_set(in_store: InStore, local: Path) -> None:
    address = uploaded(in_store, local)
    in_store.proxy.hidden.add("s-02.tar")
    with pytest.raises(BadData, match="index of other shards"):
        StoreShards(address)


@pytest.mark.wording
def test_what_a_store_cannot_have_is_refused(in_store: InStore, local: Path, tmp_path: Path) -> None:
    address = uploaded(in_store, local)
    with pytest.raises(BadRecipe, match=r"store\.cache"):
        StoreShards(address, cache=0.00001)
    with pytest.raises(BadData, match=r"contains no \.tar"):
        StoreShards(f"{address}/nothing")
    for words in (["data.name=folder"], ["data.name=shards", f"data.path={address}/x?key=y"]):
        command = [
            "train",
            "classification_tiny",
            "--fp32",
            f"data.path={address}",
            *words,
            f"run.dir={tmp_path / 'run'}",
        ]
        code, _, err = Command(*command).ended()
        assert code in (65, 78), (words, err)
        assert "data.path" in err


def test_a_store_that_does_not_answer_is_waited_for_once_for_a_batch() -> None:
    class Down:
        asked = 0

        def __len__(self) -> int:
            return 8

        def read(self, index: int) -> Any:
            self.asked += 1
            raise StoreFailed("s3://bkt/x cannot be reached")

    source = Down()
    items = Samples(source, lambda sample: sample, 0).__getitems__([(0, n) for n in range(8)])  # type: ignore[arg-type]
    assert ([item.error is None for item in items], source.asked) == ([False], 1)


def test_an_index_that_is_in_use_is_no_old_one(in_store: InStore, local: Path, tmp_path: Path) -> None:
    address = uploaded(in_store, local)
    source = StoreShards(address)
    kept = source.index.path
    assert kept is not None
    for work in (lambda: source.announce([(0, 16)], int), lambda: StoreShards(address)):
        os.utime(kept, (0, 0))
        work()
        shard_index.remove_stale_files(tmp_path / "cache" / "halfstep" / "shards" / "other.index")
        assert kept.exists()


def test_an_object_that_cannot_be_listed_is_named_at_once(in_store: InStore, local: Path) -> None:
    address = uploaded(in_store, local)
    bucket, key = address.removeprefix("s3://").split("/")
    target = f"http://127.0.0.1:{in_store.proxy.upstream}/{bucket}/{key}/a//b"
    urllib.request.urlopen(urllib.request.Request(target, b"x", method="PUT")).read()
    with pytest.raises(StoreFailed) as caught:
        StoreShards(address)
    assert caught.value.kind == "odd-key"
    assert in_store.proxy.requests(GET) == 1, "it is not repeated"


# -- the cache --------------------------------------------------------------------------------------------------------


def chunks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[0-9a-f]*"))


@pytest.mark.wording
def test_the_oldest_chunk_goes_and_never_one_that_is_open(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 300)
    for name in ("a1", "b2", "c3"):
        cache.keep(name, name.encode() * 50)
        time.sleep(0.01)
    held = cache.open("a1")
    assert held is not None
    cache.keep("d4", b"d4" * 50)
    assert chunks(tmp_path) == ["a1", "c3", "d4"], "a1 is the oldest, and open"
    time.sleep(0.01)
    assert cache.touch("c3")
    cache.keep("e5", b"e5" * 50)
    assert chunks(tmp_path) == ["a1", "c3", "e5"], "c3 was used last"
    os.close(held)
    (tmp_path / ".f6").write_bytes(b"f" * 900)  # a process was killed here
    cache.keep("f7", b"f7" * 50)
    assert chunks(tmp_path) == ["c3", "e5", "f7"]
    assert not (tmp_path / ".f6").exists()
    with pytest.raises(StorageFailed, match="allowed or free"):
        cache.keep("f8", b"h" * 301)


def test_many_writers_never_exceed_the_limit(tmp_path: Path) -> None:
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            sizes = 0
            for entry in os.scandir(tmp_path):
                try:
                    sizes += 0 if entry.name.endswith(".lock") else entry.stat().st_size
                except FileNotFoundError:
                    continue
            over.extend([sizes] * (sizes > 3000))

    def write(number: int) -> None:
        cache = ChunkCache(tmp_path, 3000)
        for one in range(30):
            cache.keep(f"{number:x}{one:02x}", bytes(1000))
            if (handle := cache.open(f"{number:x}{one:02x}")) is not None:
                assert len(os.pread(handle, 2000, 0)) == 1000
                os.close(handle)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert over == []
    assert len(chunks(tmp_path)) == 3


def test_a_cache_that_this_user_may_only_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ChunkCache(tmp_path, 3000)
    cache.keep("a1", b"a1")
    (tmp_path / "size.lock").write_bytes(bytes(20))  # as after a power cut
    cache.keep("b2", b"b2")
    assert chunks(tmp_path) == ["a1", "b2"]

    def refuse(path: Any) -> None:
        os.stat(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.touch("a1")
    assert not cache.touch("c3")
