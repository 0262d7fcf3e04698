"""MOVi's layout: shards of .npy videos and segmentations, of which only the wanted frames are read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.data.dataset import BadSample
from halfstep.data.movi import MoviShards
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps
from halfstep.data.video import ClipWindows
from halfstep.errors import BadData
from halfstep.tasks.options.slots import SlotsData
from halfstep.tasks.shared.sources import build_clip_sources, has_object_masks
from tests.support.movi import packed, write_movi


def put(shard: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(shard, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_a_clip_is_what_was_drawn(tmp_path: Path) -> None:
    drawn = MovingSprites(ShapeStamps(), 5, 16, 6, 3)
    write_movi(tmp_path, {"train": range(3), "validation": range(3, 5)}, drawn)
    found = ClipWindows(MoviShards(tmp_path), 6)
    assert len(found) == 3
    assert len(MoviShards(tmp_path, "validation")) == 2
    for number in range(3):
        wanted, got = drawn.read(number), found.read(number)
        assert torch.equal(got["image"], wanted["image"])
        assert torch.equal(got["mask"], wanted["mask"].to(got["mask"].dtype))
    assert torch.equal(MoviShards(tmp_path).part(1, range(1, 6, 2))["image"], drawn.read(1)["image"][1:6:2])
    assert found.key(2) == "movi_e-train-000001.tar/2#0"


def test_a_recipe_reads_the_split_or_divides_the_recordings(tmp_path: Path) -> None:
    write_movi(tmp_path, {"train": range(6), "validation": range(6, 8)}, MovingSprites(ShapeStamps(), 8, 16, 6, 3))
    data = SlotsData(name="movi", path=str(tmp_path), val="validation", size=16, frames=3)
    both = build_clip_sources(data)
    assert (len(both["train"]), len(both["val"])) == (12, 4)  # six frames are two clips of three
    assert has_object_masks(data)
    shared = build_clip_sources(data.model_copy(update={"val": 0.5}))
    assert len(shared["train"]) + len(shared["val"]) == 12
    names = [{shared[side].name(n).partition(" ")[0] for n in range(len(shared[side]))} for side in ("train", "val")]
    assert not names[0] & names[1]


def test_shards_without_segmentations_have_no_masks(tmp_path: Path) -> None:
    write_movi(tmp_path, {"train": range(2)}, MovingSprites(ShapeStamps(), 2, 16, 4, 3), only_video=True)
    found = MoviShards(tmp_path)
    assert not found.has_masks
    assert set(found.part(0, range(2))) == {"image"}


@pytest.mark.parametrize(
    ("video", "said"),
    [
        (b"no array", "no .npy array"),
        (packed(np.zeros((3, 4, 4, 3), np.float32)), "float32"),
        (packed(np.zeros((3, 4, 4), np.uint8)), "are wanted"),
        (packed(np.asfortranarray(np.zeros((3, 4, 4, 3), np.uint8))), "are wanted"),
        (packed(np.zeros((3, 4, 4, 1), np.uint8)), "does not match its file"),
        (packed(np.zeros((3, 4, 4, 3), np.uint8))[:-1], "does not match its file"),
        (packed(np.array([{}], object)), "no .npy array|are wanted"),
    ],
)
def test_a_damaged_recording_is_a_bad_sample(tmp_path: Path, video: bytes, said: str) -> None:
    good = packed(np.zeros((3, 4, 4, 3), np.uint8))
    put(tmp_path / "movi_e-train-000000.tar", {"0.video.npy": good, "1.video.npy": video})
    windows = ClipWindows(MoviShards(tmp_path), 3)
    assert len(windows) == 2
    assert windows.read(0)["image"].shape == (3, 3, 4, 4)
    with pytest.raises(BadSample, match=said):
        windows.read(1)


@pytest.mark.parametrize("things", [np.full((3, 4, 4, 1), 256, np.uint16), np.zeros((3, 5, 4, 1), np.uint8)])
def test_things_that_no_mask_can_hold_are_refused(tmp_path: Path, things: Any) -> None:
    members = {"0.video.npy": packed(np.zeros((3, 4, 4, 3), np.uint8)), "0.segmentations.npy": packed(things)}
    put(tmp_path / "movi_e-train-000000.tar", members)
    with pytest.raises(BadSample, match=r"256, more than 255|different sizes"):
        MoviShards(tmp_path).part(0, range(3))


@pytest.mark.wording
def test_a_folder_without_recordings_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="contains no recording of the split 'train'") as told:
        MoviShards(tmp_path)
    assert "movi_e-train-000000.tar" in told.value.allowed
    (tmp_path / "movi_e-train-000000.tar").write_bytes(b"not a tar" * 100)
    with pytest.raises(BadData, match="cannot be used"):
        MoviShards(tmp_path)
