"""Data that changes while a run reads it is reported by name and not used; labels are those of the shard."""

from __future__ import annotations

import io
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from faults.bad_images import encoded, picture
from faults.f52_many_scans import scanned
from halfstep.data import image_files, shard_index
from halfstep.data import shards as shard_module
from halfstep.data.dataset import BadSample, ReadSample, Samples
from halfstep.data.file_state import BLOCK, FileState, RecordedFile, describe_file_change
from halfstep.data.fingerprint import fingerprint
from halfstep.data.folders import ImageFolder
from halfstep.data.image_io import read_image
from halfstep.data.movi import MoviShards
from halfstep.data.recorded_files import RecordedFiles
from halfstep.data.shard_index import pack_shard_rows, scan_and_write_index
from halfstep.data.shard_rows import LARGEST_LABEL
from halfstep.data.shard_scan import scan_shard
from halfstep.data.shards import Shards, build_shard_set
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps
from halfstep.errors import BadData
from halfstep.files import find_cache_folder
from tests.support.movi import write_movi


def colored(number: int) -> bytes:
    """A bitmap: every color has the same size."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "BMP")
    return file.getvalue()


def write_shard(path: Path, labels: list[int], color: int = 0, padding: int = 0) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, label in enumerate(labels):
            parts = {"bmp": colored(color + number), "cls": b"%d" % label, "bin": bytes(padding)}
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{number:04d}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def labels_of(shard: Path) -> list[int]:
    source = Shards(shard)
    return [int(source.read(number)["label"]) for number in range(len(source))]


def write_in_place(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)


# -- labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return find_cache_folder() / "shards"


def forge(cache: Path, shard: Path, sealed: bool, **columns: int) -> Path:
    """Put other numbers into the index of a shard; sealed anew, as somebody would who knows the format."""
    (kept,) = cache.glob("*.index")
    real = scan_shard(shard)
    other = {name: np.full_like(getattr(real, name), value) for name, value in columns.items()}
    forged = replace(real, **other)
    before, after = pack_shard_rows(real), pack_shard_rows(forged)
    if sealed:
        with mock.patch.object(shard_index, "scan_shard", return_value=forged):
            scan_and_write_index(build_shard_set(shard), kept, lambda done, of: None)
    else:
        kept.write_bytes(kept.read_bytes().replace(before.content[:-16], after.content[:-16]))
    return kept


@pytest.mark.wording
@pytest.mark.parametrize("sealed", [False, True])
def test_an_edited_index_turns_no_label(tmp_path: Path, cache: Path, sealed: bool) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1, 0, 1])
    assert labels_of(shard) == [0, 1, 0, 1]
    kept = forge(cache, shard, sealed, label=1)
    with pytest.raises(BadData) as caught:
        labels_of(shard)
    said = r"a.tar/0000 has the label 0 in its shard, and 1 in the index" if sealed else "samples 0 to 3 of a.tar"
    assert said in str(caught.value)
    assert str(kept) in caught.value.do
    with pytest.raises(BadData, match="index"):
        Shards(shard).without_image(0)
    kept.unlink()
    assert labels_of(shard) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("column", "value"),
    [("image", 512 * 10**6), ("image_size", 2**32 - 1), ("label_at", 512 * 10**6), ("mask", 512), ("digest", 7)],
)
def test_an_index_with_impossible_numbers_reads_no_other_sample(
    tmp_path: Path, cache: Path, column: str, value: int
) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1])
    whole = Shards(shard).read(0)["image"]
    forge(cache, shard, True, **{column: value})
    if column == "digest":  # it counts where the file is another one
        assert torch.equal(Shards(shard).read(0)["image"], whole)
        return
    with pytest.raises((BadSample, BadData), match=r"a\.tar"):
        Shards(shard).read(0)


@pytest.mark.parametrize("label", [LARGEST_LABEL + 1, 2**31 - 1])
def test_an_index_with_an_impossible_label_is_made_anew(tmp_path: Path, cache: Path, label: int) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1])
    labels_of(shard)
    forge(cache, shard, True, label=label)
    assert labels_of(shard) == [0, 1]
    assert Shards(shard).classes == ["0", "1"]


def test_a_shard_written_in_place_with_its_old_times_has_its_own_labels(tmp_path: Path, cache: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1, 0])
    assert labels_of(shard) == [0, 1, 0]
    status = shard.stat()
    time.sleep(0.02)  # the time of a change has the resolution of the kernel's clock
    write_in_place(shard, write_shard(tmp_path / "b", [1, 0, 1]).read_bytes())
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert shard.stat().st_ino == status.st_ino
    assert labels_of(shard) == [1, 0, 1]


@pytest.mark.wording
def test_a_file_system_whose_times_mean_nothing_uses_no_other_label(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileState.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        FileState, "of", classmethod(lambda cls, status: real(cls, status)._replace(modified=1, inode=1, changed=1))
    )
    shard = write_shard(tmp_path / "a.tar", [0, 1, 0])
    assert labels_of(shard) == [0, 1, 0]
    write_in_place(shard, write_shard(tmp_path / "b", [0, 0, 0]).read_bytes())
    with pytest.raises(BadData, match=r"a\.tar/0001 has the label 0 in its shard, and 1"):
        labels_of(shard)


# -- shards that change -----------------------------------------------------------------------------------------------


def refused(source: Shards | MoviShards, number: int = 0) -> str:
    with pytest.raises(BadSample) as caught:
        source.part(number, range(1)) if isinstance(source, MoviShards) else source.read(number)
    assert ".tar/" in caught.value.name
    return caught.value.reason


def test_a_shard_replaced_under_a_run_is_not_used(tmp_path: Path) -> None:
    shard, other = write_shard(tmp_path / "a.tar", [0, 1]), write_shard(tmp_path / "b", [1, 0], color=100)
    assert shard.stat().st_size == other.stat().st_size
    source = Shards(shard)
    source.read(0)
    other.replace(shard)
    assert "another file has taken the place of its shard since the run began" in refused(source)
    write_shard(tmp_path / "a.tar", [0] * 40)
    assert "its shard has changed since the run began" in refused(source)


def test_pictures_exchanged_in_place_under_a_run_are_not_used(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [0, 1])
    source, before = Shards(shard), shard.stat()
    write_in_place(shard, write_shard(tmp_path / "b", [0, 1], color=100).read_bytes())
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert refused(source) == "its shard has been written or touched since the run began"


def test_a_shard_that_is_touched_moved_or_copied_is_the_same(tmp_path: Path) -> None:
    large = write_shard(tmp_path / "a.tar", [0, 1, 2], padding=2 * BLOCK)
    small = write_shard(tmp_path / "b.tar", [0, 1, 2])
    for shard in (large, small):
        source = Shards(shard)
        os.utime(shard, (1, 1))
        assert source.read(0)["label"] == 0
        shard.chmod(0o600)
        os.link(shard, tmp_path / f"link-{shard.name}")
        assert source.read(1)["label"] == 1
    copy = tmp_path / "copy"
    copy.write_bytes(small.read_bytes())
    copy.replace(small)
    assert source.read(2)["label"] == 2
    source = Shards(large)
    copy.write_bytes(large.read_bytes())
    copy.replace(large)
    assert source.read(2)["label"] == 2, "every byte of the sample was compared"


def test_a_read_costs_one_fstat_and_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Shards(write_shard(tmp_path / "a.tar", [0, 1]))
    asked: list[str] = []
    for name in ("fstat", "pread", "stat"):
        real = getattr(os, name)
        monkeypatch.setattr(
            shard_module.os,
            name,
            lambda *given, real=real, name=name, **more: [asked.append(name), real(*given, **more)][1],
        )
    source.read(1)
    assert asked == ["fstat", "pread"]


def test_a_recording_in_a_shard_that_was_replaced_is_not_used(tmp_path: Path) -> None:
    drawn = MovingSprites(ShapeStamps(), 2, 16, 4, 3)
    write_movi(tmp_path, {"train": range(1)}, drawn)
    source = MoviShards(tmp_path)
    source.part(0, range(1))
    (shard,) = tmp_path.glob("*.tar")
    os.utime(shard, (1, 1))
    source.part(0, range(1))
    shard.rename(tmp_path / "old")
    write_movi(tmp_path, {"train": range(1)}, MovingSprites(ShapeStamps(), 2, 16, 4, 3, seed=1))
    assert "since the run began" in refused(source)


# -- images that change -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        file = tmp_path / "set" / "ab"[number % 2] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(colored(number))
    return tmp_path / "set"


def samples_of(folder: Path, whole: bool = True) -> Samples:
    samples = Samples(ImageFolder(folder), lambda sample: sample, seed=0)
    samples.change_of = files = RecordedFiles(samples.source)
    if whole:
        files.take_contents(fingerprint(samples.source).parts[0])
    return samples


def read(samples: Samples) -> ReadSample:
    return samples[(0, 0)]


def test_an_image_replaced_under_a_run_is_reported_and_not_used(folder: Path, tmp_path: Path) -> None:
    samples, file = samples_of(folder), folder / "a" / "0.bmp"
    assert read(samples).replaced == []
    other = tmp_path / "other"
    other.write_bytes(colored(200))
    other.replace(file)
    found = read(samples)
    (one,) = found.replaced
    assert (one.number, one.name) == (0, str(file))
    assert one.reason == "another file has taken the place of its file since the run began"
    assert found.sample is not None
    assert int(found.sample["image"].max()) < 200
    file.write_bytes(encoded(picture(3)))
    assert "bytes" in read(samples).replaced[0].reason


def test_an_image_written_in_place_under_a_run_is_not_used(folder: Path) -> None:
    samples, file = samples_of(folder), folder / "a" / "0.bmp"
    before = file.stat()
    write_in_place(file, colored(200))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert read(samples).replaced[0].reason == "its file has been written or touched since the run began"


@pytest.mark.parametrize("whole", [True, False])
def test_a_touched_image_is_used_where_its_content_is_known(folder: Path, whole: bool) -> None:
    samples, file = samples_of(folder, whole), folder / "a" / "0.bmp"
    os.utime(file, (-5, -5))
    assert [one.name for one in read(samples).replaced] == ([] if whole else [str(file)])
    file.unlink()
    assert read(samples).replaced[0].reason == "No such file or directory"


def test_permissions_links_and_new_inode_numbers_change_nothing(folder: Path) -> None:
    samples, file = samples_of(folder, whole=False), folder / "a" / "0.bmp"
    file.chmod(0o600)
    os.link(file, folder.parent / "link")
    assert read(samples).replaced == []
    state = FileState.of(file.stat())
    assert describe_file_change(RecordedFile(state), state._replace(inode=state.inode + 1), file) == ""


# -- scans ------------------------------------------------------------------------------------------------------------


def test_a_jpeg_of_many_scans_is_a_bad_sample_before_it_is_decoded(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(scanned(2000))
    began = time.process_time()
    for given in (file, scanned(2000)):
        with pytest.raises(BadSample, match="more than 100 scans"):
            read_image(given)
    assert time.process_time() - began < 1.0
    for scans in (6, 100):
        assert read_image(scanned(scans), 1).shape == (1, 400, 400)
    with pytest.raises(BadSample, match="more than 100 scans"):
        read_image(scanned(101))


def test_bytes_that_look_like_scans_and_are_not_decoded_do_not_count() -> None:
    whole, noise = scanned(6), b"\xff\xda" * 30_000
    plain = read_image(whole)
    assert torch.equal(read_image(whole + noise), plain), "a video that a phone appends"
    profile = b"\xff\xe5" + (len(noise) + 2).to_bytes(2, "big") + noise
    assert torch.equal(read_image(whole[:2] + profile + whole[2:]), plain)


def test_a_usual_photograph_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "_SCANS", None)
    for mode in ("L", "RGB", "CMYK"):
        file = io.BytesIO()
        Image.new(mode, (20, 20)).save(file, "JPEG")
        assert read_image(file.getvalue()).shape == (3, 20, 20)
