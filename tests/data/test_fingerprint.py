"""What the data is: the same wherever it lies, another when a byte of it changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep.data import fingerprint as module
from halfstep.data.dataset import Subset, split_source
from halfstep.data.file_state import BLOCK
from halfstep.data.fingerprint import NOT_READ, UNREADABLE, Fingerprint, different, fingerprint
from halfstep.data.folders import ImageFolder
from halfstep.data.shards import Shards
from halfstep.data.synthetic.shapes import ShapeMasks
from tests.data.fingerprinted import Many, Own, OwnFiled, images_and_masks, only, opened, put, round_trip, shard


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return images_and_masks(tmp_path / "set")


def test_images_and_masks_are_named_from_their_folders(pairs: Path) -> None:
    part = only(fingerprint(opened(pairs)))
    assert part.rows is not None
    assert [row.key for row in part.rows] == [
        *(f"images/{n}.png" for n in range(6)),
        *(f"masks/{n}_mask.png" for n in range(6)),
    ]
    assert (part.samples, part.of, part.count, part.whole) == (6, "file", 12, True)
    assert part.size == sum(path.stat().st_size for path in pairs.rglob("*.png"))
    assert len({row.content for row in part.rows}) == 12


def test_moved_copied_touched_or_reached_by_a_link_it_is_the_same(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(opened(pairs))
    for path in pairs.rglob("*.png"):
        os.utime(path, (1, 1))
    shutil.copytree(pairs, tmp_path / "copy")
    (tmp_path / "link").symlink_to(pairs)
    monkeypatch.chdir(pairs)
    for root in (pairs, tmp_path / "copy", tmp_path / "link", Path(".")):
        now = fingerprint(opened(root))
        assert now == before
        assert different(before, now) == []
    moved = pairs.rename(tmp_path / "moved")
    assert fingerprint(opened(moved)) == before


def test_the_order_in_which_a_disk_lists_files_does_not_matter(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = fingerprint(opened(pairs)), os.scandir

    class Reversed:
        def __init__(self, place: Any) -> None:
            with real(place) as entries:
                self.entries = list(entries)[::-1]

        def __enter__(self) -> Any:
            return iter(self.entries)

        def __exit__(self, *error: object) -> None: ...

    names = os.listdir(pairs / "images")
    monkeypatch.setattr(os, "scandir", Reversed)
    with os.scandir(pairs / "images") as entries:
        assert [entry.name for entry in entries] == names[::-1]
    assert fingerprint(opened(pairs)) == before


@pytest.mark.slow
def test_the_seed_of_hashes_does_not_matter(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, json; from halfstep.data import fingerprint as f; from halfstep.data.folders import *;"
        "f.MOST_WHOLE_BYTES = 100; f.SAMPLED_FILES = 3;"
        "print(json.dumps(f.fingerprint(ImageMaskPairs(*resolve_pair_folders(sys.argv[1]))).as_dict()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(pairs)],
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    monkeypatch.setattr(module, "MOST_WHOLE_BYTES", 100)
    monkeypatch.setattr(module, "SAMPLED_FILES", 3)
    here = fingerprint(opened(pairs))  # the seed of this process is another one
    assert done.stdout == json.dumps(here.as_dict()) + "\n"
    assert not here.whole


def test_subsets_share_the_files_of_their_source(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(pairs)
    parts = fingerprint(*split_source(source, 0.4)).parts
    keys = [row.key for part in parts for row in part.rows or ()]
    assert len(keys) == 12
    assert sorted(keys) == [row.key for row in only(fingerprint(source)).rows or ()]
    nested = only(fingerprint(Subset(Subset(source, [4, 0, 2]), [2, 2, 0])))
    assert (nested.samples, nested.count) == (3, 4)


def test_shards_are_named_from_the_folder_that_holds_them_all(tmp_path: Path) -> None:
    for number, place in enumerate(("a/x.tar", "b/x.tar")):
        shard(tmp_path / "set" / place, range(number * 5, number * 5 + 5))
    whole = Shards(tmp_path / "set")
    before = only(fingerprint(whole))
    assert [row.key for row in before.rows or ()] == ["a/x.tar", "b/x.tar"]
    assert (before.samples, before.count) == (10, 2)
    shard(tmp_path / "flat" / "s-0.tar", range(5))
    for root in (tmp_path / "flat", tmp_path / "flat" / "s-0.tar", tmp_path / "flat" / "s-{0..0}.tar"):
        assert [row.key for row in only(fingerprint(Shards(root))).rows or ()] == ["s-0.tar"]
    shard(tmp_path / "set" / "b" / "x.tar", range(6, 11))
    after = fingerprint(Shards(tmp_path / "set"))
    said = ["1 shard changed: b/x.tar (same size, other content)"]
    assert different(Fingerprint((before,)), Fingerprint(after.parts)) == said
    said.append(f"5 samples changed in b/x.tar, the first {tmp_path}/set/b/x.tar/0006")
    assert different(Fingerprint((before,)), after) == said


def test_other_samples_of_the_same_shards_are_other_data(tmp_path: Path) -> None:
    source = Shards(shard(tmp_path / "s.tar", range(8)))
    train, val = split_source(source, 0.3)
    before = fingerprint(train, val)
    assert different(before, fingerprint(*split_source(source, 0.3))) == []
    assert different(before, fingerprint(*split_source(source, 0.8)))
    other = Subset(source, [*train.numbers[1:], train.numbers[0]])
    assert different(fingerprint(train), fingerprint(other)) == [
        "the same shards, with other samples or in another order"
    ]
    fewer = Subset(source, train.numbers[1:])
    assert different(fingerprint(train), fingerprint(fewer)) == [f"{len(fewer)} samples, saved {len(train)}"]


def test_a_file_of_two_sources_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = OwnFiled(put(tmp_path / "s", b"x").parent, ["s"] * 8)
    read: list[str] = []
    real = module._read_content_digest
    monkeypatch.setattr(module, "_read_content_digest", lambda path, starts: [read.append(path), real(path, starts)][1])
    train, val = fingerprint(Subset(source, [0, 2]), Subset(source, [1])).parts
    assert read == [str(tmp_path / "s")]
    assert train.rows == val.rows


def test_what_cannot_be_read_is_no_error(pairs: Path) -> None:
    before = fingerprint(opened(pairs))
    source = opened(pairs)
    (pairs / "images" / "0.png").unlink()
    (pairs / "images" / "1.png").unlink()
    (pairs / "images" / "1.png").symlink_to(pairs / "images" / "0.png")
    (pairs / "images" / "2.png").unlink()
    os.mkfifo(pairs / "images" / "2.png")
    (pairs / "images" / "3.png").unlink()
    (pairs / "images" / "3.png").mkdir()
    now = fingerprint(source)
    assert [row.content for row in only(now).rows or ()][:4] == [UNREADABLE] * 4
    assert only(now).rows[4] == only(before).rows[4]  # type: ignore[index]
    assert different(now, fingerprint(source)) == []
    assert different(before, now) == ["4 files changed, the first images/0.png (cannot be read now)"]
    assert different(now, before) == ["4 files changed, the first images/0.png (could not be read before)"]
    assert round_trip(now) == now


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails")
def test_a_file_that_fails_while_it_is_read_is_unreadable() -> None:
    assert module._read_content_digest("/proc/self/mem", [0]) == UNREADABLE


def test_an_empty_source_and_an_empty_file(tmp_path: Path) -> None:
    none = fingerprint(Many(0))
    assert (only(none).samples, only(none).count, only(none).rows) == (0, 0, ())
    assert round_trip(none) == none
    assert different(none, fingerprint(Many(1))) == ["1 sample added: 0000000"]
    put(tmp_path / "empty", b"")
    empty = fingerprint(OwnFiled(tmp_path, ["empty"]))
    put(tmp_path / "empty", b"1")
    assert different(empty, fingerprint(OwnFiled(tmp_path, ["empty"]))) == ["1 file changed: empty (0 bytes -> 1 byte)"]
    assert fingerprint() == round_trip(fingerprint())


def test_blocks_beyond_the_first_count(tmp_path: Path) -> None:
    size = 3 * BLOCK + 17
    for place in (0, BLOCK - 1, BLOCK, size - 1):
        content = bytearray(size)
        before = fingerprint(OwnFiled(put(tmp_path / "a", content).parent, ["a"]))
        content[place] = 1
        put(tmp_path / "a", content)
        now = fingerprint(OwnFiled(tmp_path, ["a"]))
        assert different(before, now) == ["1 file changed: a (same size, other content)"]


def test_a_large_set_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{n:03d}" for n in range(100)]
    for name in names:
        put(tmp_path / name, name.encode() * 100)
    monkeypatch.setattr(module, "MOST_WHOLE_BYTES", 30_000)
    assert fingerprint(OwnFiled(tmp_path, names)).whole
    monkeypatch.setattr(module, "MOST_WHOLE_BYTES", 29_999)
    monkeypatch.setattr(module, "SAMPLED_FILES", 10)
    before = fingerprint(OwnFiled(tmp_path, names))
    assert not before.whole
    rows = only(before).rows or ()
    read = [row.key for row in rows if row.content != NOT_READ]
    assert len(read) == 10
    assert len(rows) == 100
    assert round_trip(before) == before
    put(tmp_path / read[5], b"x" * 300)
    said = [f"1 file changed: {read[5]} (same size, other content)"]
    assert different(before, fingerprint(OwnFiled(tmp_path, names))) == said
    put(tmp_path / read[5], read[5].encode() * 100)
    # Every size counts, and a new file makes no others look changed, whichever are read now.
    unread = next(name for name in names if name not in read)
    put(tmp_path / unread, b"x" * 301)
    said = [f"1 file changed: {unread} (300 bytes -> 301 bytes)"]
    assert different(before, fingerprint(OwnFiled(tmp_path, names))) == said
    put(tmp_path / unread, unread.encode() * 100)
    more = [*names, *(str(put(tmp_path / f"new {n}", b"new").name) for n in range(100))]
    now = fingerprint(OwnFiled(tmp_path, more))
    assert {row.key for row in only(now).rows or () if row.content != NOT_READ} != set(read)
    assert different(before, now) == ["100 files added, the first new 0"]
    monkeypatch.setattr(module, "MOST_ROWS", 0)
    before, now = (fingerprint(OwnFiled(tmp_path, some)) for some in (names, more[:101]))
    groups = list(zip(only(before).by_group(), only(now).by_group(), strict=True))
    assert 1 <= sum(old != new for old, new in groups) <= 2


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WHOLE_BYTES", 10)
    size = 20 * BLOCK

    def after(place: int) -> Fingerprint:
        with open(tmp_path / "big", "wb") as file:
            file.truncate(size)
            file.seek(place)
            file.write(b"\1")
        return fingerprint(OwnFiled(tmp_path, ["big"]))

    assert not after(0).whole
    assert different(after(0), after(size - 1))
    assert not different(after(2 * BLOCK), after(3 * BLOCK))


def test_drawn_samples_are_told_by_their_names() -> None:
    before = fingerprint(ShapeMasks(30, size=16))
    assert only(before).of == "sample"
    assert different(before, fingerprint(ShapeMasks(30, size=16))) == []
    assert different(before, fingerprint(ShapeMasks(32, size=16))) == ["2 samples added, the first shapes 0/30"]
    other = different(before, fingerprint(ShapeMasks(30, size=16, seed=1)))
    assert other == ["30 samples added, the first shapes 1/0", "30 samples removed, the first shapes 0/0"]
    train, val = split_source(ShapeMasks(30, size=16), 0.2)
    assert [part.count for part in fingerprint(train, val).parts] == [len(train), len(val)]


def test_peoples_own_sources(tmp_path: Path) -> None:
    for root in (tmp_path / "one", tmp_path / "two"):
        for name in ("x/a", "x/b", "y/a"):
            put(root / name, name.encode())
    names = ["x/a", "x/b", "y/a"]
    for kind in (Own, OwnFiled):
        before = fingerprint(kind(tmp_path / "one", names))
        assert different(before, fingerprint(kind(tmp_path / "two", names))) == []
        assert different(before, fingerprint(kind(tmp_path / "two", names[:2])))
        # Samples that have other numbers are taken in another order: the run would not be the same.
        said = different(before, fingerprint(kind(tmp_path / "one", names[::-1])))
        assert said == [f"the same {only(before).of}s, with other samples or in another order"]
    filed, plain = (fingerprint(kind(tmp_path / "one", names)) for kind in (OwnFiled, Own))
    assert different(plain, filed) == ["files are compared, and samples were saved"]
    alike = [fingerprint(Many(count, lambda index: "all alike")) for count in (3, 4)]
    assert different(*alike) == ["1 sample added: all alike"]
    assert different(*alike[::-1]) == ["1 sample removed: all alike"]
    assert round_trip(alike[0]) == alike[0]


def test_names_do_not_run_into_each_other() -> None:
    for one, other in ((["ab", "c"], ["a", "bc"]), (["1:a"], ["a"]), (["a", ""], ["", "a"])):
        first, second = (fingerprint(Many(len(keys), keys.__getitem__)) for keys in (one, other))
        assert only(first).order != only(second).order
        assert different(first, second)


def test_two_thousand_small_files_take_no_time(tmp_path: Path) -> None:
    for n in range(2_000):
        put(tmp_path / "all" / f"{n}.png", b"%d" % n)
    source = ImageFolder(tmp_path)
    began = time.process_time()
    assert only(fingerprint(source)).count == 2_000
    assert time.process_time() - began < 2.0
