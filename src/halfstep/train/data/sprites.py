"""Masks of things in one file, for clips in which they move: dSprites, or others of the same layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import BadData
from halfstep.train.data.listing import existing
from halfstep.train.data.moving import trimmed
from halfstep.train.data.source import Files

Array = np.ndarray[Any, Any]
FILE, TENSOR = "sprites.safetensors", "masks"
FRAME = 64
"""Pixels of the frame that the sprites were drawn for; in other frames they are larger or smaller."""
MOST_BYTES = 256 * 2**20
_LAYOUT = f"{FILE} with a tensor {TENSOR}: sprites × height × width of bool or uint8, none of them empty"


class SpriteStamps:
    """One of the sprites of a folder, as it is where the frame has 64 pixels."""

    name = "sprites"

    def __init__(self, root: str | Path) -> None:
        self.path = existing(root, "the folder of sprites") / FILE
        self._masks = _read(self.path)

    def __len__(self) -> int:
        return len(self._masks)

    def one(self, draw: np.random.Generator, size: int) -> Array:
        return _resized(trimmed(self._masks[int(draw.integers(len(self)))]), size / FRAME)

    def files(self) -> Files:
        return [(FILE, self.path)]


def _resized(mask: Array, factor: float) -> Array:
    """By the nearest pixel, so that a mask stays a mask; of one that is too thin for that, a pixel is left."""
    if factor == 1.0:
        return mask
    rows, columns = (
        ((np.arange(max(1, round(length * factor))) + 0.5) / factor).astype(int).clip(0, length - 1)
        for length in mask.shape
    )
    small = mask[np.ix_(rows, columns)]
    return trimmed(small) if small.any() else np.ones((1, 1), dtype=bool)


def _read(path: Path) -> Array:
    from safetensors import safe_open

    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BadData(
            f"{path} is {'larger than ' + format(MOST_BYTES, ',') + ' bytes' if path.is_file() else 'not there'}",
            allowed=_LAYOUT,
            do="run scripts/data dsprites, and write data.path=cache:dsprites",
        )
    try:
        with safe_open(path, framework="numpy") as file:
            masks: Array = file.get_tensor(TENSOR)
    except Exception as error:
        # A type that numpy does not know ends in whatever the reader stumbles over: AttributeError, TypeError, ...
        raise BadData(f"{path} cannot be read: {error}", allowed=_LAYOUT, do="make the file again") from error
    if masks.ndim != 3 or masks.dtype not in (np.bool_, np.uint8) or not len(masks) or not masks.any((1, 2)).all():
        raise BadData(
            f"{path} holds {TENSOR} of shape {masks.shape} and type {masks.dtype}, or an empty sprite",
            allowed=_LAYOUT,
            do="make the file again",
        )
    return masks.astype(bool)
