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
    """How an image becomes the input of a model: shrunk, resized, cropped, scaled to 0 .. 1, normalized.

    Training, validation, prediction, `halfstep.load`, exported code and its metadata all use the one of the task.
    """

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
    max_side: int | None = None
    """Images with a longer side are shrunk to it (bilinear, antialiased), and the logits enlarged again."""

    @property
    def order(self) -> str:
        """The order of the channels, in words."""
        return MODES.get(self.channels, f"{self.channels} channels, as in training")

    def __call__(self, image: Any) -> Tensor:
        """Return 1 × channels × height × width in fp32, from a path, a Pillow image, an array or a tensor."""
        # Here, because it needs Pillow and a signature does not.
        from halfstep.data.image_io import convert_to_image_tensor

        return self.normalized(self.resized(convert_to_image_tensor(image, self.channels))).unsqueeze(0)

    def shrunk_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width with at most `max_side` pixels on the longer side."""
        longer = max(height, width)
        if self.max_side is None or longer <= self.max_side:
            return height, width
        share = self.max_side / longer
        return max(1, round(height * share)), max(1, round(width * share))

    def resized(self, pixels: Tensor) -> Tensor:
        """Return an image (channels × height × width) in the size the model sees, before padding to a multiple."""
        from halfstep.data.image_io import resize_image

        pixels = resize_image(pixels, self.shrunk_size(*pixels.shape[-2:]))
        if self.resize is not None:
            high, wide = pixels.shape[-2:]
            short = min(high, wide)
            pixels = resize_image(pixels, (int(self.resize * high / short), int(self.resize * wide / short)))
        if self.crop is None:
            return pixels
        from torchvision.transforms.v2 import functional as F  # type: ignore[import-untyped]

        cut: Tensor = F.center_crop(pixels, [self.crop, self.crop])
        return cut

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return an image minus the mean, divided by the deviation; integers are scaled to 0 .. 1 first."""
        from halfstep.data.image_io import scale_to_unit_range

        mean, std = (torch.tensor(v, dtype=torch.float32, device=pixels.device) for v in (self.mean, self.std))
        return (scale_to_unit_range(pixels) - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)

    def as_dict(self) -> dict[str, object]:
        """Return plain data, with the conventions that PyTorch implies and other runtimes ask for."""
        words = {"layout": "NCHW", "dtype": "float32", "order": self.order, "scale": "0 to 1"}
        resizes = self.resize is not None or self.max_side is not None
        return {**asdict(self), **words, "interpolation": "bilinear, antialiased" if resizes else None}


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
        shrunk = self.answer == "mask" and self.preprocessing.max_side is not None
        enlarged = "; of a shrunk image they are enlarged to its own size first, bilinearly" if shrunk else ""
        if self.outputs == 1:
            return (
                f"logits, N × 1 × height × width: above 0 is {self.classes[1]!r} (1), else {self.classes[0]!r} (0); "
                f"apply a sigmoid for the probability{enlarged}"
            )
        layout = "N × classes" if self.answer == "class" else "N × classes × height × width"
        return (
            f"logits, {layout}: the largest along axis 1 is the class ({shape}); "
            f"apply a softmax for the probabilities{enlarged}"
        )
