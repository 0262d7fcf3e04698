"""Open image files safely: few formats, bounded memory, and a plain reason where one cannot be read.

Imports no torch, so that a folder can be checked before torch is loaded.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from halfstep.errors import BadData, BadSample, MissingExtra, Unsafe

if TYPE_CHECKING:
    import numpy as np


DEEPEST = 8
"""Levels of nested folders; more is a loop, or not a data set."""


def require_folder(root: str | Path, what: str) -> Path:
    """Return the folder; raise BadData if it does not exist."""
    folder = Path(root)
    if not folder.is_dir():
        raise BadData(
            f"{what} {folder} {'is a file' if folder.exists() else 'does not exist'}",
            allowed="a folder with your data",
            do="look for it with ls, and correct the path",
        )
    return folder


def list_image_files(root: Path, under: str = "") -> list[str]:
    """Return the paths below `root` of the images in its folder `under`."""
    return find_files(root, SUFFIXES, under)


def find_files(root: Path, suffixes: tuple[str, ...], under: str = "") -> list[str]:
    """Return the sorted paths below `root` of files with these suffixes in its folder `under`, without hidden ones."""
    return sorted(
        path
        for path in _list_files_recursively(root, under, os.path.realpath(root), 0)
        if path.lower().endswith(suffixes)
    )


def list_folders(root: Path) -> list[str]:
    """Return the sorted names of the folders in `root`, without hidden ones."""
    boundary = os.path.realpath(root)
    with _scan_folder(root) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and _is_inside(e, boundary) and e.is_dir())


def _list_files_recursively(root: Path, under: str, boundary: str, depth: int) -> list[str]:
    if depth > DEEPEST:
        raise BadData(f"{root / under} is {depth} folders deep", allowed=f"at most {DEEPEST}", do="check for loops")
    found = []
    with _scan_folder(root / under) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not _is_inside(entry, boundary):
                continue
            path = os.path.join(under, entry.name)
            if entry.is_dir():
                found += _list_files_recursively(root, path, boundary, depth + 1)
            else:
                found.append(path)
    return found


@contextmanager
def _scan_folder(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise BadData(
            f"{folder} cannot be listed: {error.strerror or error}",
            allowed="folders that this user can read",
            do=f"chmod -R u+rX {folder}, or remove it",
        ) from None


def _is_inside(entry: os.DirEntry[str], boundary: str) -> bool:
    """Return True, or raise Unsafe for a link that leads out of the folder. Only links need a system call."""
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        # With the separator, so that /data2 is not inside of /data.
        if not (target + os.sep).startswith(boundary + os.sep):
            raise Unsafe(
                f"{entry.path} is a link to {target}",
                allowed=f"files in {boundary}",
                do="copy the file there, or move the data and its links under one folder",
            )
    return True


try:
    from PIL import Image, UnidentifiedImageError
    from PIL.JpegImagePlugin import JpegImageFile
except ImportError as error:
    raise MissingExtra(
        "reading images without the package pillow",
        allowed="pillow 12.2 or newer",
        do="pip install 'halfstep[train,vision]'",
    ) from error

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")
MOST_PIXELS = 64 * 2**20
"""Pixels over the pages of all channels; a photograph of 64 megapixels takes 200 MB."""
MOST_BYTES = 256 * 2**20
"""Bytes of a file on disk."""
MOST_SCANS = 100
"""Scans of a JPEG; encoders write about ten for a progressive one."""


Numbers: TypeAlias = "np.ndarray[Any, Any]"


@contextmanager
def open_image(file: str | Path | bytes, name: str = "") -> Iterator[Image.Image]:
    """Open an image and read its header, not its pixels; every failure inside is a BadSample."""
    name = name or (f"{len(file)} bytes" if isinstance(file, bytes) else str(file))
    try:
        with open_regular_file(file) as stream, warnings.catch_warnings():
            # Damaged metadata may be ignored; an image that could exhaust memory may not.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Only these formats: every further decoder of Pillow is attack surface.
            with Image.open(stream, formats=FORMATS) as image:
                if isinstance(image, JpegImageFile):
                    _check_scans(image, stream)
                yield image
    except UnreadableFile as error:
        raise BadSample(name, str(error)) from None
    except UnidentifiedImageError:
        raise BadSample(name, f"not an image of a supported format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadSample(name, f"more than {MOST_PIXELS:,} pixels") from None
    except BadSample:
        raise
    except Exception as error:
        # Decoders raise anything on damaged input: struct.error, IndexError, SyntaxError, ...
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadSample(name, f"cannot be decoded: {words}") from error


_SCAN, _END = 0xDA, 0xD9
_SCANS = re.compile(rb"\xff\xda")
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
"""The marker of a segment; among the pixels 0xff is followed by 0 or by a restart marker."""


def _check_scans(image: JpegImageFile, stream: IO[bytes]) -> None:
    """Raise Unreadable for a JPEG of more than MOST_SCANS scans: each costs a pass over all pixels."""
    place = stream.tell()
    try:
        if _has_one_scan(image, stream, place):
            return
        stream.seek(0)
        content = stream.read()
    finally:
        stream.seek(place)
    # The quick count includes bytes of thumbnails, profiles and appended videos, which are not decoded.
    if len(_SCANS.findall(content)) > MOST_SCANS and _has_more_scans(content):
        raise UnreadableFile(f"a JPEG of more than {MOST_SCANS} scans, each of which needs a pass over all pixels")


def _has_one_scan(image: JpegImageFile, stream: IO[bytes], place: int) -> bool:
    """Return whether the first scan, whose header ends at `place`, is for all components: nothing after it is decoded.

    Most photographs are such, and need not be read for it.
    """
    if "progressive" in image.info:
        return False
    length = 2 * image.layers + 6
    stream.seek(max(0, place - length - 2))
    start = b"\xff\xda" + length.to_bytes(2, "big") + bytes([image.layers])
    return stream.read(length + 2).startswith(start)


def _has_more_scans(content: bytes) -> bool:
    """Return whether the first image of a JPEG file has more than MOST_SCANS scans."""
    scans, place = 0, 2
    while scans <= MOST_SCANS and (found := _MARKER.search(content, place)) and found[1][0] != _END:
        scans += found[1][0] == _SCAN
        # The segment's length counts its own two bytes; the search goes over the pixels after a scan's header.
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return scans > MOST_SCANS


class UnreadableFile(Exception):
    """A file that cannot be read, with the reason."""


@contextmanager
def open_regular_file(file: str | Path | bytes) -> Iterator[IO[bytes]]:
    """Open a regular file that is neither empty nor too large; raise Unreadable for any other."""
    if isinstance(file, bytes):
        _check_file_size(len(file), MOST_BYTES)
        yield io.BytesIO(file)
        return
    try:
        # Opening a FIFO would otherwise wait for a writer.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise UnreadableFile(error.strerror or type(error).__name__) from None
    try:
        check_regular_file(os.fstat(handle), MOST_BYTES)
    except UnreadableFile:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb") as stream:
        yield stream


def check_regular_file(status: os.stat_result, most: int) -> None:
    """Raise Unreadable for anything but a regular file, for an empty file, and for one of more than `most` bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile("not a file but a folder, pipe or device")
    _check_file_size(status.st_size, most)


def _check_file_size(size: int, most: int) -> None:
    if size == 0:
        raise UnreadableFile("empty, 0 bytes")
    if size > most:
        raise UnreadableFile(f"{size:,} bytes, more than {most:,}")


def read_exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where EXIF is damaged, which is common."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:
        return 1


def read_mask_values(image: Any, colors: bool = False) -> Numbers:
    """Return the values of an open mask, or its colors. Of a palette, the numbers count and not the colors."""
    import numpy as np  # here, because listing and opening files need none

    if colors or image.mode in ("RGBA", "CMYK", "YCbCr"):
        return np.array(image.convert("RGB"))
    return np.array(image.convert("L") if image.mode in ("1", "LA") else image)
