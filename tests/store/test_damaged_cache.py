"""Chunks in the cache that the disk has changed: they are fetched again, and no sample of them is used or lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.data import shards as shards_module
from halfstep.data import store_shards
from halfstep.data.sealed_pages import PAGE, DamagedPages, SealedPages, seal_pages
from halfstep.data.store_shards import StoreShards
from tests.store.conftest import InStore
from tests.store.test_samples import uploaded
from tests.support.indexed_task import write_shards


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
