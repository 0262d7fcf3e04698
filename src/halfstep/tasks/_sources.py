"""The samples that a recipe's data section names, for training and for validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.errors import BadData, BadRecipe
from halfstep.train.data.embedded import Embedded
from halfstep.train.data.folders import ImageFolder, Images
from halfstep.train.data.image_pairs import ImagePairs
from halfstep.train.data.listing import folders
from halfstep.train.data.pairs import ImageMaskPairs, folders_under
from halfstep.train.data.place import data_place
from halfstep.train.data.procedural import ShapeLabels, ShapeMasks
from halfstep.train.data.radio_maps import RadioMaps
from halfstep.train.data.shards import Shards
from halfstep.train.data.source import BadSample, Source
from halfstep.train.data.split import split
from halfstep.train.task import Split

Make = Callable[[Path], Source]
_SPLITS = frozenset(("train", "val", "test"))
_CONDITIONS = {"class": ("folder", "shards", "shapes"), "image": ("pairs", "maps")}
"""What has such a condition; others can be had with any data."""
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
        return shared(drawn_masks(data), data.val)
    make: Make = pairs if data.name == "pairs" else lambda root: Shards(root, data.channels, **meaning)
    return _complete(both(data, make), "mask")


def drawn_masks(data: Any) -> ShapeMasks:
    return ShapeMasks(data.samples, data.size, data.classes, data.channels)


def drawn_labels(data: Any) -> ShapeLabels:
    return ShapeLabels(data.samples, data.size, data.classes or 4, data.channels)


def labelled(data: Any) -> tuple[dict[Split, Source], list[str]]:
    """Images with labels, as a classification's `data` says, and the names of the classes."""
    if data.name == "shapes":
        drawn = drawn_labels(data)
        return shared(drawn, data.val), drawn.classes
    names: list[str] = []

    def folder(root: Path) -> Source:
        # Training comes first, and validation numbers the classes as it does.
        found = ImageFolder(root, data.channels, classes=names or None)
        names[:] = found.classes
        return found

    def shards(root: Path) -> Source:
        found = Shards(root, data.channels, parts=("label",))
        names.extend(found.classes[len(names) :])
        return found

    sources = both(data, folder if data.name == "folder" else shards)
    return _complete(sources, "label"), _as_many(names, data)


def pictured(data: Any, condition: str) -> tuple[dict[Split, Source], list[str]]:
    """Images with what they are asked for with, as a diffusion's `data` says, and the names of the classes."""
    _possible(data, condition)
    if condition == "class":
        return labelled(data)

    def asked_for(source: Source, under: str = "") -> Source:
        return Embedded(source, data_place(data.embeddings), under) if condition == "embedding" else source

    def made(root: Path) -> Source:
        # Two splits may have an image of one name each; one file has the embeddings of both.
        apart = root.is_dir() and root != data_place(data.path)
        return asked_for(_images(root, data, condition), f"{root.name}/" if apart else "")

    if data.name == "shapes":
        return shared(asked_for(drawn_labels(data)), data.val), []
    if data.name == "maps":
        drawn = RadioMaps(data.samples, data.size, data.channels, data.condition_channels)
        return shared(asked_for(drawn), data.val), []
    return both(data, made), []


def _possible(data: Any, condition: str) -> None:
    fitting = _CONDITIONS.get(condition, (data.name,))
    if data.name not in fitting:
        raise BadRecipe(
            f"model.condition={condition} with data.name={data.name}",
            allowed=f"data.name={' or data.name='.join(fitting)} for this condition",
            do=f"write data.name={fitting[0]}, or model.condition=none",
        )
    if condition == "embedding" and data.embeddings is None:
        raise BadRecipe(
            "model.condition=embedding without data.embeddings",
            allowed="a .safetensors file with a tensor for each image, by its name",
            do="write data.embeddings=FILE.safetensors, or model.condition=none",
        )


def _images(root: Path, data: Any, condition: str) -> Source:
    """Images below a folder; where there is more with them that nobody asked for, it is left alone."""
    if data.name == "shards":
        return Shards(root, data.channels, parts=())
    if data.name == "folder":
        return Images(root, data.channels)
    if condition != "image":
        return Images(root / "images", data.channels)
    return ImagePairs(*folders_under(root, "condition"), data.channels, data.condition_channels)


def both(data: Any, make: Make) -> dict[Split, Source]:
    root = data_place(data.path)
    if not isinstance(data.val, str):
        return shared(make(to_share(root, data)), data.val)
    apart = (root / "train").is_dir()
    # A path that is complete is what it is, wherever it is joined to.
    if not apart and not Path(data.val).is_absolute() and (root / data.val).is_dir():
        raise BadData(
            f"{root} holds the folder {data.val}, and no folder train beside it",
            allowed=f"{root}/train and {root}/{data.val}; or all samples in one folder, and a share for validation",
            do="write data.val=0.2, or move the training samples into a folder train",
        )
    train = make(root / "train" if apart else root)
    return {"train": train, "val": make(for_validation(root, data.val))}


def for_validation(root: Path, val: str) -> Path:
    """The folder of this name beside `train`, or anywhere."""
    inside = root / val
    return inside if inside.is_dir() else data_place(val)


def to_share(root: Path, data: Any) -> Path:
    """Where splits are there already, those for training: the names of splits are not classes."""
    inside = root / "train"
    if getattr(data, "masks", None) is not None or not inside.is_dir():
        return root
    # A class or a clip may be called train too; its images lie in it, and beside it lie others of its kind.
    named = data.name in ("folder", "frames") and not folders(inside) and not _SPLITS.issuperset(folders(root))
    return root if named else inside


def shared(source: Source, val: float | str) -> dict[Split, Source]:
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
