"""Embed pictures of a run's folder in a page: the newest, the best and the first, smaller where room is short."""

from __future__ import annotations

import io
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from halfstep.page import Picture

FOLDER = "pictures"
MOST_BYTES = 32 * 2**20
"""The largest file that is opened."""
MOST_PIXELS = 40_000_000
WIDTHS = (1400, 1000, 700, 500)
"""Pixels to which a picture is made smaller, until it fits."""
_NAME = re.compile(r"epoch-([0-9]{4,9})\.png")


def embed_pictures(run: Path, best_epoch: float, room: int) -> tuple[list[Picture], list[str]]:
    """Return up to three pictures that together fit into `room` bytes of a page, and the reasons for omitted ones."""
    chosen = _pick_pictures(run / FOLDER, best_epoch)
    found: list[Picture] = []
    left_out: list[str] = []
    for number, (caption, path) in enumerate(chosen):
        share = (room - sum(_compute_embedded_bytes(one.data) for one in found)) // (len(chosen) - number)
        try:
            found.append(_embed_picture(caption, path, share))
        except (OSError, ValueError, SyntaxError, ImportError) as error:
            left_out.append(f"{path.name}: {error or type(error).__name__}")
    return found, left_out


def _pick_pictures(folder: Path, best_epoch: float) -> list[tuple[str, Path]]:
    files = dict(sorted(_iterate_picture_files(folder)))
    if not files:
        return []
    first, last = min(files), max(files)
    names = {last: f"last, epoch {last}"}
    if best_epoch in files and int(best_epoch) != last:
        names[int(best_epoch)] = f"best, epoch {int(best_epoch)}"
    names.setdefault(first, f"first, epoch {first}")
    return [(caption, files[epoch]) for epoch, caption in names.items()]


def _iterate_picture_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the pictures that the run itself wrote; a link could lead anywhere."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and stat.S_ISREG(path.lstat().st_mode):
            yield int(match[1]), path


def _embed_picture(caption: str, path: Path, room: int) -> Picture:
    """Return the picture in at most `room` bytes; raise ValueError if that is too little or the file too large."""
    from PIL import Image

    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
    # One format only: a page must not run a decoder that no picture of ours needs.
    with Image.open(path, formats=("PNG",)) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width} × {image.height} pixels")
        plain = image.convert("RGB")
    for width in WIDTHS:
        smaller = plain
        if plain.width > width:
            smaller = plain.resize((width, max(1, round(plain.height * width / plain.width))))
        format, data = _encode_smallest(smaller)
        if _compute_embedded_bytes(data) <= room:
            return Picture(caption, data, format, smaller.width, smaller.height, f"samples of the run, {caption}")
    raise ValueError("no room was left for it")


def _compute_embedded_bytes(data: bytes) -> int:
    """Return the bytes that a picture takes in a page, as base64."""
    return 4 * len(data) // 3 + 40


def _encode_smallest(image: Any) -> tuple[Literal["png", "jpeg"], bytes]:
    """Return the picture without loss, or as JPEG where that is far smaller: masks stay sharp, photographs small."""
    exact, lossy = io.BytesIO(), io.BytesIO()
    image.save(exact, "PNG")
    image.save(lossy, "JPEG", quality=88)
    if len(exact.getvalue()) <= 3 * len(lossy.getvalue()):
        return "png", exact.getvalue()
    return "jpeg", lossy.getvalue()
