"""An index that another program replaces or truncates during a run, copies to another folder, or writes at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from halfstep.data import shard_index
from halfstep.data.dataset import split_source
from halfstep.data.held_out import ShareBits
from halfstep.data.shard_index import ShardIndex, find_index, open_index, write_index
from halfstep.data.shards import Shards, build_shard_set
from halfstep.errors import StorageFailed
from halfstep.files import find_cache_folder
from tests.data.test_shard_index import opened_shards, silent, small

EACH = 700
"""Samples of a shard, in two pages of its index."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets with their indexes; the samples of `other` have other numbers."""
    root = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        for name, begin in (("set", 0), ("other", 5000)):
            for n in range(3):
                small(root / name / f"{n}.tar", EACH, begin + n * EACH)
            write_index(root / name, build_shard_set(root / name), silent)
    return root


@pytest.fixture
def path(sets: Path, tmp_path: Path) -> Path:
    """The index of a set that a test may change."""
    shutil.copytree(sets / "set", tmp_path / "set")
    return tmp_path / "set" / "halfstep.index"


@pytest.fixture
def other(sets: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(sets / "other" / "halfstep.index", tmp_path / "other.index"))


@pytest.fixture(params=["in memory", "by offset"])
def index(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardIndex:
    if request.param == "by offset":
        monkeypatch.setattr(shard_index, "IN_MEMORY", 0)
    return open_index(path)


def test_rows_are_the_same_in_memory_and_by_offset(index: ShardIndex, path: Path) -> None:
    whole = ShardIndex(path.read_bytes(), None)
    numbers = [3 * EACH - 1, 0, 511, 512, EACH - 1, EACH, *range(1000, 1040)]
    assert index.rows(numbers) == whole.rows(numbers) == [index.row(number) for number in numbers]
    assert [index.packed(shard) for shard in range(3)] == [whole.packed(shard) for shard in range(3)]


@pytest.mark.parametrize("size", [0, 100, 10_000])
def test_a_truncated_index_is_an_error_with_its_name_and_no_signal(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_index, "IN_MEMORY", 0)
    index = open_index(path)
    index.row(5)
    os.truncate(path, size)
    for work in (lambda: index.row(5), lambda: index.row(3 * EACH - 1), lambda: index.packed(0)):
        with pytest.raises(StorageFailed) as caught:
            work()
        assert (caught.value.exit_code, str(path) in caught.value.given) == (74, True)


def test_an_index_written_over_it_is_noticed_before_a_row_of_it_is_used(
    path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_index = open_index(path)
    monkeypatch.setattr(shard_index, "IN_MEMORY", 0)
    large = open_index(path)
    wanted = large.row(3)
    assert path.stat().st_size == other.stat().st_size
    shutil.copyfile(other, path)  # the same inode
    for work in (lambda: large.row(3), lambda: large.rows(list(range(64))), lambda: large.packed(1)):
        with pytest.raises(StorageFailed) as caught:
            work()
        assert str(path) in str(caught.value)
    assert small_index.row(3) == wanted, "a small one is in memory"


def test_an_index_replaced_by_a_rename_stays_in_use(index: ShardIndex, path: Path, other: Path) -> None:
    wanted = index.row(3)
    os.replace(other, path)
    assert index.row(3) == wanted


def test_a_share_that_is_truncated_is_an_error(path: Path) -> None:
    split_source(Shards(path.parent), 0.1)
    (kept,) = path.parent.glob("*.val-0.1")
    train, held_out = split_source(Shards(path.parent), 0.1)
    numbers = [train.index_in_source(n) for n in range(len(train))]
    assert sorted(numbers + [held_out.index_in_source(n) for n in range(len(held_out))]) == list(range(3 * EACH))
    os.truncate(kept, 10)
    with pytest.raises(StorageFailed, match="share for validation"):
        train.index_in_source(0)
    assert np.array_equal(ShareBits(bytes([5] + [0] * 511) + bytes(16)).block(0)[:4], [1, 0, 1, 0])


# -- copies of a set --------------------------------------------------------------------------------------------------


def copied(root: Path, to: Path, order: list[str]) -> None:
    to.mkdir()
    for place, name in enumerate(order):
        shutil.copyfile(root / name, to / name)
        os.utime(to / name, (1_700_000_000 + place, 1_700_000_000 + place))


@pytest.mark.parametrize(
    "order", [["halfstep.index", "0.tar", "1.tar", "2.tar"], ["2.tar", "halfstep.index", "0.tar", "1.tar"]]
)
def test_the_index_of_a_copied_set_is_used_whatever_its_time(path: Path, tmp_path: Path, order: list[str]) -> None:
    copied(path.parent, tmp_path / "copy", order)
    first = Shards(tmp_path / "copy")
    assert first.index.seal == open_index(path).seal
    assert not list((find_cache_folder() / "shards").glob("parts/*")), "nothing was scanned"
    seen = opened_shards()
    assert Shards(tmp_path / "copy").index.seal == first.index.seal
    assert seen == [], "the comparison is made once"


def test_a_shard_from_the_future_does_not_hide_the_index(path: Path) -> None:
    os.utime(path.parent / "1.tar", (time.time() + 4e6,) * 2)
    found = find_index(path.parent, build_shard_set(path.parent))
    assert found is not None
    assert found.seal == open_index(path).seal


@pytest.mark.parametrize("change", ["an image", "a label", "a sample more"])
def test_a_later_shard_of_the_same_size_has_another_index(path: Path, change: str) -> None:
    shard = path.parent / "1.tar"
    size, content = shard.stat().st_size, shard.read_bytes()
    if change == "a sample more":
        small(shard, EACH + 1, EACH)
    elif change == "an image":
        shard.write_bytes(content.replace(b"image %d" % (2 * EACH - 1), b"image 9999"))
    else:
        at = open_index(path).row(EACH).label_at
        shard.write_bytes(content[:at] + b"6" + content[at + 1 :])
    os.utime(shard, (time.time() + 5,) * 2)
    assert shard.stat().st_size == size
    assert find_index(path.parent, build_shard_set(path.parent)) is None
    assert Shards(path.parent).index.seal != open_index(path).seal


# -- several machines -------------------------------------------------------------------------------------------------


def index_on_a_machine(root: Path, cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    write_index(root, build_shard_set(root), silent)


def test_machines_index_one_folder_at_once(tmp_path: Path) -> None:
    for n in range(6):
        small(tmp_path / "set" / f"{n}.tar", 60, n * 60)
    context = multiprocessing.get_context("fork")
    for trial in range(3):
        machines = [
            context.Process(target=index_on_a_machine, args=(tmp_path / "set", tmp_path / f"host-{trial}-{n}"))
            for n in range(4)
        ]
        for one in machines:
            one.start()
        for one in machines:
            one.join()
        assert [one.exitcode for one in machines] == [0] * 4
        names = {one.name for one in (tmp_path / "set").iterdir()}
        assert names == {*(f"{n}.tar" for n in range(6)), "halfstep.index"}
    assert len(open_index(tmp_path / "set" / "halfstep.index")) == 360


def test_a_draft_is_removed_only_when_it_is_old(path: Path) -> None:
    young, old = (path.with_name(f".halfstep.index.{n}.{'0123456789abcdef'}") for n in (7, 8))
    for draft in (young, old):
        draft.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * shard_index.KEEP_DRAFT,) * 2)
    write_index(path.parent, build_shard_set(path.parent), silent)
    assert (young.exists(), old.exists()) == (True, False)


def test_a_draft_that_another_machine_removes_is_no_failure_where_its_index_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = path.read_bytes()
    scan = shard_index.scan_and_write_index

    def removed(shards: shard_index.ShardSet, draft: Path, on_progress: shard_index.OnProgress) -> None:
        scan(shards, draft, on_progress)
        draft.unlink()

    monkeypatch.setattr(shard_index, "scan_and_write_index", removed)
    assert len(write_index(path.parent, build_shard_set(path.parent), silent)) == 3 * EACH
    assert path.read_bytes() == wanted
    path.unlink()
    with pytest.raises(FileNotFoundError):
        write_index(path.parent, build_shard_set(path.parent), silent)


# -- the other files of a folder --------------------------------------------------------------------------------------


def test_archives_that_are_not_read_are_named(path: Path) -> None:
    for name in ("a.tar.gz", "b.parquet", "c.tgz", ".hidden.tar.gz", "notes.txt", "d.tar.zst"):
        (path.parent / name).touch()
    shards = build_shard_set(path.parent)
    assert shards.unread == ["a.tar.gz", "b.parquet", "c.tgz", "d.tar.zst"]
    assert len(shards.names) == 3
    assert Shards(path.parent).unread == shards.unread


# -- calls of the file system -----------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_ask_for_the_state_of_a_shard_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    read = shard_index._read_shard_state

    def counted(shard: Path) -> object:
        calls.append(shard.name)
        return read(shard)

    monkeypatch.setattr(shard_index, "_read_shard_state", counted)
    one = build_shard_set(path.parent)
    assert len(calls) == 3, "one process: once for each shard"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_PORT", "1")
    calls.clear()
    assert [build_shard_set(path.parent).states for _ in range(8)] == [one.states] * 8
    assert len(calls) == 3
    monkeypatch.setenv("MASTER_PORT", "2")
    build_shard_set(path.parent)
    assert len(calls) == 6, "another launch asks again"
