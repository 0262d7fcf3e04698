"""Photographs as people have them: drawn houses among trees and roads, in every size, kind and name."""

from __future__ import annotations

import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

NAMES = ("IMG_{0:04}.JPG", "DSC{0:05}.jpg", "house {0} (1).png", "Straße_{0}.jpg", "été #{0}.png", "scan-{0}.final.png")
TURNED = {3: 180, 6: 90, 8: 270}
"""EXIF's orientations, and by how many degrees the file is turned counter-clockwise from what people see."""
ORIENTATION = 0x0112


def photographs(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """Writes `images` and `masks`, one of each for every photograph, with files beside them that are none."""
    draw = random.Random(seed)
    images, masks = folder / "images", folder / "masks"
    images.mkdir(parents=True)
    masks.mkdir()
    for number in range(count):
        photograph, mask = scene(draw, size=(draw.randint(96, 260), draw.randint(96, 260)))
        name = NAMES[number % len(NAMES)].format(number)
        save_photograph(photograph, images / name, number)
        stem = Path(name).stem
        save_mask(mask, masks / (f"{stem}_mask.png" if number % 5 == 4 else f"{stem}.png"), number)
    (images / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (images / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    return folder


def classes(folder: Path, of_each: int = 12, seed: int = 1) -> Path:
    """Writes a folder for each of five shapes."""
    draw = random.Random(seed)
    for name in ("circle", "cross", "square", "stripes", "triangle"):
        (folder / name).mkdir(parents=True)
        for number in range(of_each):
            side = draw.randint(48, 120)
            picture = ground(draw, (side, side + draw.randint(0, 40)))
            _shape(draw, picture, name)
            file = NAMES[number % len(NAMES)].format(number)
            save_photograph(picture, folder / name / file, number)
    return folder


def scene(draw: random.Random, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """A photograph from the air, and the mask of its houses: 0 and 255."""
    photograph, mask = ground(draw, size), Image.new("L", size, 0)
    pen, mask_pen = ImageDraw.Draw(photograph), ImageDraw.Draw(mask)
    for _ in range(draw.randint(4, 9)):
        x, y, r = draw.randint(0, size[0]), draw.randint(0, size[1]), draw.randint(4, 14)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=(30, draw.randint(70, 110), 30))
    pen.line((0, draw.randint(0, size[1]), size[0], draw.randint(0, size[1])), fill=(120, 120, 125), width=7)
    for _ in range(draw.randint(2, 5)):
        corners = _house(draw, size)
        pen.polygon(corners, fill=(draw.randint(170, 230), draw.randint(60, 100), draw.randint(40, 80)))
        mask_pen.polygon(corners, fill=255)
    return photograph.filter(ImageFilter.GaussianBlur(0.7)), mask


def ground(draw: random.Random, size: tuple[int, int]) -> Image.Image:
    noise = Image.frombytes("L", (16, 16), draw.randbytes(256)).resize(size, Image.Resampling.BICUBIC)
    grass, earth = Image.new("RGB", size, (90, 130, 70)), Image.new("RGB", size, (130, 120, 90))
    return Image.composite(grass, earth, noise)


def save_photograph(picture: Image.Image, path: Path, number: int) -> None:
    """JPEG files are turned, gray or CMYK now and then; PNG files are transparent, gray or of a palette."""
    if path.suffix.lower() == ".jpg":
        exif = Image.Exif()
        if orientation := (1, 6, 8, 3)[number % 4] if number % 3 == 0 else 0:
            exif[ORIENTATION] = orientation
            picture = picture.rotate(TURNED.get(orientation, 0), expand=True)
        kind = {7: "L", 11: "CMYK"}.get(number % 13, "RGB")
        picture.convert(kind).save(path, "JPEG", quality=92, exif=exif)
    else:
        kind = ("RGB", "RGBA", "L", "P")[number // 2 % 4]
        picture.convert(kind).save(path)


def save_mask(mask: Image.Image, path: Path, number: int) -> None:
    """The same mask as 0 and 255, as one bit a pixel, as a palette's numbers, or as class numbers."""
    numbers = mask.point(lambda value: value // 255)
    if number % 7 == 3:
        mask = mask.convert("1")
    elif number % 7 == 5:
        mask = numbers.convert("P")
        mask.putpalette([0, 0, 0, 200, 30, 30])
    elif number % 7 == 6:
        mask = numbers
    mask.save(path)


def _house(draw: random.Random, size: tuple[int, int]) -> list[tuple[float, float]]:
    x, y, angle = draw.uniform(0, size[0]), draw.uniform(0, size[1]), draw.uniform(0, math.pi)
    half = draw.uniform(12, 26), draw.uniform(10, 20)
    turned = []
    for sign in ((-1, -1), (1, -1), (1, 1), (-1, 1)):
        a, b = sign[0] * half[0], sign[1] * half[1]
        turned.append((x + a * math.cos(angle) - b * math.sin(angle), y + a * math.sin(angle) + b * math.cos(angle)))
    return turned


def _shape(draw: random.Random, picture: Image.Image, name: str) -> None:
    pen, (width, height) = ImageDraw.Draw(picture), picture.size
    color = (draw.randint(150, 255), draw.randint(0, 120), draw.randint(0, 255))
    r = draw.uniform(0.25, 0.38) * min(width, height)
    x, y = width / 2 + draw.uniform(-5, 5), height / 2 + draw.uniform(-5, 5)
    if name == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif name == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
    elif name == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
    elif name == "cross":
        pen.line((x - r, y, x + r, y), fill=color, width=int(r / 2))
        pen.line((x, y - r, x, y + r), fill=color, width=int(r / 2))
    else:
        for step in range(-2, 3):
            pen.line((x - r, y + step * r / 2.5, x + r, y + step * r / 2.5), fill=color, width=3)
