"""Read folders of images: all images below a folder, or one folder per class as in ImageNet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from halfstep.data.dataset import Files, Sample, Source
from halfstep.data.image_files import list_folders, list_image_files, require_folder
from halfstep.data.image_io import MaskClasses, Palette, read_image, read_mask
from halfstep.errors import BadData

_LAYOUT = "ROOT/CLASS/IMAGE, with at least one image in each class"


class NumberedFiles:
    """Files below a folder, or folders of them, by number: the samples of a source, or recordings."""

    root: Path
    _files: list[str]

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        """Return the path of the file."""
        return str(self.root / self._files[index])

    def key(self, index: int) -> str:
        """Return the path below the root."""
        return Path(self._files[index]).as_posix()


class _ListedImages(NumberedFiles, Source):
    """Image files below a folder, by number."""

    channels: int

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample if it cannot be read."""
        return {"image": read_image(self.root / self._files[index], self.channels), **self.without_image(index)}

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image."""
        return {}

    def files_of(self, index: int) -> Files:
        """Return the file that the sample is read from."""
        return [(self.key(index), os.path.join(self.root, self._files[index]))]


class UnlabeledImages(_ListedImages):
    """A source of every image below a folder, at any depth and without labels: `image`."""

    def __init__(self, root: str | Path, channels: int = 3) -> None:
        self.root, self.channels = require_folder(root, "the image folder"), channels
        self._files = list_image_files(self.root)
        if not self._files:
            raise BadData(f"{self.root} contains no image", allowed="at least one image below it", do="check data.path")


class ImageFolder(_ListedImages):
    """A source with a folder per class: `image`, and `label`, the position of the folder's name in sorted order.

    For a validation folder, pass `classes` of the training set, so that both use the same numbers.
    """

    def __init__(self, root: str | Path, channels: int = 3, classes: list[str] | None = None) -> None:
        self.root, self.channels = require_folder(root, "the image folder"), channels
        present = list_folders(self.root)
        if not present:
            raise BadData(f"{self.root} contains no class folders", allowed=_LAYOUT, do="check data.path")
        self.classes = list(present if classes is None else classes)
        unknown = sorted(set(present) - set(self.classes))
        if unknown:
            raise BadData(
                f"{self.root} has class {unknown[0]!r}, which is missing from the training set",
                allowed=", ".join(self.classes[:20]),
                do="remove the folder, or add it to the training set",
            )
        self._files, self._labels = self._find(present)

    def _find(self, present: list[str]) -> tuple[list[str], list[int]]:
        files: list[str] = []
        labels: list[int] = []
        for name in present:
            found = list_image_files(self.root, name)
            if not found:
                raise BadData(f"{self.root / name} contains no image", allowed=_LAYOUT, do="fill or remove this folder")
            files += found
            labels += [self.classes.index(name)] * len(found)
        return files, labels

    def without_image(self, index: int) -> Sample:
        """Return the label."""
        return {"label": torch.tensor(self._labels[index])}


MASKS_RULE = "the mask of images/a.jpg is masks/a.png or masks/a_mask.png"


class PairedFiles(NumberedFiles, Source):
    """A base of sources with two folders: each image, and its `partner`, such as a mask, by name.

    `rule` describes the naming; a partner's name may have the suffix `ending`. Raises BadData if a file has none.
    """

    def __init__(self, images: str | Path, partners: str | Path, partner: str, rule: str, ending: str = "") -> None:
        self.root = self.images = require_folder(images, "the image folder")
        self.partners = require_folder(partners, f"the {partner} folder")
        self._partner = partner
        self._pairs = pair_images(self.images, self.partners, rule, ending)
        self._files = [image for image, _ in self._pairs]

    def files_of(self, index: int) -> Files:
        """Return the files of the image and its partner."""
        image, partner = self._pairs[index]
        return [
            (f"images/{Path(image).as_posix()}", os.path.join(self.images, image)),
            (f"{self._partner}s/{Path(partner).as_posix()}", os.path.join(self.partners, partner)),
        ]

    def places(self, index: int) -> tuple[Path, Path]:
        """Return the paths of the image and its partner."""
        image, partner = self._pairs[index]
        return self.images / image, self.partners / partner


class ImageMaskPairs(PairedFiles):
    """A source of `image` and `mask`, a class number for each pixel."""

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        classes: int = 2,
        ignore_index: int | None = None,
        palette: Palette | None = None,
        channels: int = 3,
    ) -> None:
        super().__init__(images, masks, "mask", MASKS_RULE, "_mask")
        self.channels, self.mask_classes = channels, MaskClasses(classes, ignore_index, palette)

    def read(self, index: int) -> Sample:
        """Read a pair; raise BadSample if it cannot be read, BadData where the mask does not fit."""
        image_path, mask_path = self.places(index)
        image = read_image(image_path, self.channels)
        mask = read_mask(mask_path, self.mask_classes, str(mask_path))
        check_same_size(image.shape[-2:], mask.shape, self.name(index))
        return {"image": image, "mask": mask}


def resolve_pair_folders(root: str | Path, partner: str = "mask") -> tuple[Path, Path]:
    """Return the folders `images` and `masks`, or another `partner`'s, below `root`."""
    folder = require_folder(root, "the data folder")
    return require_folder(folder / "images", "the image folder"), require_folder(
        folder / f"{partner}s", f"the {partner} folder"
    )


def check_same_size(image: tuple[int, ...], mask: tuple[int, ...], name: str) -> None:
    """Raise BadData if an image and its mask differ in size."""
    if tuple(image) != tuple(mask):
        raise BadData(
            f"{name} is {image[1]} × {image[0]} pixels, and its mask {mask[1]} × {mask[0]}",
            allowed="a mask of the size of its image, after the image is turned upright as its EXIF says",
            do="correct the mask, or remove the pair",
        )


def pair_images(images: Path, partners: Path, rule: str, ending: str) -> list[tuple[str, str]]:
    """Return the paths of images and partners below their folders; raise BadData if one has no partner.

    A partner's name may have the suffix `ending`.
    """
    pictures, others = _map_files_by_stem(images, "", rule), _map_files_by_stem(partners, ending, rule)
    if not pictures:
        raise BadData(f"{images} contains no image", allowed=rule, do="check data.path")
    lonely = [str(images / path) for stem, path in pictures.items() if stem not in others]
    lonely += [str(partners / path) for stem, path in others.items() if stem not in pictures]
    if lonely:
        raise BadData(
            f"{len(lonely)} files without a partner: {format_name_examples(lonely)}",
            allowed=rule,
            do="rename or remove these files",
        )
    return [(path, others[stem]) for stem, path in pictures.items()]


def format_name_examples(names: Sequence[str], most: int = 5) -> str:
    """Return the first few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _map_files_by_stem(folder: Path, ending: str, rule: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in list_image_files(folder):
        stem = os.path.splitext(path)[0].removesuffix(ending)
        if stem in found:
            raise BadData(
                f"{folder / found[stem]} and {folder / path} have the same name", allowed=rule, do="rename one of them"
            )
        found[stem] = path
    return found


CONDITIONS_RULE = "the condition of images/a.png is conditions/a.png, or a.jpg, a.tif, ..."


class ImagePairs(PairedFiles):
    """A source of `image` and `condition`; sizes may differ, aspect ratios may not, since positions must match."""

    def __init__(
        self, images: str | Path, conditions: str | Path, channels: int = 3, condition_channels: int = 1
    ) -> None:
        super().__init__(images, conditions, "condition", CONDITIONS_RULE)
        self.channels, self.condition_channels = channels, condition_channels

    def read(self, index: int) -> Sample:
        """Read a pair; raise BadSample if it cannot be read, BadData where the aspect ratios differ."""
        image = read_image(self.places(index)[0], self.channels)
        rest = self.without_image(index)
        _require_same_aspect(image.shape[-2:], rest["condition"].shape[-2:], self.name(index))
        return {"image": image, **rest}

    def without_image(self, index: int) -> Sample:
        """Return the condition."""
        return {"condition": read_image(self.places(index)[1], self.condition_channels)}


def _require_same_aspect(image: tuple[int, ...], condition: tuple[int, ...], name: str) -> None:
    """Raise BadData where aspect ratios differ by more than the rounding of one pixel."""
    (high, wide), (other_high, other_wide) = image, condition
    # Cross-multiplied: exact in integers, and one pixel of rounding changes it by at most a side.
    if abs(high * other_wide - wide * other_high) > max(*image, *condition):
        raise BadData(
            f"{name} is {wide} × {high} pixels, and its condition {other_wide} × {other_high}",
            allowed="a condition with the size or the aspect ratio of its image",
            do="crop or rotate one of them, or remove the pair",
        )
