"""Draw sets of shapes on noisy backgrounds, with exact masks.

A sample is a function of (seed, index). Neither task can be solved by color alone: in masks, a shape is randomly
brighter or darker than its background, and backgrounds vary as much as shapes; in labels, the brightness varies by
more than the areas of the shapes do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from halfstep.data.dataset import Sample, Source
from halfstep.errors import WrongUse

Array = np.ndarray[Any, Any]
Inside = Callable[[Array, Array], Any]
"""Returns which points are inside of a shape."""

KINDS: dict[str, Inside] = {
    "circle": lambda x, y: x**2 + y**2 < 0.85,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.8,
    "triangle": lambda x, y: (y < 0.75) & (y > 1.9 * abs(x) - 0.95),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.27) & (np.maximum(abs(x), abs(y)) < 0.95),
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.72) < 0.22,
    "bar": lambda x, y: (abs(x) < 0.95) & (abs(y) < 0.27),
    "diamond": lambda x, y: abs(x) / 0.55 + abs(y) < 1.0,
    "bowl": lambda x, y: (x**2 + y**2 < 0.95) & (y > 0.05),
    "star": lambda x, y: np.hypot(x, y) < 0.62 + 0.36 * np.cos(5.0 * np.arctan2(x, -y)),
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.65) < 0.18,
}
_MASKED = list(KINDS)
_LABELED = ["circle", "cross", "triangle", "frame", "bar", "star", "bowl", "diamond", "square", "ring"]
"""The most distinct ones come first: a small set should be learned in a minute."""
_TURN = 0.35
"""The largest rotation in radians, so that a diamond is not a square."""


class SyntheticSource(Source):
    """A base of sources that draw each sample from its number."""

    kind = "shapes"
    samples: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def name(self, index: int) -> str:
        """Return the kind of image, its seed and its number."""
        return f"{self.kind} {self.seed}/{index}"


class ShapeMasks(SyntheticSource):
    """A segmentation source of two to four shapes: all of class 1 with two classes, else a class per kind."""

    def __init__(self, samples: int, size: int = 64, classes: int = 2, channels: int = 3, seed: int = 0) -> None:
        _check_sizes(samples, size, channels, classes, len(KINDS) + 1)
        self.samples, self.size, self.channels, self.seed = samples, size, channels, seed
        self.classes = ["background", "shape"] if classes == 2 else ["background", *_MASKED[: classes - 1]]
        self._kinds = _MASKED[:3] if classes == 2 else self.classes[1:]

    def read(self, index: int) -> Sample:
        """Draw an image and its mask."""
        draw = np.random.default_rng([self.seed, index])
        background = _generate_background(draw, self.size, self.channels, 0.25)
        image, mask = background.copy(), np.zeros((self.size, self.size), np.uint8)
        for _ in range(draw.integers(2, 5)):
            kind = int(draw.integers(len(self._kinds)))
            inside = _generate_shape_mask(draw, self.size, self._kinds[kind], 0.12, 0.24)
            step = draw.choice((-1.0, 1.0)) * draw.uniform(0.2, 0.32, (self.channels, 1))
            image[:, inside] = background[:, inside] + step
            mask[inside] = 1 if len(self.classes) == 2 else kind + 1
        return {"image": _finish_image(draw, image), "mask": torch.from_numpy(mask)}


class ShapeLabels(SyntheticSource):
    """A classification source of one shape, whose kind is the label."""

    def __init__(self, samples: int, size: int = 64, classes: int = 4, channels: int = 3, seed: int = 0) -> None:
        _check_sizes(samples, size, channels, classes, len(KINDS))
        self.samples, self.size, self.channels, self.seed = samples, size, channels, seed
        self.classes = _LABELED[:classes]

    def read(self, index: int) -> Sample:
        """Draw an image and its label."""
        # Every class has the same number of samples.
        label = index % len(self.classes)
        image = self.draw(np.random.default_rng([self.seed, index]), self.classes[label])
        return {"image": image, "label": torch.tensor(label)}

    def draw(self, draw: np.random.Generator, kind: str) -> torch.Tensor:
        """Draw an image of one shape."""
        image = _generate_background(draw, self.size, self.channels, 0.1)
        inside = _generate_shape_mask(draw, self.size, kind, 0.28, 0.42)
        image[:, inside] += draw.uniform(0.25, 0.42, (self.channels, 1))
        return _finish_image(draw, image)


class ShapePictures(ShapeLabels):
    """A source for diffusion: one large bright shape on black, recognizable after a minute of training."""

    def draw(self, draw: np.random.Generator, kind: str) -> torch.Tensor:
        """Draw an image of one shape with smooth edges."""
        radius = draw.uniform(0.40, 0.46) * self.size
        x0, y0 = self.size / 2 - 0.5 + draw.uniform(-0.03, 0.03, 2) * self.size
        fine = (np.arange(4 * self.size) + 0.5) / 4 - 0.5  # sixteen points per pixel, for smooth edges
        y, x = np.meshgrid((fine - y0) / radius, (fine - x0) / radius, indexing="ij")
        covered = KINDS[kind](x, y).reshape(self.size, 4, self.size, 4).mean((1, 3))
        light = draw.uniform(0.75, 1.0, (self.channels, 1, 1))
        return torch.from_numpy((light * covered * 255.0).round().astype(np.uint8))


def _check_sizes(samples: int, size: int, channels: int, classes: int, most: int) -> None:
    if not (samples >= 1 and 8 <= size <= 4096 and 1 <= channels <= 64 and 2 <= classes <= most):
        raise WrongUse(
            f"{samples} drawn samples of {size} pixels, {channels} channels, {classes} classes",
            allowed=f"at least 1 sample, 8 to 4096 pixels, 1 to 64 channels, 2 to {most} classes",
            do="change data.samples, data.size, data.channels or data.classes",
        )


def _generate_background(draw: np.random.Generator, size: int, channels: int, spread: float) -> Array:
    """Return slow waves of color around a gray that is at most `spread` from the middle of the range."""
    coarse = draw.uniform(-0.14, 0.14, (channels, 5, 5))
    # Below 4, so that `low + 1` stays within the five points.
    at = np.linspace(0.0, 3.999, size)
    low, part = at.astype(int), at % 1.0
    rows = coarse[:, low] * (1 - part)[:, None] + coarse[:, low + 1] * part[:, None]
    waves: Array = 0.5 + rows[:, :, low] * (1 - part) + rows[:, :, low + 1] * part
    return waves + draw.uniform(-spread, spread) + draw.uniform(-0.06, 0.06, (channels, 1, 1))


def _generate_shape_mask(draw: np.random.Generator, size: int, kind: str, least: float, most: float) -> Array:
    radius = draw.uniform(least, most) * size
    x0, y0 = draw.uniform(radius * 0.9, size - radius * 0.9, 2)
    turn = draw.uniform(-_TURN, _TURN)
    y, x = np.mgrid[0:size, 0:size]
    x, y = (x - x0) / radius, (y - y0) / radius
    inside: Array = KINDS[kind](x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn))
    return inside


def _finish_image(draw: np.random.Generator, image: Array) -> torch.Tensor:
    noisy = image + draw.normal(0.0, 0.05, image.shape)
    return torch.from_numpy((noisy.clip(0.0, 1.0) * 255.0).round().astype(np.uint8))
