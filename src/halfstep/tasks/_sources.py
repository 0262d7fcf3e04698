"""The samples that a recipe's data section names, for training and for validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.errors import BadData, BadRecipe
from halfstep.train.data.folders import ImageFolder
from halfstep.train.data.listing import folders
from halfstep.train.data.pairs import ImageMaskPairs, folders_under
from halfstep.train.data.place import data_place
from halfstep.train.data.procedural import ShapeLabels, ShapeMasks
from halfstep.train.data.shards import Shards
from halfstep.train.data.source import BadSample, Source
from halfstep.train.data.split import split
from halfstep.train.task import Split

Make = Callable[[Path], Source]
DRAWN_FOR_VALIDATION = 0.2
"""The share of drawn samples, where a recipe names a folder for validation that they have not."""


def masked(data: Any) -> dict[Split, Source]:
    """Images with masks, as a segmentation's `data` says."""
    meaning = {"classes": data.classes, "ignore_index": data.ignore_index, "palette": data.palette}

    def pairs(root: Path) -> Source:
        # Masks elsewhere are those of the training images; a validation folder has its own beside it.
        given = data.masks is not None and root == data_place(data.path)
        images, masks = (root, data_place(data.masks)) if given else folders_under(root)
        return ImageMaskPairs(images, masks, channels=data.channels, **meaning)

    if data.name == "shapes":
        return _shared(drawn_masks(data), data.val)
    make: Make = pairs if data.name == "pairs" else lambda root: Shards(root, data.channels, **meaning)
    return _complete(_both(data, make), "mask")


def drawn_masks(data: Any) -> ShapeMasks:
    return ShapeMasks(data.samples, data.size, data.classes, data.channels)


def labelled(data: Any) -> tuple[dict[Split, Source], list[str]]:
    """Images with labels, as a classification's `data` says, and the names of the classes."""
    if data.name == "shapes":
        drawn = ShapeLabels(data.samples, data.size, data.classes or 4, data.channels)
        return _shared(drawn, data.val), drawn.classes
    names: list[str] = []

    def folder(root: Path) -> Source:
        # Training comes first, and validation numbers the classes as it does.
        found = ImageFolder(root, data.channels, classes=names or None)
        names[:] = found.classes
        return found

    def shards(root: Path) -> Source:
        found = Shards(root, data.channels)
        names.extend(found.classes[len(names) :])
        return found

    sources = _both(data, folder if data.name == "folder" else shards)
    return _complete(sources, "label"), _as_many(names, data)


def _both(data: Any, make: Make) -> dict[Split, Source]:
    root = data_place(data.path)
    if not isinstance(data.val, str):
        return _shared(make(_to_share(root, data)), data.val)
    inside = (root / data.val).is_dir()
    if inside and not (root / "train").is_dir():
        raise BadData(
            f"{root} holds the folder {data.val}, and no folder train beside it",
            allowed=f"{root}/train and {root}/{data.val}; or all samples in one folder, and a share for validation",
            do="write data.val=0.2, or move the training samples into a folder train",
        )
    train = make(root / "train" if inside or (root / "train").is_dir() else root)
    return {"train": train, "val": make(root / data.val if inside else data_place(data.val))}


def _to_share(root: Path, data: Any) -> Path:
    """Where splits are there already, those for training: the names of splits are not classes."""
    inside = root / "train"
    if getattr(data, "masks", None) is not None or not inside.is_dir():
        return root
    # A class may be called train too; its images lie in it, and not in folders of classes.
    return root if data.name == "folder" and not folders(inside) else inside


def _shared(source: Source, val: float | str) -> dict[Split, Source]:
    train, rest = split(source, DRAWN_FOR_VALIDATION if isinstance(val, str) else val)
    return {"train": train, "val": rest}


def _complete(sources: dict[Split, Source], part: str) -> dict[Split, Source]:
    """Shards may hold anything; what is missing is said before the first step."""
    for source in sources.values():
        try:
            found = part in source.read(0)
        except BadSample:
            continue  # replaced and counted like any other
        if not found:
            raise BadData(
                f"{source.name(0)} has no {part}",
                allowed=f"samples with an image and a {part}",
                do="check data.path and the task of the recipe",
            )
    return sources


def _as_many(names: list[str], data: Any) -> list[str]:
    if data.classes is None or data.classes == len(names):
        return names
    if data.name == "folder" or data.classes < len(names):
        raise BadRecipe(
            f"data.classes={data.classes}, where {data.path} has {len(names)} classes",
            allowed="as many classes as there are, or no data.classes at all",
            do=f"write data.classes={len(names)}, or leave it out",
        )
    return names + [str(number) for number in range(len(names), data.classes)]
