"""Shards as webdataset writes them, read by number."""

from __future__ import annotations

import gc
import gzip
import io
import os
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from faults.bad_images import DAMAGED, encoded, picture
from halfstep.data import shard_index, tar_members
from halfstep.data import shards as shards_module
from halfstep.data.dataset import BadSample, Samples, Subset
from halfstep.data.shards import Shards, list_shard_paths
from halfstep.errors import BadData, Unsafe
from halfstep.files import find_cache_folder
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import refuse_early, resolve_run_recipe


def write(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def labeled(n: int) -> dict[str, Any]:
    return {"__key__": f"{n:04d}", "png": encoded(picture(n)), "cls": n % 3}


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for shard in range(3):
        write(tmp_path / "set" / f"train-{shard:03d}.tar", [labeled(n) for n in range(shard * 5, shard * 5 + 5)])
    return tmp_path / "set"


def test_samples_come_by_number(shards: Path) -> None:
    source = Shards(shards)
    assert len(source) == 15
    for n in (14, 0, 7, 5, 4):
        sample = source.read(n)
        assert np.array_equal(sample["image"].permute(1, 2, 0).numpy(), np.array(picture(n)))
        assert sample["label"].tolist() == n % 3
        assert sample["label"].dtype == torch.int64
    assert source.name(7) == f"{shards}/train-001.tar/0007"
    assert source.key(7) == "train-001.tar/0007"
    assert source.classes == ["0", "1", "2"]
    with pytest.raises(IndexError):
        source.read(15)


def test_a_loader_reads_a_batch_ahead_and_knows_which_sample_hangs(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, begun, alone = Shards(shards), list[int](), list[Any]()
    samples, real = Samples(Subset(source, range(14, -1, -1)), dict, 0), shards_module.read_parts
    samples.begin, samples.too_slow = begun.append, {3: "slow"}
    monkeypatch.setattr(shards_module, "read_parts", lambda *given: alone.append(given) or real(*given))
    found = samples.__getitems__([(0, n) for n in range(15)])
    assert [one.sample and one.sample["label"].item() for n, one in enumerate(found) if n != 3] == [
        (14 - n) % 3 for n in range(15) if n != 3
    ]
    assert begun[:14] == [n for n in range(14, -1, -1) if n != 3], "each before its bytes are read"
    assert len(alone) <= 1, "the replacement of the third"


def test_the_index_says_what_webdataset_reads(shards: Path) -> None:
    urls = [str(path) for path in list_shard_paths(shards)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files to be collected
        theirs = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
        gc.collect()
    source = Shards(shards)
    assert [one["__key__"] for one in theirs] == [source.name(n).rpartition("/")[2] for n in range(15)]


@pytest.mark.wording
def test_folders_files_and_patterns_are_the_same(shards: Path) -> None:
    assert list_shard_paths(f"{shards}/train-{{000..002}}.tar") == list_shard_paths(shards)
    assert len(Shards(shards / "train-001.tar")) == 5
    assert len(list_shard_paths(f"{shards}/train-{{001..002}}.tar")) == 2
    with pytest.raises(BadData, match=r"train-003\.tar does not exist"):
        Shards(f"{shards}/train-{{000..003}}.tar")
    with pytest.raises(BadData, match="at most"):
        list_shard_paths("x-{0..99999999999}.tar")
    with pytest.raises(BadData, match="counts from"):
        list_shard_paths("x-{9..1}.tar")


@pytest.mark.wording
@pytest.mark.parametrize(
    "pattern", ["{0..99999}{0..99999}.tar", "{0..9}" * 6, "{0..1}" * 2000, "{0..1}{9..1}.tar", f"{{0..{'9' * 5000}}}"]
)
def test_a_pattern_that_stands_for_too_much_is_refused_before_it_is_written_out(pattern: str) -> None:
    with pytest.raises(BadData, match="at most 100,000 shards in all"):
        list_shard_paths(pattern)


def test_several_ranges_count_like_a_clock(tmp_path: Path) -> None:
    for name in ("a-0-08.tar", "a-0-09.tar", "a-1-08.tar", "a-1-09.tar"):
        (tmp_path / name).touch()
    paths = list_shard_paths(f"{tmp_path}/a-{{0..1}}-{{08..09}}.tar")
    assert [path.name for path in paths] == ["a-0-08.tar", "a-0-09.tar", "a-1-08.tar", "a-1-09.tar"]


def test_masks_come_along(tmp_path: Path) -> None:
    mask = encoded(Image.fromarray(np.eye(16, dtype=np.uint8) * 255))
    write(tmp_path / "a.tar", [{"__key__": "x/1", "jpg": encoded(picture(), "JPEG"), "mask.png": mask}])
    tar(tmp_path / "b.tar", {"0001.jpg": encoded(picture(), "JPEG"), "0001.seg.png": mask, "0001.json": b"{}"})
    for name in ("a.tar", "b.tar"):
        sample = Shards(tmp_path / name).read(0)
        assert torch.equal(sample["mask"], torch.eye(16, dtype=torch.uint8))
        assert "label" not in sample


def test_names_of_classes_are_read_beside_the_shards_or_above(shards: Path) -> None:
    (shards.parent / "classes.txt").write_text("ant\nbee\ncat\n")
    assert Shards(shards).classes == ["ant", "bee", "cat"]
    (shards / "classes.txt").write_text("one\ntwo\n")
    assert Shards(shards).classes == ["ant", "bee", "cat"], "a list that is too short names something else"


def test_the_index_is_made_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [Shards(shards).name(n) for n in range(15)]
    monkeypatch.setattr(shard_index, "scan_shard", _never)
    assert [Shards(shards).name(n) for n in range(15)] == before
    shards.rename(shards.with_name("moved"))
    assert len(Shards(shards.with_name("moved"))) == 15


def _never(*given: object) -> None:
    raise AssertionError("scanned again")


def test_a_changed_shard_is_scanned_again(shards: Path) -> None:
    assert len(Shards(shards)) == 15
    write(shards / "train-000.tar", [labeled(n) for n in range(9)])
    assert len(Shards(shards)) == 19
    assert Shards(shards).read(8)["label"] == 2


def test_a_cache_that_cannot_be_written_costs_no_run(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shards.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(shards.parent / "file"))
    assert len(Shards(shards)) == 15


@pytest.mark.parametrize("content", [b"", b"{", b"halfstep index 1" * 30])
def test_a_damaged_index_is_made_anew(shards: Path, content: bytes) -> None:
    Shards(shards)
    for kept in (find_cache_folder() / "shards").glob("*.index"):
        kept.write_bytes(content)
    assert Shards(shards).read(3)["label"] == 0


def test_nothing_is_unpacked_and_odd_members_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (
            ("../../escape.png", tarfile.SYMTYPE),
            ("dir", tarfile.DIRTYPE),
            ("p.png", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        member = tarfile.TarInfo("../up.png")
        member.size = len(encoded(picture(5)))
        archive.addfile(member, io.BytesIO(encoded(picture(5))))
    source = Shards(path)
    assert len(source) == 1
    assert source.read(0)["image"].shape == (3, 16, 16)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["odd.tar"]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({}, "no sample"),
        ({"1.cls": b"3"}, "'1' has no image"),
        ({"1.png": b"x", "1.cls": b"cat"}, "no class number"),
        ({"1.png": b"x", "1.cls": b"-1"}, "no class number"),
        ({"1.png": b"x", "1.cls": b"9" * 5000}, "no class number"),
        ({"1.png": b"x", "1.cls": b"20240115"}, r"1\.cls contains the class number 20240115, more than 1,000,000"),
        ({"1.png": b"x", "1.cls": b"1000001"}, r"1\.cls contains the class number"),
        ({"1.png": b"x", "1.cls": b"1", "2.png": b"x"}, "differ in having a label"),
    ],
)
def test_shards_that_cannot_be_used_say_why(tmp_path: Path, members: dict[str, bytes], words: str) -> None:
    with pytest.raises(BadData, match=words) as caught:
        Shards(tar(tmp_path / "bad.tar", members))
    assert "bad.tar" in str(caught.value)


@pytest.mark.wording
def test_a_cut_or_packed_shard_is_refused(shards: Path) -> None:
    whole = (shards / "train-000.tar").read_bytes()
    (shards / "train-000.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(BadData, match="train-000"):
        Shards(shards)
    (shards / "train-000.tar").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(BadData, match="train-000"):
        Shards(shards)
    (shards / "train-000.tar").write_bytes(os.urandom(5000))
    with pytest.raises(BadData, match="train-000"):
        Shards(shards)


@pytest.mark.wording
@pytest.mark.parametrize("headers", [{"GNU.sparse.map": "a,b"}, {"GNU.sparse.map": "0,1", "GNU.sparse.size": "x"}])
def test_a_header_that_tarfile_trips_over_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    with tarfile.open(tmp_path / "odd.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("1.png")
        member.pax_headers = headers
        archive.addfile(member)
    with pytest.raises(BadData, match=r"odd\.tar cannot be used"):
        Shards(tmp_path / "odd.tar")


@pytest.mark.wording
def test_names_of_classes_that_are_not_utf8_are_refused(shards: Path) -> None:
    (shards / "classes.txt").write_bytes("Käse\n".encode("latin-1"))
    with pytest.raises(BadData, match=r"classes\.txt is not UTF-8"):
        Shards(shards)


@pytest.mark.wording
def test_too_many_members_are_refused(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_members, "MOST_MEMBERS", 9)
    with pytest.raises(BadData, match="more than 9 members"):
        Shards(shards)


def test_a_shard_that_shrinks_while_it_is_used_gives_bad_samples(shards: Path) -> None:
    source = Shards(shards)
    os.truncate(shards / "train-002.tar", 600)
    with pytest.raises(BadSample, match="its shard has changed since the run began"):
        source.read(14)
    (shards / "train-001.tar").unlink()
    with pytest.raises(BadSample, match="No such file"):
        source.read(6)


def test_a_damaged_image_in_a_shard_is_a_bad_sample(tmp_path: Path) -> None:
    source = Shards(tar(tmp_path / "a.tar", {"1.png": DAMAGED["cut.png"](), "2.png": encoded(picture())}))
    with pytest.raises(BadSample, match=r"a\.tar/1"):
        source.read(0)
    assert source.read(1)["image"].shape == (3, 16, 16)


@pytest.mark.wording
def test_an_empty_folder_and_links_out_of_it(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(BadData, match=r"contains no \.tar"):
        Shards(tmp_path / "none")
    (tmp_path / "none" / "x.tar").symlink_to(shards / "train-000.tar")
    with pytest.raises(Unsafe):
        Shards(tmp_path / "none")


def test_a_run_takes_a_pattern_of_shards_and_refuses_a_path_without_data(shards: Path, tmp_path: Path) -> None:
    def refused(path: str) -> None:
        settings = ["data.name=shards", f"data.path={path}", f"run.dir={tmp_path}/run"]
        refuse_early(resolve_run_recipe(read_recipe("classification_tiny"), settings), new=False, accepted=())

    refused(f"{shards}/train-{{000..002}}.tar")
    with pytest.raises(BadData):
        refused(f"{shards}/nothing.tar")
