"""Provide Oxford-IIIT Pet: 7,349 photographs of cats and dogs, by breed and with a mask of the animal.

The photographs are in two layouts, without taking the room twice: `segmentation`, with images and masks (0 background,
1 pet, 2 its border), and `classification`, with a folder for each of the 37 breeds.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep.data.sets.downloads import OnSample, RemoteFile, build_archive_error, encode_png, read_members
from halfstep.status_line import OnProgress

ABOUT = "Oxford-IIIT Pet: cats and dogs, 37 breeds; masks and a folder per breed (811 MB download)"
_HOST = "https://www.robots.ox.ac.uk/~vgg/data/pets/data"
IMAGES = RemoteFile(
    f"{_HOST}/images.tar.gz", 791_918_971, "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d"
)
ANNOTATIONS = RemoteFile(
    f"{_HOST}/annotations.tar.gz", 19_173_078, "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91"
)
SPLITS = {"train": "trainval", "val": "test"}
"""The names that the publishers give to the splits."""
COUNTS = {
    f"{layout}/{split}": samples
    for layout in ("segmentation", "classification")
    for split, samples in (("train", 3680), ("val", 3669))
}
LARGEST = 20_000_000
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"
_WANTED = re.compile(rf"images/{_NAME}\.jpg|annotations/((trainval|test)\.txt|trimaps/{_NAME}\.png)")
_BREED = re.compile(r"[A-Za-z0-9][A-Za-z0-9 -]*")
_CLASS_OF_TRIMAP = np.array([0, 1, 0, 2], np.uint8)
"""The classes of the values 1 (pet), 2 (background) and 3 (border)."""


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download both archives."""
    for file in (IMAGES, ANNOTATIONS):
        file.fetch(folder, on_progress)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write both layouts to `into`."""
    from torchvision.datasets import OxfordIIITPet  # type: ignore[import-untyped]

    unpacked = into.parent / "unpacked"
    inside = unpacked / "oxford-iiit-pet"  # where torchvision looks
    for folder in ("images", "annotations/trimaps"):
        (inside / folder).mkdir(parents=True)
    for file in (IMAGES, ANNOTATIONS):
        for name, content in read_members(downloads / file.name, _WANTED.fullmatch, LARGEST):
            (inside / name).write_bytes(content)
    for split, published in SPLITS.items():
        try:
            pets = OxfordIIITPet(unpacked, split=published)
        except (OSError, ValueError) as error:
            raise build_archive_error(f"{ANNOTATIONS.name} has no usable {published}.txt: {error}") from None
        for photograph, trimap, label in zip(pets._images, pets._segs, pets._labels, strict=True):
            _write_pet(photograph, trimap, pets.classes[label], split, into)
            on_sample()


def count(folder: Path) -> dict[str, int]:
    """Return the number of samples in each layout and split."""
    from halfstep.data.folders import ImageFolder, ImageMaskPairs, resolve_pair_folders

    pairs = {
        split: ImageMaskPairs(*resolve_pair_folders(folder / "segmentation" / split), classes=3) for split in SPLITS
    }
    breeds = {split: ImageFolder(folder / "classification" / split) for split in SPLITS}
    return {
        **{f"segmentation/{split}": len(source) for split, source in pairs.items()},
        **{f"classification/{split}": len(source) for split, source in breeds.items()},
    }


def _write_pet(photograph: Path, trimap: Path, breed: str, split: str, into: Path) -> None:
    # The lists name files and breeds, which must not lead out of the folder.
    inside = _WANTED.fullmatch(f"images/{photograph.name}") and photograph.parent.name == "images"
    if not inside or not _BREED.fullmatch(breed) or not photograph.is_file() or not trimap.is_file():
        raise build_archive_error(f"{ANNOTATIONS.name} lists {str(photograph.name)!r} of the breed {breed!r}")
    with Image.open(trimap, formats=["PNG"]) as opened:
        values = np.array(opened)
    if values.ndim != 2 or values.max(initial=0) >= len(_CLASS_OF_TRIMAP):
        raise build_archive_error(f"{trimap.name} has values other than 1, 2 and 3")
    images, masks = (into / "segmentation" / split / kind for kind in ("images", "masks"))
    by_breed = into / "classification" / split / breed
    for folder in (images, masks, by_breed):
        folder.mkdir(parents=True, exist_ok=True)
    (masks / trimap.name).write_bytes(encode_png(_CLASS_OF_TRIMAP[values]))
    try:
        os.link(photograph, by_breed / photograph.name)
    except OSError:  # a file system without hard links
        shutil.copyfile(photograph, by_breed / photograph.name)
    photograph.rename(images / photograph.name)
