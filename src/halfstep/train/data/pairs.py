"""Images and masks in two folders, paired by their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from halfstep.errors import BadData
from halfstep.train.data.listing import existing, image_files
from halfstep.train.data.masks import Meaning, Palette, mask_of
from halfstep.train.data.reading import read_image
from halfstep.train.data.source import Files, Sample

RULE = "the mask of images/a.jpg is masks/a.png or masks/a_mask.png"


class Paired:
    """Files of two folders that belong together by their names: each image, and its `partner`, a mask for example.

    `rule` says in words what belongs together; a partner's name may have `ending` behind the image's.
    """

    def __init__(self, images: str | Path, partners: str | Path, partner: str, rule: str, ending: str = "") -> None:
        self.images = existing(images, "the image folder")
        self.partners = existing(partners, f"the {partner} folder")
        self._partner = partner
        self._pairs = paired(self.images, self.partners, rule, ending)

    def __len__(self) -> int:
        return len(self._pairs)

    def name(self, index: int) -> str:
        return str(self.images / self._pairs[index][0])

    def key(self, index: int) -> str:
        return Path(self._pairs[index][0]).as_posix()

    def files_of(self, index: int) -> Files:
        image, partner = self._pairs[index]
        return [
            (f"images/{Path(image).as_posix()}", os.path.join(self.images, image)),
            (f"{self._partner}s/{Path(partner).as_posix()}", os.path.join(self.partners, partner)),
        ]

    def places(self, index: int) -> tuple[Path, Path]:
        """Where the image and its partner lie."""
        image, partner = self._pairs[index]
        return self.images / image, self.partners / partner


class ImageMaskPairs(Paired):
    """`image` as it was read, and `mask`: a class number for each pixel."""

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        classes: int = 2,
        ignore_index: int | None = None,
        palette: Palette | None = None,
        channels: int = 3,
    ) -> None:
        super().__init__(images, masks, "mask", RULE, "_mask")
        self.channels, self.meaning = channels, Meaning(classes, ignore_index, palette)

    def read(self, index: int) -> Sample:
        image_path, mask_path = self.places(index)
        image = read_image(image_path, self.channels)
        mask = mask_of(mask_path, self.meaning, str(mask_path))
        same_size(image.shape[-2:], mask.shape, self.name(index))
        return {"image": image, "mask": mask}


def folders_under(root: str | Path, partner: str = "mask") -> tuple[Path, Path]:
    """The default layout: `images` and `masks`, or what else they are paired with, in one folder."""
    folder = existing(root, "the data folder")
    return existing(folder / "images", "the image folder"), existing(folder / f"{partner}s", f"the {partner} folder")


def same_size(image: tuple[int, ...], mask: tuple[int, ...], name: str) -> None:
    if tuple(image) != tuple(mask):
        raise BadData(
            f"{name} is {image[1]} × {image[0]} pixels, and its mask {mask[1]} × {mask[0]}",
            allowed="a mask of the size of its image, after the image is turned upright as its EXIF says",
            do="correct the mask, or take the pair away",
        )


def paired(images: Path, partners: Path, rule: str, ending: str) -> list[tuple[str, str]]:
    """Paths of image and partner below their folders; BadData where one of them has none, in the words of `rule`.

    The partner's name may have `ending` behind the image's.
    """
    pictures, others = _by_stem(images, "", rule), _by_stem(partners, ending, rule)
    if not pictures:
        raise BadData(f"{images} holds no image", allowed=rule, do="check data.path")
    lonely = [str(images / path) for stem, path in pictures.items() if stem not in others]
    lonely += [str(partners / path) for stem, path in others.items() if stem not in pictures]
    if lonely:
        raise BadData(
            f"{len(lonely)} files without a partner: {first_of(lonely)}",
            allowed=rule,
            do="rename or take away these files",
        )
    return [(path, others[stem]) for stem, path in pictures.items()]


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _by_stem(folder: Path, ending: str, rule: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in image_files(folder):
        stem = os.path.splitext(path)[0].removesuffix(ending)
        if stem in found:
            raise BadData(
                f"{folder / found[stem]} and {folder / path} have the same name", allowed=rule, do="rename one of them"
            )
        found[stem] = path
    return found
