"""Fifteen things that are wrong with data of people, each under a name of its own among healthy photographs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from tests.journeys.photos import ORIENTATION, photographs, scene

SIZE = (120, 90)


class Fault(NamedTuple):
    """What is wrong with a file, how it comes to be, and words of which a person would understand it."""

    name: str
    plant: Callable[[Path, str], None]
    words: str


def pair(folder: Path, name: str, mask: Image.Image | None = None, size: tuple[int, int] = SIZE) -> Path:
    """A healthy photograph with its mask, or with the mask that is given; returns the photograph's path."""
    photograph, healthy = scene(random.Random(name), size)
    path = folder / "images" / f"{name}.jpg"
    photograph.save(path)
    (mask or healthy).save(folder / "masks" / f"{name}.png")
    return path


def no_mask(folder: Path, name: str) -> None:
    pair(folder, name)
    (folder / "masks" / f"{name}.png").unlink()


def no_image(folder: Path, name: str) -> None:
    pair(folder, name).unlink()


def cut_off(folder: Path, name: str) -> None:
    path = pair(folder, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_file(folder: Path, name: str) -> None:
    pair(folder, name).write_bytes(b"")


def web_page(folder: Path, name: str) -> None:
    pair(folder, name).write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>")


def other_size(folder: Path, name: str) -> None:
    pair(folder, name, scene(random.Random(name), (SIZE[0] // 2, SIZE[1] // 2))[1])


def turned_mask(folder: Path, name: str) -> None:
    """The camera was held upright, and the mask was drawn on the file as it lies on the disk."""
    path = pair(folder, name)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    Image.open(path).save(path, exif=exif)


def smoothed_mask(folder: Path, name: str) -> None:
    small = scene(random.Random(name), (SIZE[0] // 3, SIZE[1] // 3))[1]
    pair(folder, name, small.resize(SIZE, Image.Resampling.BICUBIC))


def jpeg_mask(folder: Path, name: str) -> None:
    pair(folder, name)
    png = folder / "masks" / f"{name}.png"
    Image.open(png).save(png.with_suffix(".jpg"), quality=80)
    png.unlink()


def colored_mask(folder: Path, name: str) -> None:
    mask = scene(random.Random(name), SIZE)[1]
    pair(folder, name, Image.merge("RGB", (mask, mask.point(lambda value: value // 3), Image.new("L", SIZE, 40))))


def same_twice(folder: Path, name: str) -> None:
    path = pair(folder, name)
    path.with_name(f"{name}_copy.jpg").write_bytes(path.read_bytes())
    mask = folder / "masks" / f"{name}.png"
    mask.with_name(f"{name}_copy.png").write_bytes(mask.read_bytes())


def too_large(folder: Path, name: str) -> None:
    pair(folder, name)
    large = (8200, 8200)
    Image.new("1", large).save(folder / "images" / f"{name}.png")
    (folder / "images" / f"{name}.jpg").unlink()
    Image.new("1", large).save(folder / "masks" / f"{name}.png")


def link_out(folder: Path, name: str) -> None:
    path = pair(folder, name)
    outside = folder.parent / f"{name}_outside.jpg"
    path.rename(outside)
    path.symlink_to(outside)


def iphone(folder: Path, name: str) -> None:
    path = pair(folder, name)
    path.unlink()
    path.with_suffix(".heic").write_bytes(b"\0\0\0\x24ftypheic\0\0\0\0mif1heic" + bytes(200))


def one_name(folder: Path, name: str) -> None:
    path = pair(folder, name)
    scene(random.Random(name + "2"), SIZE)[0].save(path.with_suffix(".png"))


FAULTS = (
    Fault("bakery", no_mask, r"no mask|without (a )?mask|mask (is )?missing"),
    Fault(
        "harbour", no_image, r"no (image|photograph)|without (an? )?(image|photograph)|(image|photograph) (is )?missing"
    ),
    Fault("chapel", cut_off, r"truncat|cut off|incomplete|damaged|broken|cannot be read|unreadable"),
    Fault("garden", empty_file, r"empty|0 bytes|no bytes"),
    Fault("station", web_page, r"not (an )?images?|no image|cannot (be )?(read|identif)|html|web page|text"),
    Fault("bridge", other_size, r"size|60 ?[x×] ?45"),
    Fault("tower", turned_mask, r"EXIF|turn|rotat|orient"),
    Fault("market", smoothed_mask, r"value|stand for no class|gray|smooth|resiz|antialias|interpol"),
    Fault("school", jpeg_mask, r"jpe?g|loss|png"),
    Fault("museum", colored_mask, r"colou?r|palette|rgb"),
    Fault("theatre", same_twice, r"same|twice|duplicate|identical|copies|copy of"),
    Fault("airport", too_large, r"megapixel|MP\b|large|pixels"),
    Fault("library", link_out, r"link"),
    Fault("stadium", iphone, r"heic|heif"),
    Fault("factory", one_name, r"same name|one name|differ only|two images|twice|both|ambiguous|several|more than one"),
)


def messy(folder: Path, healthy: int = 12) -> Path:
    """A folder with every fault once, and some photographs that nothing is wrong with."""
    photographs(folder, healthy, seed=5)
    for fault in FAULTS:
        fault.plant(folder, fault.name)
    return folder
