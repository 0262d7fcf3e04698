"""Pictures from plain arrays: side by side, and into a file whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep.draw.images import enlarge_picture, join_picture_grid, write_png
from halfstep.errors import WrongUse


def test_a_grid_gives_every_picture_its_place() -> None:
    a, b, c = np.full((2, 3, 3), 1, np.uint8), np.full((4, 2), 2, np.uint8), np.full((1, 5, 3), 3, np.uint8)
    out = join_picture_grid([[a, b], [c]], gap=1, background=9)
    assert out.shape == (4 + 1 + 1, 5 + 1 + 2, 3)
    assert (out[:2, :3] == 1).all()
    assert (out[:4, 6:] == 2).all()
    assert (out[5, :5] == 3).all()
    covered = 2 * 3 + 4 * 2 + 5
    assert (out[..., 0] == 9).sum() == out.shape[0] * out.shape[1] - covered


def test_small_pictures_are_enlarged_and_large_ones_left() -> None:
    small = np.arange(4, dtype=np.uint8).reshape(2, 2)
    assert enlarge_picture(small, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert enlarge_picture(np.zeros((200, 5, 3), np.uint8)).shape == (200, 5, 3)


@pytest.mark.wording
def test_a_grid_of_nothing_is_refused() -> None:
    for rows in ([], [[]]):
        with pytest.raises(WrongUse, match="no pictures"):
            join_picture_grid(rows)
    with pytest.raises(WrongUse, match="float64"):
        join_picture_grid([[np.zeros((2, 2))]])


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 4)])
def test_what_is_written_is_read_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    path = tmp_path / "new" / "folder" / "a.png"
    write_png(path, picture[::-1])
    assert np.array_equal(np.array(Image.open(path)), picture[::-1])
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), np.zeros((2, 2, 5), np.uint8), np.zeros((0, 4), np.uint8)])
def test_other_arrays_are_refused_before_a_file_exists(tmp_path: Path, bad: np.ndarray) -> None:
    with pytest.raises(WrongUse):
        write_png(tmp_path / "a.png", bad)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    write_png(path, np.zeros((3, 3), np.uint8))
    before = path.read_bytes()

    def stop(self: Image.Image, file: object, **_: object) -> None:
        Path(str(file)).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        write_png(path, np.ones((3, 3), np.uint8))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
