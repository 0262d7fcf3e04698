"""Masks in every form people have them, and values that stand for nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from halfstep.data.dataset import BadSample
from halfstep.data.image_io import MaskClasses, read_mask
from halfstep.errors import BadData, WrongUse


def png(values: Any, mode: str | None = None, palette: list[int] | None = None) -> bytes:
    image = Image.fromarray(np.array(values, np.uint8))
    image = image.convert(mode) if mode else image
    if palette:
        image.putpalette(palette)
    into = io.BytesIO()
    image.save(into, "PNG")
    return into.getvalue()


def read(file: bytes | Path, name: str = "x.png", **meaning: Any) -> Tensor:
    return read_mask(file, MaskClasses(**meaning), name)


@pytest.mark.parametrize("mode", ["L", "1", "RGB", "RGBA", "LA"])
def test_black_and_white_is_zero_and_one(mode: str) -> None:
    mask = read(png([[0, 255], [255, 0]], mode))
    assert mask.tolist() == [[0, 1], [1, 0]]
    assert mask.dtype == torch.uint8


@pytest.mark.parametrize(("values", "expected"), [([[0, 0]], [[0, 0]]), ([[255, 255]], [[1, 1]]), ([[0, 1]], [[0, 1]])])
def test_two_classes_are_read_from_any_mask_that_can_mean_them(values: Any, expected: Any) -> None:
    assert read(png(values)).tolist() == expected


def test_class_numbers_and_ignored_pixels() -> None:
    assert read(png([[0, 3, 255]]), classes=4, ignore_index=255).tolist() == [[0, 3, 255]]
    assert read(png([[0, 1, 255]]), classes=2, ignore_index=255).tolist() == [[0, 1, 255]]
    assert read(png([[0, 255]]), classes=2, ignore_index=255).tolist() == [[0, 255]]


def test_of_a_palette_file_the_numbers_count_not_the_colours() -> None:
    mask = png([[0, 2, 1]], palette=[9, 9, 9, 200, 0, 0, 0, 200, 0])
    assert Image.open(io.BytesIO(mask)).mode == "P"
    assert read(mask, classes=3).tolist() == [[0, 2, 1]]


@pytest.mark.wording
def test_colours_are_read_through_a_palette() -> None:
    colors = [[0, 0, 0], [255, 0, 0], [0, 0, 255]]
    values = [[[0, 0, 255], [255, 0, 0], [0, 0, 0]]]
    assert read(png(values), classes=3, palette=colors).tolist() == [[2, 1, 0]]
    with pytest.raises(BadData, match=r"the color \[1, 2, 3\]"):
        read(png([[[1, 2, 3]]]), classes=3, palette=colors)


@pytest.mark.wording
def test_a_palette_has_a_colour_for_each_class() -> None:
    with pytest.raises(WrongUse, match="2 colors for 3 classes"):
        read(png([[0]]), classes=3, palette=[[0, 0, 0], [1, 1, 1]])


@pytest.mark.wording
def test_a_value_outside_the_classes_names_the_file_and_the_value(tmp_path: Path) -> None:
    path = tmp_path / "roof_7.png"
    path.write_bytes(png([[0, 1, 7]]))
    with pytest.raises(BadData) as caught:
        read(path, str(path), classes=3)
    assert "roof_7.png" in str(caught.value)
    assert "value 7" in str(caught.value)
    assert "0 to 2" in caught.value.allowed
    assert caught.value.exit_code == 65


@pytest.mark.wording
def test_the_number_of_classes_is_no_class() -> None:
    with pytest.raises(BadData, match="value 3,"):
        read(png([[0, 3]]), classes=3)


@pytest.mark.parametrize("values", [[[0, 1, 255]], [[0, 254]], [[1, 255]]])
def test_two_classes_leave_no_room_for_guessing(values: Any) -> None:
    with pytest.raises(BadData):
        read(png(values))


@pytest.mark.wording
def test_jpeg_masks_are_refused_with_the_reason() -> None:
    noisy = Image.fromarray(np.random.default_rng(0).choice([0, 255], (32, 32)).astype(np.uint8))
    into = io.BytesIO()
    noisy.save(into, "JPEG")
    with pytest.raises(BadData, match="JPEG changes values"):
        read(into.getvalue())


@pytest.mark.wording
def test_colour_without_a_palette_is_refused() -> None:
    with pytest.raises(BadData, match=r"in color, such as \[255, 0, 0\]"):
        read(png([[[0, 0, 0], [255, 0, 0]]]))


def test_many_classes_in_sixteen_bits() -> None:
    into = io.BytesIO()
    Image.fromarray(np.array([[0, 299, 65535]], np.uint16)).save(into, "PNG")
    mask = read(into.getvalue(), classes=300, ignore_index=65535)
    assert mask.tolist() == [[0, 299, 65535]]


def test_a_mask_that_cannot_be_read_is_a_bad_sample() -> None:
    with pytest.raises(BadSample):
        read(png([[0, 255]])[:40])
