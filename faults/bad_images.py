"""Image files that are damaged, or that would fill the memory if they were decoded."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image


def picture(number: int = 0, size: int = 16) -> Image.Image:
    """A small one that is good."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    into = io.BytesIO()
    image.save(into, kind)
    return into.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """A piece of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG file with one more piece, after its header."""
    return png[:33] + chunk(kind, content) + png[33:]


def _cut(kind: str) -> bytes:
    image = picture(7, 64)
    whole = encoded(image.convert("CMYK") if kind == "CMYK" else image, "JPEG" if kind == "CMYK" else kind)
    return whole[: len(whole) // 2]


def _bad_checksum() -> bytes:
    png = bytearray(encoded(picture(3)))
    png[-20] ^= 0xFF
    return bytes(png)


def _huge_text() -> bytes:
    return with_chunk(encoded(picture()), b"zTXt", b"Comment\0\0" + zlib.compress(bytes(8 * 2**20)))


DAMAGED: dict[str, Callable[[], bytes]] = {
    "cut.jpg": lambda: _cut("JPEG"),
    "cut.png": lambda: _cut("PNG"),
    "cut_cmyk.jpg": lambda: _cut("CMYK"),
    "empty.png": bytes,
    "wrong_magic.png": lambda: b"GIF89a" + encoded(picture())[6:],
    "bad_checksum.png": _bad_checksum,
    "huge_text.png": _huge_text,
}


def _png_header(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


def black_png(side: int) -> bytes:
    """Real and whole: a side of 14,000 is 0.2 MB on disk and 196 MB decoded."""
    packer = zlib.compressobj(1)
    row = bytes(1 + side)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return _png_header(side, side) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def _jpeg() -> bytes:
    """A header that says 65,500 × 65,500."""
    jpeg = bytearray(encoded(picture(), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(jpeg)


def _tiff() -> bytes:
    """A directory that says 100,000 × 100,000, and packed strips that are not there."""
    tags = [(256, 4, 100_000), (257, 4, 100_000), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (279, 4, 10**9)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


def _webp() -> bytes:
    """A canvas of 16,383 × 16,383 around a small picture."""
    small = encoded(picture(), "WEBP")[12:]
    side = struct.pack("<I", 16382)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + side + side + small
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _fits() -> bytes:
    """Astronomers' format, packed by gzip: Pillow would unpack it whole, so it is not among those that are read."""
    cards = ["SIMPLE  = T", "BITPIX  = 8", "NAXIS   = 2", "NAXIS1  = 14000", "NAXIS2  = 14000", "END"]
    return gzip.compress("".join(card.ljust(80) for card in cards).ljust(2880).encode() + bytes(2**24))


BOMBS: dict[str, Callable[[], bytes]] = {
    "black.png": lambda: black_png(14_000),
    "header.png": lambda: _png_header(60_000, 60_000) + chunk(b"IDAT", b"") + chunk(b"IEND", b""),
    "header.jpg": _jpeg,
    "directory.tif": _tiff,
    "canvas.webp": _webp,
    "sky.png": _fits,
}
