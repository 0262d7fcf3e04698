"""Chunks in the cache that the disk has changed: they are fetched again, and no sample of them is used or lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.data import shards as shards_module
from halfstep.data import store_shards
from halfstep.data.dataset import BadSample
from halfstep.data.sealed_pages import PAGE, DamagedPages, SealedPages, seal_pages
from halfstep.data.shards import OTHER_BYTES, Shards
from halfstep.data.store_shards import StoreShards
from tests.store.conftest import InStore
from tests.store.test_samples import GET, assert_same, trained, uploaded
from tests.support.indexed_task import write_shards
from tests.support.store_proxy import Planned


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("samples") / "set", 2, 60)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    if store_shards._started is not None:
        store_shards._started[1].close()
        store_shards._started = None


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(*places: float) -> Callable[[Path], None]:
    """Flip a bit at shares of a chunk: of its images, its labels, the digests of its pages."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for place in places:
            content[int(place * len(content))] ^= 16
        path.write_bytes(content)

    return damage


def flip_last(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def flip_labels(path: Path) -> None:
    """In each 512 bytes of a tar, the first: the labels, and parts of images."""
    content = bytearray(path.read_bytes())
    for at in range(0, len(content) - 600, 512):
        content[at] ^= 1
    path.write_bytes(content)


def take_neighbor(path: Path) -> None:
    """Take the content of another chunk, as after a wrong repair of a file system."""
    others = sorted(one for one in list_chunks(path.parent) if one != path)
    path.write_bytes(others[0].read_bytes())


DAMAGES: dict[str, Callable[[Path], None]] = {
    "zeros": fill_with_zeros,
    "a bit": flip(0.4),
    "many bits": flip(*(one / 97 for one in range(97))),
    "labels": flip_labels,
    "the seal": flip_last,
    "another chunk": take_neighbor,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(100)) and None,
    "gone": Path.unlink,
    "a folder": make_folder,
}


def list_chunks(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.suffix != ".lock" and not one.name.startswith("."))


def read_all(source: Shards) -> list[tuple[bytes, int]]:
    samples = map(source.read, range(len(source)))
    return [(one["image"].numpy().tobytes(), int(one["label"])) for one in samples]


def count_reads(in_store: InStore) -> int:
    return in_store.proxy.requests("GET", ".tar")


@pytest.fixture
def address(in_store: InStore, local: Path) -> str:
    return uploaded(in_store, local)


VERIFIED: list[Any] = ["all", pytest.param("sampled", marks=pytest.mark.full), "off"]


@pytest.mark.parametrize("verify", VERIFIED)
def test_damaged_chunks_are_fetched_once_more_and_no_sample_is_lost(
    address: str, in_store: InStore, local: Path, tmp_path: Path, verify: Any
) -> None:
    """Every kind of damage to some chunks, found by a process that starts or by one that has read them before."""
    wanted, folder = read_all(Shards(local)), tmp_path / "cache" / "halfstep" / "chunks"
    running = StoreShards(address, verify=verify)
    assert read_all(running) == wanted
    chunks = list_chunks(folder)
    before = {path: path.read_bytes() for path in chunks}
    assert len(chunks) == count_reads(in_store) > 4
    for number, (kind, damage) in enumerate(DAMAGES.items()):
        damaged = chunks[number % 3 :: 3]
        for path in damaged:
            damage(path)
        in_store.proxy.seen.clear()
        assert read_all(running if number % 2 else StoreShards(address, verify=verify)) == wanted, kind
        assert count_reads(in_store) == len(damaged), kind
        assert {path: path.read_bytes() for path in list_chunks(folder)} == before, kind


def test_an_intact_cache_is_not_fetched_again(address: str, in_store: InStore) -> None:
    wanted = read_all(StoreShards(address))
    in_store.proxy.seen.clear()
    assert read_all(StoreShards(address)) == wanted
    assert count_reads(in_store) == 0


@pytest.mark.parametrize("verify", VERIFIED)
def test_a_disk_that_damages_each_chunk_costs_time_and_no_sample(
    address: str, local: Path, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then samples are read from the store, past the cache."""
    wanted, source = read_all(Shards(local))[:3], StoreShards(address, verify=verify)
    real = source.cache.open

    def damaged(name: str) -> int | None:
        if (path := source.cache.folder / name).exists():
            fill_with_zeros(path)
        return real(name)

    monkeypatch.setattr(source.cache, "open", damaged)
    samples = map(source.read, range(3))
    assert [(one["image"].numpy().tobytes(), int(one["label"])) for one in samples] == wanted


def test_bytes_that_the_store_itself_has_changed_are_bad_samples_by_name(address: str, in_store: InStore) -> None:
    """Not the cache is named, and the other samples of the chunk are used."""
    source = StoreShards(address, verify="all")
    in_store.proxy.plan.append(Planned(GET, "wrong-bytes*", ".tar"))
    found: list[str] = []
    for number in range(16):
        try:
            source.read(number)
        except BadSample as bad:
            found.append(f"{bad.name}: {bad.reason}")
    assert 0 < len(found) < 16
    assert all(one.startswith(f"{address}/s-00.tar/") and one.endswith(OTHER_BYTES) for one in found)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["zeros", "labels"])
def test_a_run_with_a_damaged_cache_ends_with_the_same_bits(address: str, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache" / "halfstep" / "chunks"
    assert trained(tmp_path / "a", address, train__steps=20)["code"] == 0
    for path in list_chunks(folder):
        DAMAGES[kind](path)
    after = trained(tmp_path / "b", address, train__steps=20)
    assert (after["code"], after["said"]) == (0, "")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_a_chunk_that_cannot_be_removed_is_read_from_the_store(in_store: InStore, local: Path, tmp_path: Path) -> None:
    source = StoreShards(uploaded(in_store, local))
    wanted = source.read(3)["image"]
    (kept,) = (tmp_path / "cache" / "halfstep" / "chunks").glob("[0-9a-f]*[0-9a-f]")
    make_folder(kept)
    (kept / "a file").touch()
    assert torch.equal(source.read(3)["image"], wanted)


def test_sealed_pages_find_each_flipped_bit() -> None:
    content = os.urandom(2 * PAGE + 77)
    sealed = seal_pages(content, "name")
    handle = os.memfd_create("sealed")

    def read(at: int, count: int, key: str = "name") -> bytes:
        pages = SealedPages(lambda at, size: os.pread(handle, size, at), len(sealed), key)
        assert pages.size == len(content)
        return pages.read(at, count)

    try:
        for at in (0, PAGE - 1, PAGE, 2 * PAGE + 76):
            os.pwrite(handle, sealed, 0)
            for start, count in ((0, 10), (PAGE - 5, 10), (at, 1), (0, len(content))):
                assert read(start, count) == content[start : start + count]
            with pytest.raises(DamagedPages):
                read(0, 1, "other")
            os.pwrite(handle, bytes([sealed[at] ^ 4]), at)
            with pytest.raises(DamagedPages):
                read(at, 1)
        for at in range(len(content), len(sealed)):
            os.pwrite(handle, sealed, 0)
            os.pwrite(handle, bytes([sealed[at] ^ 4]), at)
            with pytest.raises(DamagedPages):
                read(0, 1)
    finally:
        os.close(handle)
