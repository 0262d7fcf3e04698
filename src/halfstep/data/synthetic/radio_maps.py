"""Draw maps of buildings and the radio field around a transmitter from a seed.

A map is a square of 256 meters. The received power falls with the logarithm of the distance, and with every meter of
building on the straight line from the transmitter; shadows have soft edges, as waves diffract at corners. The field
depends on the map and the transmitter's position only, so a model can be tested against it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.data.dataset import Sample
from halfstep.data.synthetic.shapes import SyntheticSource
from halfstep.errors import WrongUse

Array = np.ndarray[Any, Any]

METRES = 256.0
"""The side of a map in meters."""
NEAREST = 2.0
"""Meters from the transmitter within which nothing is lost."""
EXPONENT = 2.6
"""The path loss exponent: 2 in empty space, up to 4 in a dense city."""
LOST_IN_WALLS, LOST_IN_SHADOW = 0.8, 40.0
"""Decibels lost per meter of building while there are few, and at most, as waves also find ways around."""
RANGE = 100.0
"""Decibels from white to black."""
MOST_BUILT = 0.4
"""The largest share of the ground that buildings cover."""
_BLOCKS = (6, 19)
_SMALLEST, _LARGEST = 0.03, 0.12
"""Half of a building's side, as a share of the map's."""
_TURNED = 0.4
"""The share of buildings that are rotated."""
_RAYS, _STEP = 6, 0.5
"""Rays per pixel of the map's side, and pixels between two points on a ray."""


class RadioMaps(SyntheticSource):
    """A source of `condition`, a map with its transmitter, and `image`, the field, as uint8; drawn from (seed, index).

    A condition of two channels has the buildings in one, and the transmitter as a spot in the other; with one channel
    it has gray buildings and a white spot. Raises WrongUse for impossible sizes.
    """

    def __init__(
        self, samples: int, size: int = 64, channels: int = 1, condition_channels: int = 2, seed: int = 0
    ) -> None:
        if not (samples >= 1 and 8 <= size <= 1024 and 1 <= channels <= 64 and 1 <= condition_channels <= 2):
            raise WrongUse(
                f"{samples} drawn maps of {size} pixels, {channels} channels, {condition_channels} of the condition",
                allowed="at least 1 map, 8 to 1024 pixels, 1 to 64 channels, 1 or 2 of the condition",
                do="change data.samples, data.size, data.channels or data.condition_channels",
            )
        self.samples, self.size, self.seed = samples, size, seed
        self.channels, self.condition_channels = channels, condition_channels

    def read(self, index: int) -> Sample:
        """Draw a sample."""
        built, place = self._drawn(index)
        image = np.repeat(_quantize_to_bytes(compute_radio_field(built, place))[None], self.channels, 0)
        return {"image": torch.from_numpy(image), "condition": self._condition(built, place)}

    def without_image(self, index: int) -> Sample:
        """Draw the condition alone."""
        return {"condition": self._condition(*self._drawn(index))}

    def _drawn(self, index: int) -> tuple[Array, tuple[int, int]]:
        draw = np.random.default_rng([self.seed, index])
        built = _generate_buildings(draw, self.size)
        free = np.flatnonzero(~built)
        return built, divmod(int(free[draw.integers(len(free))]), len(built))

    def _condition(self, built: Array, place: tuple[int, int]) -> Tensor:
        # About as large as a house: a smaller spot is lost where a model halves the map.
        spot = np.exp(-0.5 * (_compute_distances(self.size, place) / max(0.7, self.size / 48)) ** 2)
        planes = [built, spot] if self.condition_channels == 2 else [np.maximum(built * 0.5, spot)]
        return torch.from_numpy(_quantize_to_bytes(np.stack(planes)))


def compute_radio_field(built: Array, place: tuple[int, int]) -> Array:
    """Return the received power per pixel, from 1 at the transmitter down to 0; `built` is True if a building is."""
    metres = METRES / len(built)
    distance = np.maximum(_compute_distances(len(built), place) * metres, NEAREST)
    walls = _count_crossings(built, place) * metres * LOST_IN_WALLS
    # Exponential saturation: linear in the walls at first, and never more than LOST_IN_SHADOW.
    shadow = LOST_IN_SHADOW * (1.0 - np.exp(-walls / LOST_IN_SHADOW))
    lost = 10.0 * EXPONENT * np.log10(distance / NEAREST) + _blur_shadow(shadow)
    received: Array = np.clip(1.0 - lost / RANGE, 0.0, 1.0)
    return received


def _generate_buildings(draw: np.random.Generator, size: int) -> Array:
    """Return True if a building is; ground is always left."""
    built = np.zeros((size, size), bool)
    rows, columns = np.ogrid[0:size, 0:size]
    for _ in range(draw.integers(*_BLOCKS)):
        y0, x0 = draw.uniform(0.0, size, 2)
        high, wide = np.exp(draw.uniform(math.log(_SMALLEST), math.log(_LARGEST), 2)) * size
        turn = draw.uniform(0.0, math.pi / 2) if draw.random() < _TURNED else 0.0
        y, x = rows - y0, columns - x0
        block = abs(x * math.cos(turn) - y * math.sin(turn)) < wide
        block = block & (abs(x * math.sin(turn) + y * math.cos(turn)) < high)
        if (built | block).mean() <= MOST_BUILT:
            built |= block
    return built


def _compute_distances(size: int, place: tuple[int, int]) -> Array:
    rows, columns = np.ogrid[0:size, 0:size]
    distance: Array = np.hypot(rows - place[0], columns - place[1])
    return distance


def _count_crossings(built: Array, place: tuple[int, int]) -> Array:
    """Return the pixels of building between the transmitter and each pixel.

    Rays go out in all directions and sum what they cross; a pixel is interpolated between two rays and two points.
    """
    size = len(built)
    # The longest ray is the diagonal.
    rays, places = _RAYS * size, math.ceil(math.sqrt(2.0) * size / _STEP) + 1
    met = np.zeros((rays, places + 1), np.float32)
    np.cumsum(np.float32(_STEP) * _sample_along_rays(built, place, rays, places), axis=1, out=met[:, 1:])
    rows, columns = np.ogrid[0:size, 0:size]
    angle = np.arctan2(rows - place[0], columns - place[1]) % (2.0 * math.pi) * (rays / (2.0 * math.pi))
    far = _compute_distances(size, place) / _STEP
    ray, at = angle.astype(np.intp), far.astype(np.intp)
    beside, beyond = angle - ray, far - at

    def between(ray: Array) -> Array:
        here: Array = met[ray % rays, at] * (1.0 - beyond) + met[ray % rays, at + 1] * beyond
        return here

    crossed: Array = between(ray) * (1.0 - beside) + between(ray + 1) * beside
    return crossed


def _sample_along_rays(built: Array, place: tuple[int, int], rays: int, places: int) -> Array:
    """Return whether there is a building, rays × points; outside of the map there is none."""
    size = len(built)
    angles = np.arange(rays, dtype=np.float32) * np.float32(2.0 * math.pi / rays)
    far = (np.arange(places, dtype=np.float32) + 0.5) * np.float32(_STEP)
    # Points beyond the map fall into a border of open ground; 1.5 is the border plus the rounding.
    ground = np.pad(built, 1).ravel()
    rows = np.clip(np.sin(angles)[:, None] * far + (place[0] + 1.5), 0.0, size + 1.0).astype(np.intp)
    columns = np.clip(np.cos(angles)[:, None] * far + (place[1] + 1.5), 0.0, size + 1.0).astype(np.intp)
    there: Array = ground[rows * (size + 2) + columns]
    return there


def _blur_shadow(shadow: Array) -> Array:
    """Blur the shadow by a few meters, as waves diffract into it."""
    spread = max(0.6, len(shadow) / 80)
    reach = math.ceil(2.5 * spread)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / spread) ** 2)
    weights /= weights.sum()
    # A Gaussian is separable: rows, then columns through the transpose.
    for _ in range(2):
        padded = np.pad(shadow, ((reach, reach), (0, 0)), mode="edge")
        shadow = sum(w * padded[n : n + len(shadow)] for n, w in enumerate(weights)).T
    return shadow


def _quantize_to_bytes(values: Array) -> Array:
    """Return values from 0 to 1 as 8 bits."""
    return np.rint(values * 255.0).astype(np.uint8)
