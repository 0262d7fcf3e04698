"""Images larger than a model should see at once: overlapping tiles, joined without seams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.precision import widen

AT_ONCE = 4
"""Tiles in one forward pass: memory is bounded by the tile, not by the image."""
FAINTEST = 1e-3
"""A tile's weight at its very edge, so that no pixel is divided by nothing."""

Forward = Callable[[Tensor], Tensor]


def tiled(model: Forward, images: Tensor, tile: int, overlap: int, stride: int = 1) -> Tensor:
    """`model(images)`, batch × channels × height × width, in tiles where an image is larger than one.

    Tiles share `overlap` pixels with their neighbours, where a smooth window leads from one to the other. `stride` is
    what the model needs sizes to be a multiple of; what is added for it is taken away again.
    """
    height, width = images.shape[-2:]
    if height <= tile and width <= tile:
        return _padded(model, images, stride)
    tops, lefts = _starts(height, tile, overlap), _starts(width, tile, overlap)
    places = list(itertools.product(range(len(images)), tops, lefts))
    high, wide = min(tile, height), min(tile, width)
    window = torch.outer(_ramp(high, images), _ramp(wide, images))
    total, weight = None, images.new_zeros(height, width, dtype=window.dtype)
    for chunk in _chunks(places):
        crops = torch.stack([images[n, :, y : y + high, x : x + wide] for n, y, x in chunk])
        outs = widen(_padded(model, crops, stride))
        if total is None:
            total = outs.new_zeros(len(images), outs.shape[1], height, width)
        for (n, y, x), out in zip(chunk, outs, strict=True):
            total[n, :, y : y + high, x : x + wide] += out * window
            if n == 0:
                weight[y : y + high, x : x + wide] += window
    assert total is not None
    return total / weight


def each_in_its_size(forward: Forward, images: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """`forward` on images that were padded to one size, each without its padding; zeros where the padding was.

    So what a model says of an image does not depend on the images that shared its batch.
    """
    out = None
    for size in sorted(set(sizes)):
        numbers = [n for n, other in enumerate(sizes) if other == size]
        part = forward(images[numbers, :, : size[0], : size[1]])
        if out is None:
            out = part.new_zeros(len(images), part.shape[1], *images.shape[-2:])
        out[numbers, :, : size[0], : size[1]] = part
    assert out is not None
    return out


def _padded(model: Forward, images: Tensor, stride: int) -> Tensor:
    height, width = images.shape[-2:]
    below, right = -height % stride, -width % stride
    if not (below or right):
        return model(images)
    return model(F.pad(images, (0, right, 0, below), mode="replicate"))[..., :height, :width]


def _starts(length: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin: evenly, the first at the beginning and the last ending at the end."""
    if length <= tile:
        return [0]
    count = math.ceil((length - overlap) / (tile - overlap))
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def _ramp(length: int, like: Tensor) -> Tensor:
    places = (torch.arange(length, device=like.device, dtype=torch.float32) + 0.5) / length
    return torch.sin(math.pi * places).square().clamp(min=FAINTEST)


def _chunks(places: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    for begin in range(0, len(places), AT_ONCE):
        yield places[begin : begin + AT_ONCE]
