"""Build the training and validation sources that the data section of a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.data.dataset import BadSample, Source, split
from halfstep.data.embeddings import Embedded
from halfstep.data.folders import ImageFolder, ImageMaskPairs, ImagePairs, UnlabeledImages, folders_under
from halfstep.data.image_files import existing, find_files, folders, image_files
from halfstep.data.layout import HELD_OUT, check_store_data, data_place, is_address
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps, SpriteStamps, Stamps
from halfstep.data.synthetic.radio_maps import RadioMaps
from halfstep.data.synthetic.shapes import ShapeLabels, ShapeMasks, ShapePictures
from halfstep.data.video import SUFFIXES, FrameFolders, VideoFiles, Windows, mask_folder, split_recordings
from halfstep.errors import BadData, BadRecipe
from halfstep.train.task import Split

if TYPE_CHECKING:
    from halfstep.data.movi import MoviShards
    from halfstep.data.shards import Shards

CLIPS = f"a folder of frames or of such folders; a video or a folder of them ({', '.join(SUFFIXES)})"
"""The inputs of `clips_in`, in words."""


def clips(data: Any) -> dict[Split, Source]:
    """Return sources of `image` (frames × 3 × height × width), with a `mask` where objects are known (0 is
    background).
    """
    if data.name in ("sprites", "shapes"):
        stamps: Stamps = ShapeStamps() if data.name == "shapes" else SpriteStamps(data_place(data.path))
        return shared(MovingSprites(stamps, data.samples, data.size, data.frames, data.objects), data)
    if data.name == "movi":
        return _movi(data)
    if isinstance(data.val, str):
        return both(data, lambda root: _windows(root, data, data.name == "videos"))
    windows = _windows(to_share(data_place(data.path), data), data, data.name == "videos")
    train, val = split_recordings(windows, data.val, HELD_OUT[data.split])
    return {"train": train, "val": val}


def has_masks(data: Any) -> bool:
    """Return whether the validation clips have object masks; no sample is read."""
    if data.name in ("sprites", "shapes"):
        return True
    if data.name == "videos":
        return False
    if data.name == "movi":
        return _movi_shards(data, "val").has_masks
    root = data_place(data.path)
    judged = for_validation(root, data.val) if isinstance(data.val, str) else to_share(root, data)
    return mask_folder(judged) is not None


def clips_in(place: Path, data: Any) -> Windows:
    """Return the clips at a path: a video, a folder of videos, a folder of frames, or a folder of such folders.

    Raise `BadData` if there are none.
    """
    are_videos = (
        place.suffix.lower() in SUFFIXES
        if place.is_file()
        else bool(find_files(existing(place, "the folder"), SUFFIXES))
    )
    if not are_videos and (place.is_file() or not image_files(place)):
        raise BadData(f"{place} contains no clip", allowed=CLIPS, do="give the path of one of these")
    return _windows(place, data, are_videos)


def _movi(data: Any) -> dict[Split, Source]:
    """Return MOVi sources. Shard names contain their split; a fraction divides the training shards."""
    train = Windows(_movi_shards(data, "train"), data.frames, data.every)
    if isinstance(data.val, str):
        return {"train": train, "val": Windows(_movi_shards(data, "val"), data.frames, data.every)}
    own, rest = split_recordings(train, data.val, HELD_OUT[data.split])
    return {"train": own, "val": rest}


def _movi_shards(data: Any, split: Split) -> MoviShards:
    from halfstep.data.movi import MoviShards  # here, because folders need no shards

    named = data.val if split == "val" and isinstance(data.val, str) else "train"
    return MoviShards(data_place(data.path), named)


def _windows(root: Path, data: Any, are_videos: bool) -> Windows:
    recordings = VideoFiles(root) if are_videos else FrameFolders(root)
    return Windows(recordings, data.frames, data.every)


Make = Callable[[Any], Source]
"""Builds a source from a path, or from the address of shards."""
_SPLITS = frozenset(("train", "val", "test"))
_CONDITIONS = {"class": ("folder", "shards", "shapes"), "image": ("pairs", "maps")}
"""The kinds of data that have a condition; conditions not listed work with any data."""
DRAWN_FOR_VALIDATION = 0.2
"""The validation share of generated samples where the recipe names a folder, which they do not have."""


def masked(data: Any, store: Any = None) -> dict[Split, Source]:
    """Return sources of images with masks for a segmentation recipe; `store` is its section for object stores."""
    meaning = {"classes": data.classes, "ignore_index": data.ignore_index, "palette": data.palette}

    def pairs(root: Path) -> Source:
        # data.masks belongs to the training images; a separate validation folder has its own masks.
        given = data.masks is not None and root == data_place(data.path)
        images, masks = (root, data_place(data.masks)) if given else folders_under(root)
        return ImageMaskPairs(images, masks, channels=data.channels, **meaning)

    if data.name == "shapes":
        return shared(drawn_masks(data), data)
    make: Make = pairs if data.name == "pairs" else lambda root: _shards(root, data, store, **meaning)
    return _complete(both(data, make), "mask")


def _shards(root: str | Path, data: Any, store: Any, **more: Any) -> Shards:
    from halfstep.data.parquet_shards import open_shards  # here, because folders need no shards

    return open_shards(root, data.channels, verify=data.verify, store=store, **more)


def drawn_masks(data: Any) -> ShapeMasks:
    """Return the generated segmentation samples that `data` describes."""
    return ShapeMasks(data.samples, data.size, data.classes, data.channels)


def drawn_pictures(data: Any) -> ShapePictures:
    """Return the generated diffusion samples that `data` describes."""
    return ShapePictures(data.samples, data.size, data.classes or 4, data.channels)


def labeled(data: Any, known: Sequence[str] = (), store: Any = None) -> tuple[dict[Split, Source], list[str]]:
    """Return sources of images with labels for a classification recipe, and the class names.

    Classes that are `known` from training keep their numbers, and no others are allowed.
    """
    if data.name == "shapes":
        drawn = ShapeLabels(data.samples, data.size, data.classes or 4, data.channels)
        return shared(drawn, data), drawn.classes
    names = list(known)

    def folder(root: Path) -> Source:
        # `both` builds the training source first; the validation source reuses its class numbers.
        found = ImageFolder(root, data.channels, classes=names or None)
        names[:] = found.classes
        return found

    def shards(root: str | Path) -> Source:
        found = _shards(root, data, store, parts=("label",))
        # Both splits use the same class numbers (classes.txt, or the numbers themselves); the longer list has all
        # names.
        names.extend(found.classes[len(names) :])
        return found

    sources = both(data, folder if data.name == "folder" else shards)
    return _complete(sources, "label"), _require_class_count(names, data)


def pictured(data: Any, condition: str, store: Any = None) -> tuple[dict[Split, Source], list[str]]:
    """Return sources of images with their condition for a diffusion recipe, and the class names.

    Raise `BadRecipe` if the data does not have the condition.
    """
    _check_condition(data, condition)
    if condition == "class" and data.name == "shapes":
        drawn_by_class = drawn_pictures(data)
        return shared(drawn_by_class, data), drawn_by_class.classes
    if condition == "class":
        return labeled(data, store=store)

    def asked_for(source: Source, under: str = "") -> Source:
        return Embedded(source, data_place(data.embeddings), under) if condition == "embedding" else source

    def made(root: Any) -> Source:
        if is_address(root):
            return _shards(root, data, store, parts=())
        # One embeddings file serves both splits, which may contain images of the same name: prefix the split's folder.
        apart = root.is_dir() and root != data_place(data.path)
        return asked_for(_images(root, data, condition), f"{root.name}/" if apart else "")

    if data.name == "shapes":
        return shared(asked_for(drawn_pictures(data)), data), []
    if data.name == "maps":
        drawn = RadioMaps(data.samples, data.size, data.channels, data.condition_channels)
        return shared(asked_for(drawn), data), []
    return both(data, made), []


def _check_condition(data: Any, condition: str) -> None:
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
    """Return the images below a folder, without other parts of a sample that are not needed."""
    if data.name == "shards":
        return _shards(root, data, None, parts=())
    if data.name == "folder":
        return UnlabeledImages(root, data.channels)
    if condition != "image":
        return UnlabeledImages(root / "images", data.channels)
    return ImagePairs(*folders_under(root, "condition"), data.channels, data.condition_channels)


def both(data: Any, make: Make) -> dict[Split, Source]:
    """Return both splits, from separate folders or by splitting one folder, built with `make`.

    Raise `BadData` if there is a validation folder but no training folder.
    """
    if is_address(data.path):
        check_store_data(data)
        if not isinstance(data.val, str):
            return shared(make(data.path), data)
        val = data.val if is_address(data.val) else f"{data.path.rstrip('/')}/{data.val}"
        return {"train": make(data.path), "val": make(val)}
    root = data_place(data.path)
    if not isinstance(data.val, str):
        return shared(make(to_share(root, data)), data)
    apart = (root / "train").is_dir()
    # Joining an absolute path yields the path itself, which may exist without being below `root`.
    if not apart and not Path(data.val).is_absolute() and (root / data.val).is_dir():
        raise BadData(
            f"{root} has the folder {data.val} but no folder train",
            allowed=f"{root}/train and {root}/{data.val}; or all samples in one folder, and a share for validation",
            do="write data.val=0.2, or move the training samples into a folder train",
        )
    train = make(root / "train" if apart else root)
    return {"train": train, "val": make(for_validation(root, data.val))}


def for_validation(root: Path, val: str) -> Path:
    """Return the validation folder: below `root` where it exists there, otherwise anywhere."""
    inside = root / val
    return inside if inside.is_dir() else data_place(val)


def to_share(root: Path, data: Any) -> Path:
    """Return the folder to split; where a folder `train` exists, that one, since split names are not classes."""
    inside = root / "train"
    if getattr(data, "masks", None) is not None or not inside.is_dir():
        return root
    # A class or a clip may be called train as well: it holds images directly and has siblings that are not splits.
    named = data.name in ("folder", "frames") and not folders(inside) and not _SPLITS.issuperset(folders(root))
    return root if named else inside


def shared(source: Source, data: Any) -> dict[Split, Source]:
    """Split one source into training and validation."""
    share = DRAWN_FOR_VALIDATION if isinstance(data.val, str) else data.val
    train, rest = split(source, share, HELD_OUT[data.split])
    return {"train": train, "val": rest}


def _complete(sources: dict[Split, Source], part: str) -> dict[Split, Source]:
    """Raise `BadData` before the first step where samples lack a part; shards may contain anything."""
    for source in sources.values():
        try:
            found = part in source.read(0)
        except BadSample:
            continue  # unreadable samples are replaced and counted later
        if not found:
            raise BadData(
                f"{source.name(0)} has no {part}",
                allowed=f"samples with an image and a {part}",
                do="check data.path and the task of the recipe",
            )
    return sources


def _require_class_count(names: list[str], data: Any) -> list[str]:
    if data.classes is None or data.classes == len(names):
        return names
    if data.name == "folder" or data.classes < len(names):
        raise BadRecipe(
            f"data.classes={data.classes}, but {data.path} has {len(names)} classes",
            allowed="as many classes as there are, or no data.classes at all",
            do=f"write data.classes={len(names)}, or leave it out",
        )
    # Shards may lack some of the classes, so more may be declared than are found; a folder shows all of its classes.
    return names + [str(number) for number in range(len(names), data.classes)]
