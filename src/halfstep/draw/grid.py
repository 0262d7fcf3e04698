"""Pictures in rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfstep.errors import WrongUse

Array = np.ndarray[Any, Any]


def grid(rows: Sequence[Sequence[Array]], gap: int = 4, background: int = 255) -> Array:
    """One picture of many: columns as wide as their widest, rows as high as their highest, grey ones as colour."""
    cells = [[_coloured(picture) for picture in row] for row in rows if len(row)]
    if not cells:
        raise WrongUse("a grid of no pictures", allowed="at least one picture", do="give it rows of pictures")
    heights = [max(picture.shape[0] for picture in row) for row in cells]
    columns = max(len(row) for row in cells)
    widths = [max(row[n].shape[1] for row in cells if n < len(row)) for n in range(columns)]
    size = (sum(heights) + gap * (len(heights) - 1), sum(widths) + gap * (columns - 1), 3)
    out = np.full(size, background, dtype=np.uint8)
    top = 0
    for row, height in zip(cells, heights, strict=True):
        left = 0
        for picture, width in zip(row, widths, strict=False):
            out[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
            left += width + gap
        top += height + gap
    return out


def _coloured(picture: Array) -> Array:
    if picture.dtype != np.uint8 or not (picture.ndim == 2 or picture.shape[2:] == (3,)):
        raise WrongUse(
            f"a picture of shape {picture.shape} and type {picture.dtype} in a grid",
            allowed="uint8, height × width or height × width × 3",
            do="scale it to 0 .. 255 and move its channels last",
        )
    return np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture


def enlarged(picture: Array, least: int = 128) -> Array:
    """The picture with every pixel as a square, so that its height is at least `least`: for small ones to be seen."""
    times = max(1, -(-least // picture.shape[0]))
    return picture.repeat(times, axis=0).repeat(times, axis=1)
