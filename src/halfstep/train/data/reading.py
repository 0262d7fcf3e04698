"""Image files to tensors: few formats, bounded memory, and a plain reason where one cannot be read.

What Pillow reads keeps its range: 8 bits per channel come as uint8, 16-bit grey (PNG, TIFF) as uint16, 32-bit TIFF as
float32. 16-bit *colour* PNG and TIFF come as 8 bits, because Pillow has no mode for them; 16 bits in several channels
are read from a TIFF with one grey page per channel, and so is any number of channels beyond four.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import MissingExtra
from halfstep.train.data.source import BadSample

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise MissingExtra(
        "reading images without the package pillow", allowed="pillow 12.2 or newer", do="pip install halfstep[vision]"
    ) from error

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")
MOST_PIXELS = 64 * 2**20
"""Over all channels' pages together; a photograph of 64 megapixels is 200 MB in memory."""
MOST_BYTES = 256 * 2**20
"""Of a file, as it is on disk."""

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_GREY = ("1", "L", "I;16", "I;16B", "I;16L", "I", "F")
_WIDE = _GREY[2:]


def read_image(file: str | Path | bytes, channels: int = 3, name: str = "") -> Tensor:
    """Channels × height × width, upright as its EXIF says, or BadSample.

    Grey becomes colour by repetition and colour becomes grey by its luminance; CMYK and palettes become RGB; alpha is
    dropped for one or three channels and added opaque for two or four.
    """
    with opened(file, name) as image:
        _bounded(image, channels)
        return _upright(_tensor(image, channels), image)


def scaled(image: Tensor) -> Tensor:
    """Floating numbers: integers by the range of their type, so 0 to 1; floating ones as they are."""
    if image.is_floating_point():
        return image
    return image.to(torch.float32) / float(torch.iinfo(image.dtype).max)


@contextmanager
def opened(file: str | Path | bytes, name: str = "") -> Iterator[Image.Image]:
    """An image whose header is read and whose pixels are not; all that fails inside is a BadSample."""
    name = name or (f"{len(file)} bytes" if isinstance(file, bytes) else str(file))
    try:
        with _stream(file) as stream, warnings.catch_warnings():
            # Damaged metadata is Pillow's to shrug at; an image that could fill the memory is not.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(stream, formats=FORMATS) as image:
                yield image
    except _Unreadable as error:
        raise BadSample(name, str(error)) from None
    except UnidentifiedImageError:
        raise BadSample(name, f"not an image of a kind that is read here ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadSample(name, f"more than {MOST_PIXELS:,} pixels") from None
    except BadSample:
        raise
    except Exception as error:
        # Decoders raise whatever their damaged input leads them to: struct.error, IndexError, SyntaxError, ...
        raise BadSample(name, f"cannot be decoded: {_short(error)}") from error


class _Unreadable(Exception):
    """The reason, in words."""


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words[:200] or type(error).__name__


@contextmanager
def _stream(file: str | Path | bytes) -> Iterator[IO[bytes]]:
    if isinstance(file, bytes):
        _sized(len(file))
        yield io.BytesIO(file)
        return
    try:
        # Opening a FIFO would otherwise wait for somebody to write into it.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise _Unreadable(error.strerror or type(error).__name__) from None
    with os.fdopen(handle, "rb", closefd=True) if _regular(handle) else _refused(handle) as stream:
        yield stream


def _regular(handle: int) -> bool:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        return False
    try:
        _sized(status.st_size)
    except _Unreadable:
        os.close(handle)
        raise
    return True


def _refused(handle: int) -> IO[bytes]:
    os.close(handle)
    raise _Unreadable("not a file but a folder, pipe or device")


def _sized(size: int) -> None:
    if size == 0:
        raise _Unreadable("empty, 0 bytes")
    if size > MOST_BYTES:
        raise _Unreadable(f"{size:,} bytes, more than {MOST_BYTES:,}")


def _bounded(image: Image.Image, channels: int) -> None:
    pages = channels if channels > 4 else 1
    if image.width * image.height * pages > MOST_PIXELS:
        raise _Unreadable(f"{image.width} × {image.height} pixels, more than {MOST_PIXELS:,}")


def _tensor(image: Image.Image, channels: int) -> Tensor:
    if channels > 1 and image.mode in _GREY and _has_page(image, 1):
        return _pages(image, channels)
    if channels not in _MODES:
        raise _Unreadable(f"one page of kind {image.mode}, where {channels} channels need a TIFF of as many pages")
    return _one_page(image, channels)


def _one_page(image: Image.Image, channels: int) -> Tensor:
    if image.mode in _WIDE:
        grey = _plane(image)
        opaque = _most(grey.dtype)
        colours = [grey] * (1 if channels <= 2 else 3)
        return torch.stack(colours + [torch.full_like(grey, opaque)] * (channels % 2 == 0))
    if image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode not in ("L", "LA", "RGB", "RGBA", "1"):
        image = image.convert("RGB")
    array = np.array(image.convert(_MODES[channels]))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1).contiguous()


def _most(dtype: torch.dtype) -> float:
    return 1.0 if dtype.is_floating_point else torch.iinfo(dtype).max


def _pages(image: Image.Image, channels: int) -> Tensor:
    planes = []
    size = image.size
    for page in range(channels):
        if not _has_page(image, page):
            raise _Unreadable(f"{page} pages, where {channels} channels need as many")
        image.seek(page)
        if image.size != size or image.mode not in _GREY:
            raise _Unreadable(f"page {page + 1} is not grey, or of another size than the first")
        planes.append(_plane(image))
    if _has_page(image, channels):
        raise _Unreadable(f"more than {channels} pages, where {channels} channels need as many")
    if len({plane.dtype for plane in planes}) > 1:
        raise _Unreadable("pages of different depth")
    return torch.stack(planes)


def _has_page(image: Image.Image, page: int) -> bool:
    """Looks one page ahead. Counting them all would walk a chain that the file decides the length of."""
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


def _plane(image: Image.Image) -> Tensor:
    """One grey page in its own depth."""
    if image.mode == "1":
        image = image.convert("L")
    array: np.ndarray[Any, Any] = np.array(image)
    if image.mode.startswith("I;16"):
        return torch.from_numpy(array.astype(np.uint16))
    return torch.from_numpy(array if image.mode == "L" else array.astype(np.float32))


def _upright(tensor: Tensor, image: Image.Image) -> Tensor:
    """EXIF's orientation, 1 to 8, as flips of the pixels that were read."""
    orientation = _orientation(image)
    if orientation not in range(2, 9):
        return tensor
    array = tensor.numpy()
    if orientation >= 5:
        array = array.transpose(0, 2, 1)
    if orientation in (2, 3, 6, 7):
        array = array[:, :, ::-1]
    if orientation in (3, 4, 7, 8):
        array = array[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(array))


def _orientation(image: Image.Image) -> int:
    """Damaged EXIF is common in photographs that are good otherwise; they lie as they lie."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        return 1
