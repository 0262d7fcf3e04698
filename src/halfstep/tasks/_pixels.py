"""Numbers as a model wants them, and back to pixels that people can look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfstep.train.data.reading import scaled
from halfstep.train.task import Picture

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Pixels:
    """The mean and the spread that a model expects of each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, image: Tensor) -> Tensor:
        """From numbers between 0 and 1; integers are brought there first."""
        return (scaled(image) - self._column(self.mean, image)) / self._column(self.std, image)

    def shown(self, normalised: Tensor) -> Picture:
        """Height × width × 3 in 8 bits, from what `normalised` gave."""
        restored = normalised.detach().float() * self._column(self.std, normalised)
        return as_picture(restored + self._column(self.mean, normalised))

    def _column(self, values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)


def usual(channels: int) -> Pixels:
    """ImageNet's for colour; for anything else the middle, and a quarter of the range."""
    if channels == 3:
        return Pixels(IMAGENET_MEAN, IMAGENET_STD)
    return Pixels((0.5,) * channels, (0.25,) * channels)


def as_picture(image: Tensor) -> Picture:
    """Channels × height × width as colour in 8 bits: the first three of many channels, or the first as grey."""
    image = scaled(image).detach().float()
    colours = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    bounded = colours.nan_to_num().clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
    picture: Picture = bounded.permute(1, 2, 0).contiguous().cpu().numpy()
    return picture


def side_by_side(pictures: Sequence[Picture], gap: int = 4) -> Picture:
    """Pictures of one height in a row, with white between them."""
    height = pictures[0].shape[0]
    white = np.full((height, gap, 3), 255, dtype=np.uint8)
    row = [part for picture in pictures for part in (white, picture)]
    return np.concatenate(row[1:], axis=1)
