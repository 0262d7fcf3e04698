"""Describe the inputs and outputs of a model: enough to use its weights without halfstep."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's modes for images of so many channels."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a model: resized, cropped, scaled to 0 .. 1, normalized."""

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    """The shorter side after resizing (bilinear, antialiased); None keeps the size."""
    crop: int | None = None
    """The side of the square that is cut from the center; None keeps the whole image."""
    multiple: int = 1
    """Height and width must be multiples of this; the last row and column are repeated, and cropped from the output."""
    tile: int | None = None
    """Larger images are processed in tiles of this size with `overlap`; None processes whole images."""
    overlap: int = 0

    @property
    def order(self) -> str:
        """The order of the channels, in words."""
        return MODES.get(self.channels, f"{self.channels} channels, as they were in training")

    def __call__(self, image: Any) -> Tensor:
        """Return 1 × channels × height × width in fp32, from a path, a Pillow image, an array or a tensor."""
        from halfstep.data.image_io import (
            as_read,  # here, because these need Pillow and a signature does not
            scaled,
        )

        pixels = as_read(image, self.channels)
        # Few operations support 16-bit integers; 8-bit ones are rounded after resizing, as in training.
        pixels = pixels if pixels.dtype == torch.uint8 else scaled(pixels)
        return self._normalised(scaled(self._cut(pixels))).unsqueeze(0)

    def _cut(self, pixels: Tensor) -> Tensor:
        if self.resize is None and self.crop is None:
            return pixels
        from torchvision.transforms.v2 import functional as F  # type: ignore[import-untyped]

        pixels = pixels if self.resize is None else F.resize(pixels, [self.resize], antialias=True)
        cut: Tensor = pixels if self.crop is None else F.center_crop(pixels, [self.crop, self.crop])
        return cut

    def _normalised(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels - mean.to(pixels.device)) / std.to(pixels.device)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the conventions that PyTorch implies and other runtimes ask for."""
        words = {"layout": "NCHW", "dtype": "float32", "order": self.order, "scale": "0 to 1"}
        return {**asdict(self), **words, "interpolation": "bilinear, antialiased" if self.resize else None}


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model, and the names of its classes."""

    preprocessing: Preprocessing
    classes: list[str]
    answer: Literal["class", "mask"]
    """One class for the image, or one for each pixel."""
    outputs: int
    """Logits per image or pixel: one per class, or a single one that is above 0 for the second of two classes."""
    variable_size: bool = field(default=False)
    """Whether the model accepts images of any height and width."""

    @property
    def meaning(self) -> str:
        """The meaning of the output, in words."""
        shape = "N" if self.answer == "class" else "N × height × width"
        if self.outputs == 1:
            return (
                f"logits, N × 1 × height × width: above 0 is {self.classes[1]!r} (1), else {self.classes[0]!r} (0); "
                "sigmoid gives the chance"
            )
        layout = "N × classes" if self.answer == "class" else "N × classes × height × width"
        return f"logits, {layout}: the largest along axis 1 is the class ({shape}); softmax gives the chances"
