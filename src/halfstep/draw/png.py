"""Pictures into files, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import MissingExtra, WrongUse
from halfstep.files import replacing

Array = np.ndarray[Any, Any]


def write_png(path: Path, picture: Array) -> None:
    """Replace `path` by a picture: height × width in grey, or height × width × 3 or 4 in colour, 8 bits each."""
    image = image_of(picture)
    with replacing(path) as draft:
        image.save(draft, format="PNG")


def image_of(picture: Array) -> Any:
    """Pillow's image of a picture."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(
            "writing a picture without the package pillow", allowed="pillow", do="pip install halfstep[vision]"
        ) from error
    layered = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))
    if picture.dtype != np.uint8 or not layered or picture.size == 0:
        raise WrongUse(
            f"a picture of shape {picture.shape} and type {picture.dtype}",
            allowed="uint8, height × width, or height × width × 3 or 4, not empty",
            do="scale it to 0 .. 255 and move its channels last",
        )
    return Image.fromarray(np.ascontiguousarray(picture))
