"""Normalize images for a model and turn tensors back into pictures; masks, shrinking and tiling."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.data.dataset import Sample, Source, WrappedSource
from halfstep.data.image_io import scale_to_unit_range
from halfstep.precision.precision import widen
from halfstep.train.signature import Preprocessing
from halfstep.train.task import Picture

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelNormalization:
    """The mean and standard deviation a model expects of each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalized(self, image: Tensor) -> Tensor:
        """Normalize an image with values in 0..1; integers are scaled to that range first."""
        return (scale_to_unit_range(image) - self._column(self.mean, image)) / self._column(self.std, image)

    def shown(self, normalized: Tensor) -> Picture:
        """Return a picture (height × width × 3, uint8) from a normalized image."""
        restored = normalized.detach().float() * self._column(self.std, normalized)
        return convert_to_picture(restored + self._column(self.mean, normalized))

    def _column(self, values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)


def choose_normalization(channels: int) -> PixelNormalization:
    """Return ImageNet's statistics for three channels; otherwise a mean of 0.5 and a deviation of 0.25."""
    if channels == 3:
        return PixelNormalization(IMAGENET_MEAN, IMAGENET_STD)
    return PixelNormalization((0.5,) * channels, (0.25,) * channels)


def convert_to_picture(image: Tensor) -> Picture:
    """Return channels × height × width as an RGB picture: the first three channels, or the first one as gray."""
    image = scale_to_unit_range(image).detach().float()
    colors = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    # The conversion of NaN to uint8 is undefined.
    bounded = colors.nan_to_num().clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
    picture: Picture = bounded.permute(1, 2, 0).contiguous().cpu().numpy()
    return picture


def join_pictures(pictures: Sequence[Picture], gap: int = 4) -> Picture:
    """Join pictures of one height in a row with white gaps."""
    height = pictures[0].shape[0]
    white = np.full((height, gap, 3), 255, dtype=np.uint8)
    row = [part for picture in pictures for part in (white, picture)]
    return np.concatenate(row[1:], axis=1)


Mask = np.ndarray[Any, Any]

# Okabe and Ito's palette, after black for the background.
_FIRST = [(0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0)]
_FIRST.append((204, 121, 167))
IGNORED, MISTAKE = (128, 128, 128), (220, 30, 30)


def list_class_colors(classes: int) -> list[tuple[int, int, int]]:
    """Return one color per class; the first is black."""
    colors = _FIRST[:classes]
    for number in range(len(_FIRST), classes):
        # 0.381966 of a turn is the golden angle; hues that are multiples of it do not repeat.
        red, green, blue = colorsys.hsv_to_rgb(number * 0.381966 % 1.0, 0.65, 0.95)
        colors.append((round(255 * red), round(255 * green), round(255 * blue)))
    return colors


def color_mask(mask: Mask, classes: int) -> Picture:
    """Return a mask of class indices in color; values outside the classes are gray."""
    colors = np.array([*list_class_colors(classes), IGNORED], dtype=np.uint8)
    picture: Picture = colors[np.where((mask >= 0) & (mask < classes), mask, classes)]
    return picture


def overlay_mask(image: Picture, mask: Mask, classes: int) -> Picture:
    """Return the image with every class but the first blended in its color."""
    # The sum of two uint8 values overflows uint8.
    mixed = (image.astype(np.uint16) + color_mask(mask, classes)) // 2
    picture: Picture = np.where((mask > 0)[..., None], mixed, image).astype(np.uint8)
    return picture


def mark_mistakes(image: Picture, wrong: Mask) -> Picture:
    """Return the image in pale gray with mistakes marked in color."""
    gray = image.mean(-1, keepdims=True) / 2 + 127
    picture: Picture = np.where(wrong[..., None], MISTAKE, gray).astype(np.uint8)
    return picture


MOST_BYTES = 2**30
"""The most bytes to cache. Decoding a large photograph takes longer than training on its crop."""


def shrink_image_and_mask(image: Tensor, mask: Tensor, preprocessing: Preprocessing) -> tuple[Tensor, Tensor]:
    """Return image and mask in the size the model sees.

    The image is averaged; mask values are picked, since an average of class indices is another class.
    """
    small = preprocessing.resized(image)
    if small.shape == image.shape:
        return small, mask
    nearest = v2.InterpolationMode.NEAREST_EXACT
    return small, v2.functional.resize(mask.unsqueeze(0), list(small.shape[-2:]), nearest).squeeze(0)


class ShrunkSource(WrappedSource):
    """A source of images and masks in the size the model sees; those that were shrunk stay in memory while there is
    room.
    """

    def __init__(self, source: Source, preprocessing: Preprocessing) -> None:
        super().__init__(source)
        self.preprocessing = preprocessing
        self._kept: dict[int, Sample] = {}
        self._bytes = 0

    def read(self, index: int) -> Sample:
        """Return a sample in its reduced size, from memory where it was read before."""
        if index in self._kept:
            return self._kept[index]
        whole = self.source.read(index)
        image, mask = shrink_image_and_mask(whole["image"], whole["mask"], self.preprocessing)
        sample = {**whole, "image": image, "mask": mask}
        # Workers live for one epoch and read each sample once, so a cache in a worker would only cost memory.
        if image.shape != whole["image"].shape and get_worker_info() is None:
            self._keep(index, sample)
        return sample

    def _keep(self, index: int, sample: Sample) -> None:
        size = sum(part.nbytes for part in sample.values())
        if self._bytes + size <= MOST_BYTES:
            self._kept[index], self._bytes = sample, self._bytes + size


# Evaluate large images in overlapping tiles, joined without seams. Outputs are widened to fp32 for both tiles and whole
# images, because one batch may hold both.


AT_ONCE = 4
"""Tiles per forward pass: memory is bounded by the tile, not by the image."""
FAINTEST = 1e-3
"""The weight of a tile at its very edge, so that no pixel is divided by zero."""

Forward = Callable[[Tensor], Tensor]


def run_in_tiles(model: Forward, images: Tensor, tile: int, overlap: int, stride: int = 1) -> Tensor:
    """Return `model(images)` (batch × channels × height × width), in tiles where an image is larger than one.

    Tiles overlap by `overlap` pixels and are blended with a smooth window. Sizes are padded to a multiple of `stride`,
    and the padding is removed again. The result is fp32 or wider, with any number of tiles.
    """
    height, width = images.shape[-2:]
    if height <= tile and width <= tile:
        return _run_padded(model, images, stride)
    tops, lefts = _list_tile_offsets(height, tile, overlap), _list_tile_offsets(width, tile, overlap)
    places = list(itertools.product(range(len(images)), tops, lefts))
    high, wide = min(tile, height), min(tile, width)
    window = torch.outer(_build_tile_ramp(high, images), _build_tile_ramp(wide, images))
    total, weight = None, images.new_zeros(height, width, dtype=window.dtype)
    for begin in range(0, len(places), AT_ONCE):
        chunk = places[begin : begin + AT_ONCE]
        crops = torch.stack([images[n, :, y : y + high, x : x + wide] for n, y, x in chunk])
        outs = _run_padded(model, crops, stride)
        if total is None:
            total = outs.new_zeros(len(images), outs.shape[1], height, width)
        for (n, y, x), out in zip(chunk, outs, strict=True):
            total[n, :, y : y + high, x : x + wide] += out * window
            # All images of a batch have the same tiles, so the weights are summed for the first only.
            if n == 0:
                weight[y : y + high, x : x + wide] += window
    assert total is not None
    return total / weight


def run_without_padding(forward: Forward, images: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """Run `forward` on images padded to one size, each without its padding; the padded area of the result is zero.

    The prediction for an image therefore does not depend on the other images of its batch.
    """
    out = None
    # Images of one size share a forward pass.
    for size in sorted(set(sizes)):
        numbers = [n for n, other in enumerate(sizes) if other == size]
        part = widen(forward(images[numbers, :, : size[0], : size[1]]))
        if out is None:
            out = part.new_zeros(len(images), part.shape[1], *images.shape[-2:])
        out[numbers, :, : size[0], : size[1]] = part
    assert out is not None
    return out


def _run_padded(model: Forward, images: Tensor, stride: int) -> Tensor:
    height, width = images.shape[-2:]
    below, right = -height % stride, -width % stride
    if not (below or right):
        return widen(model(images))
    # Replicated borders: zeros would look like an edge to the model.
    return widen(model(F.pad(images, (0, right, 0, below), mode="replicate"))[..., :height, :width])


def _list_tile_offsets(length: int, tile: int, overlap: int) -> list[int]:
    """Return the tile offsets: evenly spaced, from the first pixel to the last."""
    if length <= tile:
        return [0]
    count = math.ceil((length - overlap) / (tile - overlap))
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def _build_tile_ramp(length: int, like: Tensor) -> Tensor:
    places = (torch.arange(length, device=like.device, dtype=torch.float32) + 0.5) / length
    return torch.sin(math.pi * places).square().clamp(min=FAINTEST)
