"""Clips that are drawn, not downloaded: things that move over a background, with exact masks of each.

A clip is a function of (seed, index). What moves is a mask: a drawn shape here, a sprite from a file next door.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from halfstep.errors import WrongUse
from halfstep.train.data.clips import MOST_CLIP_PIXELS
from halfstep.train.data.procedural import KINDS
from halfstep.train.data.source import Files, Sample

Array = np.ndarray[Any, Any]

_SLOWEST, _FASTEST = 0.02, 0.07
"""Of the frame's width, from one frame to the next: a thing moves by less than its own width."""
_LEAST_RADIUS = 2.5
"""Pixels: thinner rings and frames would fall between them."""
_MARGIN = 1.2
"""Corners of shapes reach beyond their radius."""


class Stamps(Protocol):
    """Where the masks of moving things come from."""

    name: str

    def one(self, draw: np.random.Generator, size: int) -> Array:
        """True where the thing is, without empty rows or columns, for a frame of `size` pixels."""
        ...

    def files(self) -> Files: ...


class ShapeStamps:
    """Circles, squares, stars: turned as chance wills, and a fifth to two fifths of the frame wide."""

    name = "shapes"

    def one(self, draw: np.random.Generator, size: int) -> Array:
        kind = list(KINDS)[int(draw.integers(len(KINDS)))]
        radius = max(_LEAST_RADIUS, draw.uniform(0.1, 0.2) * size)
        turn = draw.uniform(0.0, 2.0 * np.pi)
        reach = int(np.ceil(_MARGIN * radius))
        y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1] / radius
        inside: Array = KINDS[kind](x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))
        return trimmed(inside)

    def files(self) -> Files:
        return ()


class Moving:
    """`image`, frames × 3 × size × size, and `mask`, frames × size × size: the number of the thing, or 0.

    A clip has at least half as many things as `objects`. Each keeps its colour, which no other has, and its speed; it
    bounces off the edges, and later ones pass in front of earlier ones.
    """

    def __init__(
        self, stamps: Stamps, samples: int, size: int = 64, frames: int = 6, objects: int = 4, seed: int = 0
    ) -> None:
        _allowed(samples, size, frames, objects)
        self.stamps, self.samples, self.size, self.seed = stamps, samples, size, seed
        self.frames, self.objects = frames, objects

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> Sample:
        draw = np.random.default_rng([self.seed, index])
        count = int(draw.integers(-(-self.objects // 2), self.objects + 1))
        mask = np.zeros((self.frames, self.size, self.size), np.uint8)
        for number in range(1, count + 1):
            # Cut where it is larger than the frame, which sprites from other files may be.
            stamp = self.stamps.one(draw, self.size)[: self.size, : self.size]
            high, wide = stamp.shape
            for frame, (top, left) in zip(mask, self._path(draw, high, wide), strict=True):
                frame[top : top + high, left : left + wide][stamp] = number
        colours = _colours(draw, count)
        image = np.where(mask[..., None] > 0, colours[mask], _background(draw, self.size))
        return {"image": torch.from_numpy(image).permute(0, 3, 1, 2).contiguous(), "mask": torch.from_numpy(mask)}

    def name(self, index: int) -> str:
        return f"moving {self.stamps.name} {self.seed}/{index}"

    def files_of(self, index: int) -> Files:
        return self.stamps.files()

    def _path(self, draw: np.random.Generator, high: int, wide: int) -> Iterator[tuple[int, int]]:
        """Where the upper left corner is in each frame."""
        room = np.array([self.size - high, self.size - wide], np.float64)
        speed, angle = draw.uniform(_SLOWEST, _FASTEST) * self.size, draw.uniform(0.0, 2.0 * np.pi)
        times = np.arange(self.frames)[:, None]
        straight = draw.uniform(0.0, 1.0, 2) * room + times * speed * np.array([np.sin(angle), np.cos(angle)])
        # There and back again is twice the room; on the way back the way there is mirrored.
        period = np.maximum(2.0 * room, 1.0)
        bounced = np.minimum(room - abs(room - straight % period), room).clip(0.0)
        return ((top, left) for top, left in bounced.round().astype(int).tolist())


def trimmed(inside: Array) -> Array:
    """Without the empty rows and columns around what is inside."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _colours(draw: np.random.Generator, count: int) -> Array:
    """Bright ones, their hues spread over the circle; the first is nobody's."""
    first, near = draw.uniform(), draw.uniform(-0.25, 0.25, count)
    hues = (first + (np.arange(count) + near) / count) % 1.0
    light = draw.uniform((0.6, 0.7), (1.0, 1.0), (count, 2))
    bright = [colorsys.hsv_to_rgb(hue, *rest) for hue, rest in zip(hues.tolist(), light.tolist(), strict=True)]
    table = np.array([(0.0, 0.0, 0.0), *draw.permutation(bright).tolist()])
    return (255.0 * table).round().astype(np.uint8)


def _background(draw: np.random.Generator, size: int) -> Array:
    """From one dark colour to another, across the frame."""
    angle = draw.uniform(0.0, 2.0 * np.pi)
    y, x = np.mgrid[-1.0 : 1.0 : size * 1j, -1.0 : 1.0 : size * 1j]
    part = 0.5 + (x * np.cos(angle) + y * np.sin(angle))[..., None] / 3.0
    one, other = draw.uniform(5.0, 90.0, (2, 3))
    ramp: Array = (one + (other - one) * part).clip(0.0, 110.0).round().astype(np.uint8)
    return ramp


def _allowed(samples: int, size: int, frames: int, objects: int) -> None:
    possible = samples >= 1 and 8 <= size <= 4096 and 1 <= frames <= 256 and 1 <= objects <= 32
    if not possible or frames * size**2 > MOST_CLIP_PIXELS:
        raise WrongUse(
            f"{samples} drawn clips of {frames} frames of {size} pixels, with up to {objects} things",
            allowed="at least 1 clip, 1 to 256 frames, 8 to 4096 pixels, 1 to 32 things; "
            f"{MOST_CLIP_PIXELS:,} pixels in all frames of a clip",
            do="change data.samples, data.frames, data.size or data.objects",
        )
