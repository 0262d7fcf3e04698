"""Sheets of labeled pictures: never wider than a screen, whatever they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from halfstep.draw.confusion import draw_class_bars, draw_confusion_matrix
from halfstep.draw.images import INK, compute_text_width, draw_text_line, shorten_to_width
from halfstep.draw.sheet import WIDTH, PicturedSample, draw_sample_sheet, draw_single_picture, fit_picture

LEGEND = [("background", (0, 0, 0)), ("a building with a long name", (230, 159, 0))]


def picture(high: int, wide: int, value: int = 90) -> np.ndarray:
    return np.full((high, wide, 3), value, np.uint8)


@pytest.mark.parametrize("size", [(3, 5), (64, 64), (800, 1300), (3000, 40), (40, 3000)])
@pytest.mark.parametrize("panels", [1, 4])
@pytest.mark.parametrize("entries", [1, 5])
def test_a_sheet_fits_a_screen(size: tuple[int, int], panels: int, entries: int) -> None:
    names = [f"panel {n}" for n in range(panels)]
    made = draw_sample_sheet(
        [PicturedSample({name: picture(*size) for name in names}, "x" * 400)] * entries,
        "heading" * 90,
        "note",
        LEGEND * 9,
    )
    assert made.dtype == np.uint8
    assert made.shape[1] <= WIDTH
    assert made.shape[0] < 2200
    assert (made == 90).all(-1).any(), "the picture itself is on it"
    assert draw_single_picture(PicturedSample({"": picture(*size)}, "a.jpg"), LEGEND).shape[1] <= WIDTH


def test_small_pictures_keep_their_pixels_and_large_ones_are_reduced() -> None:
    draw = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    large = fit_picture(draw, 100, 100)
    assert large.shape == (64, 96, 3)
    assert np.array_equal(large[::16, ::16], draw)
    assert fit_picture(picture(2000, 1000), 100, 100).shape == (100, 50, 3)


def test_a_frame_is_outside_of_the_picture() -> None:
    made = draw_sample_sheet([PicturedSample({"": picture(32, 32)}, "one\ntwo", frame=(1, 200, 3))])
    rows, columns = np.nonzero((made == (1, 200, 3)).all(-1))
    inner = made[rows.min() + 5 : rows.max() - 4, columns.min() + 5 : columns.max() - 4]
    assert (inner == 90).all()
    assert inner.shape[0] % 32 == 0


def test_words_never_leave_their_field() -> None:
    long = "/data/photos/" + "a" * 300 + "/last.jpg"
    assert compute_text_width(shorten_to_width(long, 14, 200), 14) <= 200
    assert shorten_to_width(long, 14, 200).endswith("last.jpg")
    assert draw_text_line(long, 14, 200).shape[1] <= 200
    assert (draw_text_line("word", 14, 200) == INK).all(-1).any()


@pytest.mark.parametrize("text", ["", "\x1b[31mred", "two\nlines", "建物", "[bold]", "\ud800"])
def test_any_name_can_be_drawn(text: str) -> None:
    assert draw_text_line(text, 14, 200).shape[0] == draw_text_line("plain", 14, 200).shape[0]
    draw_confusion_matrix([text, "other"], [[1.0, 0.0], [0.5, 0.5]])


@pytest.mark.parametrize("classes", [2, 16, 17, 100, 200])
def test_confusion_fits_a_screen(classes: int) -> None:
    shares = np.full((classes, classes), 1 / classes)
    shares[0] = np.nan
    names = [f"the class number {n}" for n in range(classes)]
    assert draw_confusion_matrix(names, shares.tolist()).shape[1] <= WIDTH - 32
    assert draw_class_bars(names, shares[:, 0].tolist(), "IoU").shape[1] <= 600
