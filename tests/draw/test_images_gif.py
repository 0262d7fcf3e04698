"""Animations from plain arrays: every picture in its turn, and a file that is whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from halfstep.draw.images import write_gif
from halfstep.errors import WrongUse


def plain(color: tuple[int, int, int]) -> np.ndarray:
    return np.full((6, 9, 3), color, np.uint8)


COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_pictures_follow_one_another_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.gif"
    write_gif(path, [plain(color) for color in COLORS], 200)
    with Image.open(path) as image:
        assert (image.format, image.size, image.info["loop"]) == ("GIF", (9, 6), 0)
        shown = [(np.array(frame.convert("RGB")), frame.info["duration"]) for frame in ImageSequence.Iterator(image)]
    assert [duration for _, duration in shown] == [200, 200, 200]
    for (picture, _), color in zip(shown, COLORS, strict=True):
        assert np.abs(picture.astype(int) - color).max() <= 8  # a palette of 256 colors
    assert [p.name for p in path.parent.iterdir()] == ["a.gif"]


def test_grey_pictures_and_single_ones_are_animations_too(tmp_path: Path) -> None:
    write_gif(tmp_path / "a.gif", [np.full((4, 4), 77, np.uint8)])
    with Image.open(tmp_path / "a.gif") as image:
        assert abs(int(np.array(image.convert("L"))[0, 0]) - 77) <= 8


def test_many_colours_stay_near(tmp_path: Path) -> None:
    y, x = np.mgrid[0:64, 0:64].astype(np.uint8)
    picture = np.stack([x * 4, y * 4, 255 - x * 2], axis=-1)
    write_gif(tmp_path / "a.gif", [picture, picture[::-1]])
    with Image.open(tmp_path / "a.gif") as image:
        frames = [np.array(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(image)]
    assert np.abs(frames[0] - picture).mean() < 12
    assert np.abs(frames[1] - picture[::-1]).mean() < 12


@pytest.mark.parametrize(
    ("pictures", "milliseconds"),
    [
        ([], 100),
        ([np.zeros((2, 2), np.uint8), np.zeros((3, 2), np.uint8)], 100),
        ([np.zeros((2, 2))], 100),
        ([np.zeros((0, 2), np.uint8)], 100),
        ([np.zeros((2, 2), np.uint8)], 0),
        ([np.zeros((2, 2), np.uint8)], 10**9),
    ],
)
def test_what_is_no_animation_is_refused_before_a_file_exists(
    tmp_path: Path, pictures: list[np.ndarray], milliseconds: int
) -> None:
    with pytest.raises(WrongUse):
        write_gif(tmp_path / "a.gif", pictures, milliseconds)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_animation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gif"
    write_gif(path, [plain(color) for color in COLORS])
    before = path.read_bytes()

    def stop(self: Image.Image, file: object, **_: object) -> None:
        Path(str(file)).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        write_gif(path, [plain(COLORS[0])])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.gif"]
