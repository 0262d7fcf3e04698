"""Pictures that follow one another in a file, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfstep.draw.png import Array, image_of
from halfstep.errors import WrongUse
from halfstep.files import replacing

SHORTEST, LONGEST = 20, 60_000
"""Milliseconds that a picture may stay: what is shorter is shown slowly by browsers, and a GIF counts hundredths."""


def write_gif(path: Path, pictures: Sequence[Array], milliseconds: int = 150) -> None:
    """Replace `path` by an animation that begins again at its end: pictures as `write_png` takes them, of one size."""
    images = [image_of(picture).convert("RGB") for picture in pictures]
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
    with replacing(path) as draft:
        images[0].save(
            draft, format="GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0, optimize=False
        )
