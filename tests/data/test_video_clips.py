"""Clips cut out of folders of frames: in order, with their masks, and never on both sides of a split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.data.dataset import BadSample
from halfstep.data.fingerprint import fingerprint
from halfstep.data.video import ClipWindows, FrameFolders, build_natural_key, split_recordings, stack_frames
from halfstep.errors import BadData, Unsafe


def put(folder: Path, count: int, size: tuple[int, int] = (6, 8), name: str = "frame{}.png") -> None:
    """Frames whose red is their number, named without leading zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        picture = np.zeros((*size, 3), np.uint8)
        picture[..., 0] = n
        Image.fromarray(picture).save(folder / name.format(n))


def reds(windows: ClipWindows, index: int) -> list[int]:
    return windows.read(index)["image"][:, 0, 0, 0].tolist()


def test_frames_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    put(tmp_path / "a", 12)
    windows = ClipWindows(FrameFolders(tmp_path), 12)
    assert reds(windows, 0) == list(range(12))
    assert windows.read(0)["image"].shape == (12, 3, 6, 8)
    assert sorted(["b10", "b9", "b", "a2b10", "a2b9", "²", "x²1"], key=build_natural_key)[:3] == ["a2b9", "a2b10", "b"]


@pytest.mark.parametrize(
    ("frames", "every", "expected"),
    [
        (5, 1, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (3, 2, [[0, 2, 4], [6, 8, 10]]),
        (6, 2, [[0, 2, 4, 6, 8, 10]]),
        (1, 5, [[0], [5], [10]]),
        (11, 1, [list(range(11))]),
    ],
)
def test_long_recordings_give_several_clips(tmp_path: Path, frames: int, every: int, expected: list[list[int]]) -> None:
    put(tmp_path / "long", 11)
    windows = ClipWindows(FrameFolders(tmp_path), frames, every)
    assert [reds(windows, n) for n in range(len(windows))] == expected
    assert len({windows.key(n) for n in range(len(windows))}) == len(windows)


@pytest.mark.wording
def test_short_recordings_are_left_out_and_only_short_ones_refused(tmp_path: Path) -> None:
    put(tmp_path / "long", 6)
    put(tmp_path / "short", 3)
    windows = ClipWindows(FrameFolders(tmp_path), 4)
    assert [windows.key(n) for n in range(len(windows))] == ["long#0"]
    with pytest.raises(BadData, match="longest of 2 clips has 6 frames, and 9 are needed"):
        ClipWindows(FrameFolders(tmp_path), 5, 2)


def test_a_folder_of_frames_is_one_clip(tmp_path: Path) -> None:
    put(tmp_path, 4)
    windows = ClipWindows(FrameFolders(tmp_path), 4)
    assert len(windows) == 1
    assert reds(windows, 0) == [0, 1, 2, 3]
    assert str(tmp_path) in windows.name(0)


def test_masks_lie_beside_and_keep_their_numbers(tmp_path: Path) -> None:
    put(tmp_path / "images" / "a", 3)
    (tmp_path / "masks" / "a").mkdir(parents=True)
    numbers = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    for n in range(3):
        mask = Image.fromarray(numbers + n)
        if n == 1:  # of a palette the numbers count, and not the colors
            mask = mask.convert("P")
            mask.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
        mask.save(tmp_path / "masks" / "a" / f"frame{n}.png")
    sample = ClipWindows(FrameFolders(tmp_path), 3).read(0)
    assert sample["mask"].dtype == torch.uint8
    for n in range(3):
        assert np.array_equal(sample["mask"][n].numpy(), numbers + n)


@pytest.mark.wording
def test_masks_that_do_not_fit_are_said(tmp_path: Path) -> None:
    put(tmp_path / "images" / "a", 2)
    put(tmp_path / "masks" / "a", 1)
    with pytest.raises(BadData, match="without a partner"):
        FrameFolders(tmp_path)
    put(tmp_path / "masks" / "a", 2, size=(6, 9))
    with pytest.raises(BadData, match="its mask"):
        ClipWindows(FrameFolders(tmp_path), 2).read(0)
    (tmp_path / "images").rename(tmp_path / "pictures")
    with pytest.raises(BadData, match="no folder images"):
        FrameFolders(tmp_path)


@pytest.mark.wording
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist"):
        FrameFolders(tmp_path / "none")
    with pytest.raises(BadData, match="contains no image"):
        FrameFolders(tmp_path)
    outside = tmp_path / "outside"
    put(outside, 2)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link").symlink_to(outside)
    with pytest.raises(Unsafe):
        FrameFolders(tmp_path / "set")


def test_a_damaged_frame_spoils_its_clips_only(tmp_path: Path) -> None:
    put(tmp_path / "a", 6)
    (tmp_path / "a" / "frame4.png").write_bytes(b"nothing")
    windows = ClipWindows(FrameFolders(tmp_path), 2)
    assert reds(windows, 0) == [0, 1]
    with pytest.raises(BadSample, match=r"frame4\.png"):
        windows.read(2)


def test_frames_of_two_sizes_are_no_clip_and_clips_are_bounded(tmp_path: Path) -> None:
    put(tmp_path / "a", 2)
    put(tmp_path / "a", 1, size=(5, 5), name="frame{}9.png")
    with pytest.raises(
        BadSample, match=r"different sizes or depths: 8 × 6 pixels of 8 bits, then 5 × 5 pixels of 8 bits"
    ):
        ClipWindows(FrameFolders(tmp_path), 3).read(0)
    large = torch.zeros(1, dtype=torch.uint8).expand(3, 8192, 8192)
    with pytest.raises(BadSample, match="5 frames of 8192 × 8192 pixels"):
        stack_frames(iter([large]), 5, "a")


def test_no_recording_is_on_both_sides_of_a_split(tmp_path: Path) -> None:
    for name in "abcdefgh":
        put(tmp_path / name, 9)
    windows = ClipWindows(FrameFolders(tmp_path), 3)
    train, val = split_recordings(windows, 0.3)
    sides = [{one.key(n).split("#")[0] for n in range(len(one))} for one in (train, val)]
    assert sides[0] | sides[1] == set("abcdefgh")
    assert not sides[0] & sides[1]
    assert min(map(len, sides)) >= 1
    assert len(train) + len(val) == 24
    again = split_recordings(ClipWindows(FrameFolders(tmp_path), 9), 0.3)[1]
    assert {again.key(n).split("#")[0] for n in range(len(again))} == sides[1]


@pytest.mark.wording
def test_one_recording_cannot_be_shared(tmp_path: Path) -> None:
    put(tmp_path / "a", 9)
    put(tmp_path / "short", 2)
    with pytest.raises(BadData, match=r"one recording that is long enough .*data\.val=0\.3") as refused:
        split_recordings(ClipWindows(FrameFolders(tmp_path), 3), 0.3)
    assert "at least 2 recordings" in refused.value.allowed


def test_a_changed_frame_or_mask_is_other_data(tmp_path: Path) -> None:
    put(tmp_path / "images" / "a", 2)
    put(tmp_path / "masks" / "a", 2)
    windows = ClipWindows(FrameFolders(tmp_path), 2)
    before = fingerprint(windows)
    assert sorted(row.key for row in before.parts[0].rows or ()) == [
        "images/a/frame0.png",
        "images/a/frame1.png",
        "masks/a/frame0.png",
        "masks/a/frame1.png",
    ]
    put(tmp_path / "masks" / "a", 1, size=(8, 6))
    assert fingerprint(windows) != before


@pytest.mark.wording
@pytest.mark.parametrize("kind", ["colour", "too many"])
def test_masks_that_are_no_numbers_say_what_can_be_done_about_it(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "images" / "a", 1)
    (tmp_path / "masks" / "a").mkdir(parents=True)
    wrong = np.full((6, 8, 3), (9, 0, 0), np.uint8) if kind == "colour" else np.full((6, 8), 300, np.uint16)
    Image.fromarray(wrong).save(tmp_path / "masks" / "a" / "frame0.png")
    with pytest.raises(BadData, match=r"masks/a/frame0\.png") as caught:
        ClipWindows(FrameFolders(tmp_path), 1).read(0)
    assert "0 to 255" in caught.value.allowed
    assert "data." not in caught.value.do, "slots have neither data.palette nor data.classes"
