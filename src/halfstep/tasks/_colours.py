"""A colour for each class: far apart, also for people who see few colours."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np

from halfstep.train.task import Picture

Mask = np.ndarray[Any, Any]

# Okabe and Ito's colours, behind black for the background.
_FIRST = [(0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)]
_FIRST.append((204, 121, 167))
IGNORED = (128, 128, 128)


def palette(classes: int) -> list[tuple[int, int, int]]:
    """A colour for each class, black for the first."""
    return [_FIRST[n] if n < len(_FIRST) else _turned(n) for n in range(classes)]


def painted(mask: Mask, classes: int) -> Picture:
    """A mask of class numbers in colour; numbers that are no class are grey."""
    colours = np.array([*palette(classes), IGNORED], dtype=np.uint8)
    picture: Picture = colours[np.where((mask >= 0) & (mask < classes), mask, classes)]
    return picture


def laid_over(image: Picture, mask: Mask, classes: int) -> Picture:
    """The image, with every class but the first shining through in its colour."""
    mixed = (image.astype(np.uint16) + painted(mask, classes)) // 2
    picture: Picture = np.where((mask > 0)[..., None], mixed, image).astype(np.uint8)
    return picture


def _turned(number: int) -> tuple[int, int, int]:
    """Hues a golden angle apart never repeat."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.381966 % 1.0, 0.65, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
