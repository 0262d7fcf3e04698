"""Masks to class numbers: 0/255, class numbers, palettes and colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import BadData, WrongUse
from halfstep.train.data.reading import MOST_PIXELS, opened
from halfstep.train.data.source import BadSample

Numbers = np.ndarray[Any, Any]
Palette = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Meaning:
    """What the values of a mask stand for."""

    classes: int = 2
    ignore_index: int | None = None
    """Pixels of this value belong to no class. With 255, a mask of 0 and 255 has no foreground."""
    palette: Palette | None = None
    """The colour of each class, as red, green, blue, for masks in colour."""

    def __post_init__(self) -> None:
        if self.palette is not None and len(self.palette) != self.classes:
            raise WrongUse(
                f"a palette of {len(self.palette)} colours for {self.classes} classes",
                allowed="one colour for each class",
                do="write data.palette: [[0, 0, 0], [255, 0, 0], ...]",
            )

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if max(self.classes - 1, self.ignore_index or 0) <= 255 else torch.int32


def mask_of(file: str | Path | bytes, meaning: Meaning, name: str) -> Tensor:
    """Height × width, a class number (or `ignore_index`) for each pixel; uint8, or int32 where that is too small.

    A file that cannot be read is a BadSample. A value that stands for no class is BadData: the mask says something
    that the recipe does not, and no other sample can stand in for that.
    """
    values = _values(file, meaning.palette is not None, name)
    if meaning.palette is not None:
        numbers: Numbers = _from_colours(values, meaning.palette, name)
    else:
        numbers = _from_values(_grey(values, name), meaning, name)
    return torch.from_numpy(numbers).to(meaning.dtype)


def _values(file: str | Path | bytes, colours: bool, name: str) -> Numbers:
    with opened(file, name) as image:
        if image.width * image.height > MOST_PIXELS:
            raise BadSample(name, f"{image.width} × {image.height} pixels, more than {MOST_PIXELS:,}")
        if colours or image.mode in ("RGBA", "CMYK", "YCbCr"):
            return np.array(image.convert("RGB"))
        # Of a palette the numbers are the classes, and the colours are for people.
        return np.array(image.convert("L") if image.mode in ("1", "LA") else image)


def _grey(values: Numbers, name: str) -> Numbers:
    if values.ndim == 2:
        return values
    first = values[..., :1]
    if not (values == first).all():
        colour = values[(values != first).any(-1)][0].tolist()
        raise BadData(
            f"the mask {name} is in colour, such as {colour}",
            allowed="a value for each pixel; or colours, with a palette that names them",
            do="write data.palette: [[0, 0, 0], [255, 0, 0], ...], a colour for each class",
        )
    return values[..., 0]


def _from_colours(values: Numbers, palette: Palette, name: str) -> Numbers:
    codes = (values.astype(np.int32) << np.array([16, 8, 0])).sum(-1)
    numbers = np.full(codes.shape, -1, np.int64)
    for number, (red, green, blue) in enumerate(palette):
        numbers[codes == (red << 16) + (green << 8) + blue] = number
    if (numbers < 0).any():
        colour = values[numbers < 0][0].tolist()
        raise BadData(
            f"the mask {name} has the colour {colour}, which data.palette does not name",
            allowed=", ".join(str(list(c)) for c in palette[:20]),
            do="add the colour to data.palette, or correct the mask",
        )
    return numbers


def _from_values(values: Numbers, meaning: Meaning, name: str) -> Numbers:
    present = np.unique(values)
    if meaning.classes <= 2 and meaning.ignore_index != 255 and set(present.tolist()) <= {0, 255}:
        return np.equal(values, 255).astype(np.int64)
    wrong = [v for v in present.tolist() if not 0 <= v < meaning.classes and v != meaning.ignore_index]
    if wrong:
        raise _outside(wrong, meaning, name)
    return values.astype(np.int64)


def _outside(wrong: list[Any], meaning: Meaning, name: str) -> BadData:
    allowed = f"0 to {meaning.classes - 1}"
    allowed += ", or a mask of 0 and 255 alone" if meaning.classes <= 2 and meaning.ignore_index != 255 else ""
    allowed += "" if meaning.ignore_index is None else f", and {meaning.ignore_index} for pixels of no class"
    many = f" and {len(wrong) - 1} other such values" if len(wrong) > 1 else ""
    lossy = "; masks must be PNG or TIFF, as JPEG changes values" if len(wrong) > 8 else ""
    return BadData(
        f"the mask {name} has the value {wrong[0]}{many}, which is none of the {meaning.classes} classes",
        allowed=allowed,
        do=f"set data.classes or data.ignore_index, or correct the mask{lossy}",
    )
