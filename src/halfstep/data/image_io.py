"""Read image files to tensors: few formats, bounded memory, and a plain reason where one cannot be read.

The range is kept: 8 bits per channel become uint8, 16-bit gray (PNG, TIFF) uint16, 32-bit TIFF float32. 16-bit *color*
PNG and TIFF become 8 bits, because Pillow has no mode for them; 16 bits in several channels are read from a TIFF with
one gray page per channel, and so is any number of channels above four.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep.data.image_files import (
    MOST_PIXELS,
    Numbers,
    UnreadableFile,
    open_image,
    read_exif_orientation,
    read_mask_values,
)
from halfstep.errors import BadData, BadSample, WrongUse

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_GRAY = ("1", "L", "I;16", "I;16B", "I;16L", "I", "F")
_WIDE = _GRAY[2:]


def read_image(file: str | Path | bytes, channels: int = 3, name: str = "") -> Tensor:
    """Return channels × height × width, upright according to EXIF; raise BadSample if it cannot be read.

    Gray becomes color by repetition, color becomes gray by luminance; CMYK and palettes become RGB; alpha is dropped
    for one or three channels and added opaque for two or four.
    """
    with open_image(file, name) as image:
        return _read_upright_tensor(image, channels)


def convert_pillow_image(image: Image.Image, channels: int = 3) -> Tensor:
    """Return what `read_image` returns for the image's file; raise BadSample if it cannot be used."""
    try:
        return _read_upright_tensor(image, channels)
    except UnreadableFile as error:
        raise BadSample("a Pillow image", str(error)) from None


def _read_upright_tensor(image: Image.Image, channels: int) -> Tensor:
    _check_pixel_count(image, channels)
    return _apply_orientation(_convert_to_tensor(image, channels), image)


def scale_to_unit_range(image: Tensor) -> Tensor:
    """Return floating-point values: integers divided by the maximum of their dtype, others unchanged."""
    if image.is_floating_point():
        return image
    return image.to(torch.float32) / float(torch.iinfo(image.dtype).max)


def resize_image(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return channels × height × width in another size, bilinear and antialiased; 8 bits stay, others become floats.

    Pillow resizes each channel, as the code of an export does: torch rounds 8-bit values otherwise on each processor.
    """
    if tuple(image.shape[-2:]) == size:
        return image
    planes = (image if image.dtype == torch.uint8 else scale_to_unit_range(image).float()).cpu().numpy()
    small = [np.asarray(Image.fromarray(plane).resize(size[::-1], Image.Resampling.BILINEAR)) for plane in planes]
    return torch.from_numpy(np.stack(small)).to(image.device)


def _check_pixel_count(image: Image.Image, channels: int) -> None:
    pages = channels if channels > 4 else 1
    if image.width * image.height * pages > MOST_PIXELS:
        raise UnreadableFile(f"{image.width} × {image.height} pixels, more than {MOST_PIXELS:,}")


def _convert_to_tensor(image: Image.Image, channels: int) -> Tensor:
    # A multi-page gray TIFF has one page per channel; for one channel, the first page is read.
    if channels > 1 and image.mode in _GRAY and _has_page(image, 1):
        return _read_pages(image, channels)
    if channels not in _MODES:
        raise UnreadableFile(f"one page of kind {image.mode}, but {channels} channels need a TIFF of as many pages")
    return _read_one_page(image, channels)


def _read_one_page(image: Image.Image, channels: int) -> Tensor:
    if image.mode in _WIDE:
        gray = _read_gray_page(image)
        opaque = 1.0 if gray.dtype.is_floating_point else torch.iinfo(gray.dtype).max
        colors = [gray] * (1 if channels <= 2 else 3)
        return torch.stack(colors + [torch.full_like(gray, opaque)] * (channels % 2 == 0))
    if image.mode == "P" or "transparency" in image.info:
        # Through RGBA, so that two and four channels keep the transparency of a palette.
        image = image.convert("RGBA")
    if image.mode not in ("L", "LA", "RGB", "RGBA", "1"):
        image = image.convert("RGB")
    array = np.array(image.convert(_MODES[channels]))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1).contiguous()


def _read_pages(image: Image.Image, channels: int) -> Tensor:
    planes = []
    size = image.size
    for page in range(channels):
        if not _has_page(image, page):
            raise UnreadableFile(f"{page} pages, but {channels} channels need as many")
        image.seek(page)
        if image.size != size or image.mode not in _GRAY:
            raise UnreadableFile(f"page {page + 1} is not gray, or differs in size from the first")
        planes.append(_read_gray_page(image))
    if _has_page(image, channels):
        raise UnreadableFile(f"more than {channels} pages, but {channels} channels need as many")
    if len({plane.dtype for plane in planes}) > 1:
        raise UnreadableFile("pages of different depth")
    return torch.stack(planes)


def _has_page(image: Image.Image, page: int) -> bool:
    """Return whether a page exists. Counting all pages would follow a chain of a length that the file decides."""
    if image.format != "TIFF":
        return page == 0
    here = image.tell()
    try:
        image.seek(page)
    except EOFError:
        return False
    finally:
        image.seek(here)
    return True


def _read_gray_page(image: Image.Image) -> Tensor:
    """Return one gray page in its own depth."""
    if image.mode == "1":
        image = image.convert("L")
    array: np.ndarray[Any, Any] = np.array(image)
    if image.mode.startswith("I;16"):
        return torch.from_numpy(array.astype(np.uint16))
    return torch.from_numpy(array if image.mode == "L" else array.astype(np.float32))


def _apply_orientation(tensor: Tensor, image: Image.Image) -> Tensor:
    """Apply the EXIF orientation, 1 to 8, as flips of the pixels."""
    turned = read_exif_orientation(image)
    if turned not in range(2, 9):
        return tensor
    array = tensor.numpy()
    if turned >= 5:
        array = array.transpose(0, 2, 1)
    if turned in (2, 3, 6, 7):
        array = array[:, :, ::-1]
    if turned in (3, 4, 7, 8):
        array = array[:, ::-1]
    # NumPy's flips have negative strides, which torch does not accept.
    return torch.from_numpy(np.ascontiguousarray(array))


Palette = Sequence[Sequence[int]]


@dataclass(frozen=True)
class MaskClasses:
    """The classes that the values of a mask stand for."""

    classes: int = 2
    ignore_index: int | None = None
    """Pixels of this value belong to no class. With 255, a mask of 0 and 255 has no foreground."""
    palette: Palette | None = None
    """The color of each class as red, green, blue, for masks in color."""

    def __post_init__(self) -> None:
        if self.palette is not None and len(self.palette) != self.classes:
            raise WrongUse(
                f"a palette of {len(self.palette)} colors for {self.classes} classes",
                allowed="one color for each class",
                do="write data.palette: [[0, 0, 0], [255, 0, 0], ...]",
            )


def read_mask(file: str | Path | bytes, mask_classes: MaskClasses, name: str) -> Tensor:
    """Return height × width, a class number or `ignore_index` per pixel, as uint8, or int32 where that is too small.

    Raises BadSample if the file cannot be read, and BadData for a value without a class: the mask then contradicts
    the recipe, which no replacement sample can fix.
    """
    with open_image(file, name) as image:
        _check_pixel_count(image, 1)
        values = read_mask_values(image, mask_classes.palette is not None)
    if mask_classes.palette is not None:
        numbers = _convert_colors_to_classes(values, mask_classes.palette, name)
    else:
        numbers = _convert_values_to_classes(_convert_to_gray(values, name), mask_classes, name)
    largest = max(mask_classes.classes - 1, mask_classes.ignore_index or 0)
    return torch.from_numpy(numbers).to(torch.uint8 if largest <= 255 else torch.int32)


def _convert_to_gray(values: Numbers, name: str) -> Numbers:
    """Return one value per pixel; raise BadData for a mask in color."""
    if values.ndim == 2:
        return values
    first = values[..., :1]
    if not (values == first).all():
        color = values[(values != first).any(-1)][0].tolist()
        raise BadData(
            f"the mask {name} is in color, such as {color}",
            allowed="a value for each pixel; or colors, with a palette that names them",
            do="write data.palette: [[0, 0, 0], [255, 0, 0], ...], a color for each class",
        )
    return values[..., 0]


def _convert_colors_to_classes(values: Numbers, palette: Palette, name: str) -> Numbers:
    # One integer per color: comparing integers is cheaper than comparing triples for every class.
    codes = (values.astype(np.int32) << np.array([16, 8, 0])).sum(-1)
    numbers = np.full(codes.shape, -1, np.int64)
    for number, (red, green, blue) in enumerate(palette):
        numbers[codes == (red << 16) + (green << 8) + blue] = number
    if (numbers < 0).any():
        color = values[numbers < 0][0].tolist()
        raise BadData(
            f"the mask {name} has the color {color}, which data.palette does not name",
            allowed=", ".join(str(list(c)) for c in palette[:20]),
            do="add the color to data.palette, or correct the mask",
        )
    return numbers


def _convert_values_to_classes(values: Numbers, mask_classes: MaskClasses, name: str) -> Numbers:
    present = np.unique(values)
    if mask_classes.classes <= 2 and mask_classes.ignore_index != 255 and set(present.tolist()) <= {0, 255}:
        return np.equal(values, 255).astype(np.int64)
    wrong = [v for v in present.tolist() if not 0 <= v < mask_classes.classes and v != mask_classes.ignore_index]
    if wrong:
        raise _build_unknown_value_error(wrong, mask_classes, name)
    return values.astype(np.int64)


def _build_unknown_value_error(wrong: list[Any], mask_classes: MaskClasses, name: str) -> BadData:
    classes, ignored = mask_classes.classes, mask_classes.ignore_index
    allowed = f"0 to {classes - 1}"
    allowed += ", or a mask of 0 and 255 alone" if classes <= 2 and ignored != 255 else ""
    allowed += "" if ignored is None else f", and {ignored} for pixels of no class"
    many = f" and {len(wrong) - 1} other such values" if len(wrong) > 1 else ""
    lossy = "; masks must be PNG or TIFF, as JPEG changes values" if len(wrong) > 8 else ""
    return BadData(
        f"the mask {name} has the value {wrong[0]}{many}, which is none of the {classes} classes",
        allowed=allowed,
        do=f"set data.classes or data.ignore_index, or correct the mask{lossy}",
    )


ALLOWED = "a path, a Pillow image, an array of height × width × channels, or a tensor of channels × height × width"
FAR_ABOVE_1 = 4.0
"""A filter that overshoots gives values a little above 1, never this far."""


def convert_to_image_tensor(image: Any, channels: int) -> Tensor:
    """Return channels × height × width: integers in their own range, floating-point values from 0 to 1.

    Raises BadSample for an unreadable path, and BadData for anything else that does not fit.
    """
    if isinstance(image, str | PathLike):
        return read_image(str(image), channels)
    if isinstance(image, Image.Image):
        return convert_pillow_image(image, channels)
    if isinstance(image, np.ndarray):
        return _check_pixels(_convert_array(image), channels, image)
    if isinstance(image, Tensor):
        return _check_pixels(image[None] if image.ndim == 2 else image, channels, image)
    raise BadData(f"a {type(image).__name__} for an image", allowed=ALLOWED, do="give the path of a file")


def _convert_array(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor with channels first; Pillow, OpenCV and imageio have rows and columns first."""
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
    if array.ndim == 2:
        array = array[..., None]
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, -1, 0))) if array.ndim == 3 else torch.empty(0)


def _check_pixels(pixels: Tensor, channels: int, given: Any) -> Tensor:
    shape = " × ".join(map(str, given.shape))
    wanted = f"channels × height × width with {channels} channels"
    wanted = wanted if isinstance(given, Tensor) else f"height × width × channels with {channels} channels"
    if pixels.ndim != 3 or not pixels.numel():
        raise BadData(f"an image of shape {shape}", allowed=wanted, do="give one image at a time")
    if len(pixels) != channels:
        swapped = given.shape[-1 if isinstance(given, Tensor) else 0] == channels
        hint = "move its channels to the front" if isinstance(given, Tensor) else "move its channels to the end"
        raise BadData(
            f"an image of shape {shape}, so {len(pixels)} channels",
            allowed=wanted,
            do=hint if swapped else f"convert it to {channels} channels, as the model was trained with",
        )
    if not pixels.is_floating_point() and pixels.dtype not in (torch.uint8, torch.uint16):
        raise BadData(
            f"an image of {pixels.dtype}",
            allowed="uint8, uint16, or floating numbers, from 0 to 1 for photographs",
            do="convert it to uint8",
        )
    # No error, since float files may hold anything, but usually a division is missing.
    if pixels.is_floating_point() and float(pixels.max()) > FAR_ABOVE_1:
        text = f"floating numbers up to {float(pixels.max()):g} are used unchanged; a photograph has 0 to 1"
        warnings.warn(f"{text}: divide it by 255, or give uint8", UserWarning, stacklevel=4)
    return pixels
