"""Write pictures to files atomically; lettering, grids and animations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import MissingExtra, WrongUse
from halfstep.files import replace_file

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise MissingExtra(
        "writing into a picture without the package pillow", allowed="pillow", do="pip install 'halfstep[vision]'"
    ) from error

Array = np.ndarray[Any, Any]


def write_png(path: Path, picture: Array) -> None:
    """Replace `path` by a uint8 picture: height × width in gray, or height × width × 3 or 4 in color.

    Raise `WrongUse` for another shape or dtype.
    """
    image = build_pillow_image(picture)
    with replace_file(path) as draft:
        image.save(draft, format="PNG")


def build_pillow_image(picture: Array) -> Any:
    """Return a picture as a Pillow image. Raise `WrongUse` for another shape or dtype."""
    layered = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))
    if picture.dtype != np.uint8 or not layered or picture.size == 0:
        raise WrongUse(
            f"a picture of shape {picture.shape} and type {picture.dtype}",
            allowed="uint8, height × width, or height × width × 3 or 4, not empty",
            do="scale it to 0 .. 255 and move its channels last",
        )
    return Image.fromarray(np.ascontiguousarray(picture))


Color = tuple[int, int, int]
INK, PALE, PAPER = (24, 24, 27), (105, 105, 112), (255, 255, 255)
DOTS = "…"


@functools.cache
def load_builtin_font(size: int) -> Any:
    """Return Pillow's built-in font; a build without FreeType has it in one size, for Latin-1 only."""
    try:
        return ImageFont.load_default(size)
    except (ImportError, OSError):
        return ImageFont.load_default_imagefont()


def compute_text_width(text: str, size: int) -> int:
    """Return the width of a text in pixels, rounded up."""
    return -int(-load_builtin_font(size).getlength(_replace_unknown_letters(text, size)) // 1)


def shorten_to_width(text: str, size: int, width: int) -> str:
    """Return the text where it fits into `width`, otherwise its start and end, which distinguish file names."""
    if compute_text_width(text, size) <= width:
        return text
    # Letters differ in width, so the number that fits is searched, not computed.
    fits, most = 0, len(text)  # binary search: `fits` letters fit, `most` do not
    while most - fits > 1:
        middle = (fits + most) // 2
        fits, most = (
            (middle, most) if compute_text_width(_shorten_text(text, middle), size) <= width else (fits, middle)
        )
    return _shorten_text(text, fits)


def _shorten_text(text: str, kept: int) -> str:
    first = kept // 3
    return f"{text[:first]}{DOTS}{text[len(text) - (kept - first) :]}"


def draw_text_line(text: str, size: int, width: int, color: Color = INK, background: Color = PAPER) -> Array:
    """Draw one line of text, at most `width` wide, as a picture of the text's own width."""
    line = _replace_unknown_letters(shorten_to_width(text, size, width), size)
    image = Image.new(
        "RGB", (max(1, min(width, compute_text_width(line, size) + 1)), compute_line_height(size)), background
    )
    anchor = "lm" if isinstance(load_builtin_font(size), ImageFont.FreeTypeFont) else None
    ImageDraw.Draw(image).text(
        (0, compute_line_height(size) // 2), line, fill=color, font=load_builtin_font(size), anchor=anchor
    )
    return np.asarray(image)


def compute_line_height(size: int) -> int:
    """Return the height of a line in pixels."""
    return round(size * 1.4)


def _replace_unknown_letters(text: str, size: int) -> str:
    """Return a line without control characters; the bitmap font replaces unknown letters by question marks."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    if isinstance(load_builtin_font(size), ImageFont.FreeTypeFont):
        return line
    return line.encode("latin-1", "replace").decode("latin-1")


def join_picture_grid(rows: Sequence[Sequence[Array]], gap: int = 4, background: int = 255) -> Array:
    """Join pictures in rows and columns, each as large as its largest; gray ones become color.

    Raise `WrongUse` for no pictures, or for another shape or dtype.
    """
    cells = [[_to_rgb(picture) for picture in row] for row in rows if len(row)]
    if not cells:
        raise WrongUse("a grid of no pictures", allowed="at least one picture", do="give it rows of pictures")
    heights = [max(picture.shape[0] for picture in row) for row in cells]
    columns = max(len(row) for row in cells)
    widths = [max(row[n].shape[1] for row in cells if n < len(row)) for n in range(columns)]
    size = (sum(heights) + gap * (len(heights) - 1), sum(widths) + gap * (columns - 1), 3)
    out = np.full(size, background, dtype=np.uint8)
    top = 0
    for row, height in zip(cells, heights, strict=True):
        left = 0
        for picture, width in zip(row, widths, strict=False):
            out[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
            left += width + gap
        top += height + gap
    return out


def _to_rgb(picture: Array) -> Array:
    if picture.dtype != np.uint8 or not (picture.ndim == 2 or picture.shape[2:] == (3,)):
        raise WrongUse(
            f"a picture of shape {picture.shape} and type {picture.dtype} in a grid",
            allowed="uint8, height × width or height × width × 3",
            do="scale it to 0 .. 255 and move its channels last",
        )
    return np.repeat(picture[..., None], 3, axis=2) if picture.ndim == 2 else picture


def enlarge_picture(picture: Array, least: int = 128) -> Array:
    """Repeat pixels so that the picture is at least `least` high."""
    times = max(1, -(-least // picture.shape[0]))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


SHORTEST, LONGEST = 20, 60_000
"""Milliseconds per frame: browsers slow down shorter ones, and a GIF counts in hundredths of a second."""


def write_gif(path: Path, pictures: Sequence[Array], milliseconds: int = 150) -> None:
    """Replace `path` by a looping animation of pictures of one size, each as `write_png` takes it.

    Raise `WrongUse` for no pictures, different sizes, or a duration outside the limits.
    """
    images = [build_pillow_image(picture).convert("RGB") for picture in pictures]
    if not images or len({image.size for image in images}) > 1:
        sizes = sorted({image.size for image in images})
        raise WrongUse(
            f"an animation of {len(images)} pictures, of sizes {sizes}",
            allowed="at least one picture, all of the same size",
            do="give it pictures of one clip",
        )
    if not SHORTEST <= milliseconds <= LONGEST:
        raise WrongUse(
            f"{milliseconds} milliseconds for each picture of an animation",
            allowed=f"{SHORTEST} to {LONGEST}",
            do="write 150",
        )
    with replace_file(path) as draft:
        images[0].save(
            draft, format="GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0, optimize=False
        )
