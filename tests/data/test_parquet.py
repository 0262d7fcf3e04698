"""Parquet files with images are shards: the same index, order and digests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.bad_images import encoded, picture
from halfstep.data.choose_order import choose_order, measure_order
from halfstep.data.dataset import BadSample, split_source
from halfstep.data.fingerprint import different, fingerprint
from halfstep.data.parquet_shards import ParquetShards, open_shards
from halfstep.data.shard_check import describe_shard_change
from halfstep.data.shards import Shards
from halfstep.errors import BadData, MissingExtra

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, count: int, begin: int = 0, groups: int = 8, masks: bool = False, **more: Any) -> Path:
    """A file as `datasets` writes it: images as {bytes, path}, in row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(begin, begin + count)
    images = [{"bytes": encoded(picture(n), "PNG"), "path": f"{n}.png"} for n in numbers]
    columns = {"image": images, "label": [n % 5 for n in numbers], **more}
    if masks:
        del columns["label"]
        columns["mask"] = [
            {"bytes": encoded(picture(n).convert("1").convert("L"), "PNG"), "path": None} for n in numbers
        ]
    pq.write_table(pa.table(columns), path, row_group_size=groups)
    return path


def test_rows_are_samples(tmp_path: Path) -> None:
    for part in range(2):
        write(tmp_path / "set" / f"train-{part:05d}-of-00002.parquet", 30, part * 30)
    source = open_shards(tmp_path / "set")
    assert isinstance(source, ParquetShards)
    assert (len(source), source.classes, source.chunk) == (60, list("01234"), 7)
    for n in (0, 7, 8, 29, 30, 59):
        sample = source.read(n)
        assert int(sample["label"]) == n % 5 == int(source.without_image(n)["label"])
        wanted = torch.frombuffer(bytearray(picture(n).convert("RGB").tobytes()), dtype=torch.uint8)
        assert torch.equal(sample["image"].permute(1, 2, 0).flatten(), wanted)
    assert source.name(31).endswith("train-00001-of-00002.parquet/00000001")
    again = open_shards(tmp_path / "set")
    assert different(fingerprint(source), fingerprint(again)) == []


def test_masks_come_with_their_images(tmp_path: Path) -> None:
    source = open_shards(write(tmp_path / "a.parquet", 6, masks=True), palette=None)
    assert set(source.read(3)) == {"image", "mask"}


def test_a_share_and_its_order(tmp_path: Path) -> None:
    shards = open_shards(write(tmp_path / "a.parquet", 2000, groups=50))
    train, _ = split_source(shards, 0.1)
    order = choose_order(train, None, 8)
    assert (order.name, order.chunk) == ("windows", 50), "a row group is read whole"
    assert choose_order(train, "all", 8).name == "randperm"
    facts = measure_order(order, train, shards, 8)
    assert 1.0 < facts.read_ratio < 4.0
    assert "chunks of 50 samples" in str(facts)


@pytest.mark.parametrize("damage", ["a byte", "other rows"])
def test_other_bytes_are_found(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "a.parquet", 40)
    source = open_shards(path, verify="all")
    if damage == "a byte":
        content = bytearray(path.read_bytes())
        content[content.index(b"\x89PNG") + 40] ^= 1
        path.write_bytes(content)
    else:
        write(path, 40, begin=3)
    with pytest.raises(BadSample, match=r"shard|indexed"):
        [source.read(n) for n in range(40)]
    assert describe_shard_change(source, 0)


@pytest.mark.wording
def test_files_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(BadData, match=r"a\.parquet cannot be used: no Parquet file"):
        open_shards(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(BadData, match="no column image or img"):
        open_shards(tmp_path / "b.parquet")
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "x.png"}]}), tmp_path / "c.parquet")
    with pytest.raises(BadData, match="row 0 has no image"):
        open_shards(tmp_path / "c.parquet")
    write(tmp_path / "hub" / "train-00000.parquet", 2)
    write(tmp_path / "hub" / "test-00000.parquet", 2)
    with pytest.raises(BadData, match="several splits: test, train"):
        open_shards(tmp_path / "hub")


@pytest.mark.wording
def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", 2)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match="parquet"):
        Shards(path)
