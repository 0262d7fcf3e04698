"""Images and masks in two folders, paired by their names."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.errors import BadData
from halfstep.train.data.listing import existing, image_files
from halfstep.train.data.masks import Meaning, Palette, mask_of
from halfstep.train.data.reading import read_image
from halfstep.train.data.source import Files, Sample

RULE = "the mask of images/a.jpg is masks/a.png or masks/a_mask.png"


class ImageMaskPairs:
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
        self.images, self.masks = existing(images, "the image folder"), existing(masks, "the mask folder")
        self.channels, self.meaning = channels, Meaning(classes, ignore_index, palette)
        self._pairs = paired(self.images, self.masks)

    def __len__(self) -> int:
        return len(self._pairs)

    def read(self, index: int) -> Sample:
        image_path, mask_path = self._pairs[index]
        image = read_image(self.images / image_path, self.channels)
        mask = mask_of(self.masks / mask_path, self.meaning, str(self.masks / mask_path))
        same_size(image.shape[-2:], mask.shape, self.name(index))
        return {"image": image, "mask": mask}

    def name(self, index: int) -> str:
        return str(self.images / self._pairs[index][0])

    def key(self, index: int) -> str:
        return Path(self._pairs[index][0]).as_posix()

    def files_of(self, index: int) -> Files:
        image, mask = self._pairs[index]
        return [
            (f"images/{Path(image).as_posix()}", os.path.join(self.images, image)),
            (f"masks/{Path(mask).as_posix()}", os.path.join(self.masks, mask)),
        ]


def folders_under(root: str | Path) -> tuple[Path, Path]:
    """The default layout: `images` and `masks` in one folder."""
    folder = existing(root, "the data folder")
    return existing(folder / "images", "the image folder"), existing(folder / "masks", "the mask folder")


def same_size(image: tuple[int, ...], mask: tuple[int, ...], name: str) -> None:
    if tuple(image) != tuple(mask):
        raise BadData(
            f"{name} is {image[1]} × {image[0]} pixels, and its mask {mask[1]} × {mask[0]}",
            allowed="a mask of the size of its image, after the image is turned upright as its EXIF says",
            do="correct the mask, or take the pair away",
        )


def paired(images: Path, masks: Path) -> list[tuple[str, str]]:
    """Paths of image and mask below their folders; BadData where one of them has no partner."""
    pictures, drawn = _by_stem(images, ""), _by_stem(masks, "_mask")
    if not pictures:
        raise BadData(f"{images} holds no image", allowed=RULE, do="check data.path")
    lonely = [str(images / path) for stem, path in pictures.items() if stem not in drawn]
    lonely += [str(masks / path) for stem, path in drawn.items() if stem not in pictures]
    if lonely:
        more = f" and {len(lonely) - 5} more" if len(lonely) > 5 else ""
        raise BadData(
            f"{len(lonely)} files without a partner: {', '.join(lonely[:5])}{more}",
            allowed=RULE,
            do="rename or take away these files",
        )
    return [(path, drawn[stem]) for stem, path in pictures.items()]


def _by_stem(folder: Path, ending: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in image_files(folder):
        stem = os.path.splitext(path)[0].removesuffix(ending)
        if stem in found:
            raise BadData(
                f"{folder / found[stem]} and {folder / path} have the same name", allowed=RULE, do="rename one of them"
            )
        found[stem] = path
    return found
