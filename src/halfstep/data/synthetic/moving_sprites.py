"""Draw clips of objects that move over a background, with exact masks.

A clip is a function of (seed, index). The objects are masks: drawn shapes, or sprites from a file.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from halfstep.data.dataset import Files, Sample
from halfstep.data.image_files import require_folder
from halfstep.data.synthetic.shapes import KINDS, SyntheticSource
from halfstep.data.video import MOST_CLIP_PIXELS
from halfstep.errors import BadData, WrongUse

Array = np.ndarray[Any, Any]
FILE, TENSOR = "sprites.safetensors", "masks"
FRAME = 64
"""The frame size that the sprites were drawn for; in other frames they are scaled."""
MOST_BYTES = 256 * 2**20
_LAYOUT = f"{FILE} with a tensor {TENSOR}: sprites × height × width of bool or uint8, none of them empty"


class SpriteStamps:
    """Sprites of a folder, in their own size where the frame has 64 pixels."""

    name = "sprites"

    def __init__(self, root: str | Path) -> None:
        self.path = require_folder(root, "the folder of sprites") / FILE
        self._masks = _load_sprites(self.path)

    def __len__(self) -> int:
        return len(self._masks)

    def one(self, draw: np.random.Generator, size: int) -> Array:
        """Draw one sprite for a frame of `size` pixels."""
        return _resize_mask(trim_mask(self._masks[int(draw.integers(len(self)))]), size / FRAME)

    def files(self) -> Files:
        """Return the file of the sprites."""
        return [(FILE, self.path)]


def _resize_mask(mask: Array, factor: float) -> Array:
    """Scale by nearest neighbor, so that a mask stays binary; one that vanishes becomes a single pixel."""
    if factor == 1.0:
        return mask
    rows, columns = (
        ((np.arange(max(1, round(length * factor))) + 0.5) / factor).astype(int).clip(0, length - 1)
        for length in mask.shape
    )
    small = mask[np.ix_(rows, columns)]
    return trim_mask(small) if small.any() else np.ones((1, 1), dtype=bool)


def _load_sprites(path: Path) -> Array:
    from safetensors import safe_open

    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BadData(
            f"{path} is larger than {MOST_BYTES:,} bytes" if path.is_file() else f"{path} does not exist",
            allowed=_LAYOUT,
            do="data.path: the folder with your sprites.safetensors, or data.name=shapes",
        )
    try:
        with safe_open(path, framework="numpy") as file:
            masks: Array = file.get_tensor(TENSOR)
    except Exception as error:
        # An unsupported dtype may raise anything: AttributeError, TypeError, ...
        raise BadData(f"{path} cannot be read: {error}", allowed=_LAYOUT, do="make the file again") from error
    if masks.ndim != 3 or masks.dtype not in (np.bool_, np.uint8) or not len(masks) or not masks.any((1, 2)).all():
        raise BadData(
            f"{path} contains {TENSOR} of shape {masks.shape} and type {masks.dtype}, or an empty sprite",
            allowed=_LAYOUT,
            do="make the file again",
        )
    return masks.astype(bool)


_SLOWEST, _FASTEST = 0.02, 0.07
"""Shares of the frame's width per frame: an object moves by less than its own width."""
_LEAST_RADIUS = 2.5
"""Pixels: thinner rings and frames would fall between them."""
_MARGIN = 1.2
"""Corners of shapes reach beyond their radius."""


class Stamps(Protocol):
    """A generator of the masks of moving objects."""

    name: str

    def one(self, draw: np.random.Generator, size: int) -> Array:
        """Return True if the object is, without empty rows or columns, for a frame of `size` pixels."""
        ...

    def files(self) -> Files: ...


class ShapeStamps:
    """Circles, squares, stars and others in random orientation, a fifth to two fifths of the frame wide."""

    name = "shapes"

    def one(self, draw: np.random.Generator, size: int) -> Array:
        """Draw one shape for a frame of `size` pixels."""
        kind = list(KINDS)[int(draw.integers(len(KINDS)))]
        radius = max(_LEAST_RADIUS, draw.uniform(0.1, 0.2) * size)
        turn = draw.uniform(0.0, 2.0 * np.pi)
        reach = int(np.ceil(_MARGIN * radius))
        y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1] / radius
        inside: Array = KINDS[kind](x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))
        return trim_mask(inside)

    def files(self) -> Files:
        """Return no files."""
        return ()


class MovingSprites(SyntheticSource):
    """A source of `image`, frames × 3 × size × size, and `mask`, frames × size × size: the object number, or 0.

    A clip has at least half as many objects as `objects`. Each has a unique color and a constant speed; it bounces off
    the edges, and later objects pass in front of earlier ones. Raises WrongUse for impossible sizes.
    """

    notices_changes = True
    """The stamps are read once."""

    def __init__(
        self, stamps: Stamps, samples: int, size: int = 64, frames: int = 6, objects: int = 4, seed: int = 0
    ) -> None:
        _check_sizes(samples, size, frames, objects)
        self.stamps, self.samples, self.size, self.seed = stamps, samples, size, seed
        self.frames, self.objects, self.kind = frames, objects, f"moving {stamps.name}"

    def read(self, index: int) -> Sample:
        """Draw a clip."""
        draw = np.random.default_rng([self.seed, index])
        count = int(draw.integers(-(-self.objects // 2), self.objects + 1))
        mask = np.zeros((self.frames, self.size, self.size), np.uint8)
        for number in range(1, count + 1):
            # Sprites of a user's file may be larger than the frame.
            stamp = self.stamps.one(draw, self.size)[: self.size, : self.size]
            high, wide = stamp.shape
            for frame, (top, left) in zip(mask, self._path(draw, high, wide), strict=True):
                frame[top : top + high, left : left + wide][stamp] = number
        colors = _generate_colors(draw, count)
        image = np.where(mask[..., None] > 0, colors[mask], _generate_gradient(draw, self.size))
        return {"image": torch.from_numpy(image).permute(0, 3, 1, 2).contiguous(), "mask": torch.from_numpy(mask)}

    def files_of(self, index: int) -> Files:
        """Return the files of the stamps."""
        return self.stamps.files()

    def _path(self, draw: np.random.Generator, high: int, wide: int) -> Iterator[tuple[int, int]]:
        """Return the upper left corner in each frame."""
        room = np.array([self.size - high, self.size - wide], np.float64)
        speed, angle = draw.uniform(_SLOWEST, _FASTEST) * self.size, draw.uniform(0.0, 2.0 * np.pi)
        times = np.arange(self.frames)[:, None]
        straight = draw.uniform(0.0, 1.0, 2) * room + times * speed * np.array([np.sin(angle), np.cos(angle)])
        # A bounce is a triangle wave: twice the free space is one period.
        period = np.maximum(2.0 * room, 1.0)
        bounced = np.minimum(room - abs(room - straight % period), room).clip(0.0)
        return ((top, left) for top, left in bounced.round().astype(int).tolist())


def trim_mask(inside: Array) -> Array:
    """Return the mask without empty rows and columns at its edges."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _generate_colors(draw: np.random.Generator, count: int) -> Array:
    """Return bright colors with evenly spread hues; the first is unused."""
    # At most a quarter of the spacing, so that two hues never meet.
    first, near = draw.uniform(), draw.uniform(-0.25, 0.25, count)
    hues = (first + (np.arange(count) + near) / count) % 1.0
    light = draw.uniform((0.6, 0.7), (1.0, 1.0), (count, 2))
    bright = [colorsys.hsv_to_rgb(hue, *rest) for hue, rest in zip(hues.tolist(), light.tolist(), strict=True)]
    table = np.array([(0.0, 0.0, 0.0), *draw.permutation(bright).tolist()])
    return (255.0 * table).round().astype(np.uint8)


def _generate_gradient(draw: np.random.Generator, size: int) -> Array:
    """Return a gradient between two dark colors."""
    angle = draw.uniform(0.0, 2.0 * np.pi)
    y, x = np.mgrid[-1.0 : 1.0 : size * 1j, -1.0 : 1.0 : size * 1j]
    part = 0.5 + (x * np.cos(angle) + y * np.sin(angle))[..., None] / 3.0
    one, other = draw.uniform(5.0, 90.0, (2, 3))
    ramp: Array = (one + (other - one) * part).clip(0.0, 110.0).round().astype(np.uint8)
    return ramp


def _check_sizes(samples: int, size: int, frames: int, objects: int) -> None:
    possible = samples >= 1 and 8 <= size <= 4096 and 1 <= frames <= 256 and 1 <= objects <= 32
    if not possible or frames * size**2 > MOST_CLIP_PIXELS:
        raise WrongUse(
            f"{samples} drawn clips of {frames} frames of {size} pixels, with up to {objects} things",
            allowed="at least 1 clip, 1 to 256 frames, 8 to 4096 pixels, 1 to 32 things; "
            f"{MOST_CLIP_PIXELS:,} pixels in all frames of a clip",
            do="change data.samples, data.frames, data.size or data.objects",
        )
