"""Build the training and validation sources that the data section of a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.data.dataset import BadSample, Source, split_source
from halfstep.data.embeddings import EmbeddingSource
from halfstep.data.folders import ImageFolder, ImageMaskPairs, ImagePairs, UnlabeledImages, resolve_pair_folders
from halfstep.data.image_files import find_files, list_folders, list_image_files, require_folder
from halfstep.data.indexed import find_shards
from halfstep.data.layout import HELD_OUT, check_store_data, is_store_address, resolve_data_path
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps, SpriteStamps, Stamps
from halfstep.data.synthetic.radio_maps import RadioMaps
from halfstep.data.synthetic.shapes import ShapeLabels, ShapeMasks, ShapePictures
from halfstep.data.video import SUFFIXES, ClipWindows, FrameFolders, VideoFiles, find_mask_folder, split_recordings
from halfstep.errors import BadData, BadRecipe
from halfstep.train.task import Split

if TYPE_CHECKING:
    from halfstep.data.movi import MoviShards
    from halfstep.data.shards import Shards

CLIPS = f"a folder of frames or of such folders; a video or a folder of them ({', '.join(SUFFIXES)})"
"""The inputs of `open_clips`, in words."""


def build_clip_sources(data: Any) -> dict[Split, Source]:
    """Return sources of `image` (frames × 3 × height × width), with a `mask` where objects are known (0 is
    background).
    """
    if data.name in ("sprites", "shapes"):
        stamps: Stamps = ShapeStamps() if data.name == "shapes" else SpriteStamps(resolve_data_path(data.path))
        return split_recipe_source(MovingSprites(stamps, data.samples, data.size, data.frames, data.objects), data)
    if data.name == "movi":
        return _build_movi_sources(data)
    if isinstance(data.val, str):
        return build_both_splits(data, lambda root: _open_clip_windows(root, data, data.name == "videos"))
    windows = _open_clip_windows(resolve_split_folder(resolve_data_path(data.path), data), data, data.name == "videos")
    train, val = split_recordings(windows, data.val, HELD_OUT[data.split])
    return {"train": train, "val": val}


def has_object_masks(data: Any) -> bool:
    """Return whether the validation clips have object masks; no sample is read."""
    if data.name in ("sprites", "shapes"):
        return True
    if data.name == "videos":
        return False
    if data.name == "movi":
        return _open_movi_shards(data, "val").has_masks
    root = resolve_data_path(data.path)
    judged = (
        resolve_validation_folder(root, data.val) if isinstance(data.val, str) else resolve_split_folder(root, data)
    )
    return find_mask_folder(judged) is not None


def open_clips(place: Path, data: Any) -> ClipWindows:
    """Return the clips at a path: a video, a folder of videos, a folder of frames, or a folder of such folders.

    Raise `BadData` if there are none.
    """
    are_videos = (
        place.suffix.lower() in SUFFIXES
        if place.is_file()
        else bool(find_files(require_folder(place, "the folder"), SUFFIXES))
    )
    if not are_videos and (place.is_file() or not list_image_files(place)):
        raise BadData(f"{place} contains no clip", allowed=CLIPS, do="give the path of one of these")
    return _open_clip_windows(place, data, are_videos)


def _build_movi_sources(data: Any) -> dict[Split, Source]:
    """Return MOVi sources. Shard names contain their split; a fraction divides the training shards."""
    train = ClipWindows(_open_movi_shards(data, "train"), data.frames, data.every)
    if isinstance(data.val, str):
        return {"train": train, "val": ClipWindows(_open_movi_shards(data, "val"), data.frames, data.every)}
    own, rest = split_recordings(train, data.val, HELD_OUT[data.split])
    return {"train": own, "val": rest}


def _open_movi_shards(data: Any, split: Split) -> MoviShards:
    from halfstep.data.movi import MoviShards  # here, because folders need no shards

    named = data.val if split == "val" and isinstance(data.val, str) else "train"
    return MoviShards(resolve_data_path(data.path), named)


def _open_clip_windows(root: Path, data: Any, are_videos: bool) -> ClipWindows:
    recordings = VideoFiles(root) if are_videos else FrameFolders(root)
    return ClipWindows(recordings, data.frames, data.every)


Make = Callable[[Any], Source]
"""Builds a source from a path, or from the address of shards."""
_SPLITS = frozenset(("train", "val", "test"))
_CONDITIONS = {"class": ("folder", "shards", "shapes"), "image": ("pairs", "maps")}
"""The kinds of data that have a condition; conditions not listed work with any data."""
DRAWN_FOR_VALIDATION = 0.2
"""The validation share of generated samples where the recipe names a folder, which they do not have."""


def build_masked_sources(data: Any, store: Any = None) -> dict[Split, Source]:
    """Return sources of images with masks for a segmentation recipe; `store` is its section for object stores."""
    meaning = {"classes": data.classes, "ignore_index": data.ignore_index, "palette": data.palette}

    def pairs(root: Path) -> Source:
        # data.masks belongs to the training images; a separate validation folder has its own masks.
        given = data.masks is not None and root == resolve_data_path(data.path)
        images, masks = (root, resolve_data_path(data.masks)) if given else resolve_pair_folders(root)
        return ImageMaskPairs(images, masks, channels=data.channels, **meaning)

    if data.name == "shapes":
        return split_recipe_source(build_shape_masks(data), data)
    make: Make = pairs if data.name == "pairs" else lambda root: _open_recipe_shards(root, data, store, **meaning)
    return _require_sample_part(build_both_splits(data, make), "mask")


def _open_recipe_shards(root: str | Path, data: Any, store: Any, **more: Any) -> Shards:
    from halfstep.data.parquet_shards import open_shards  # here, because folders need no shards

    return open_shards(root, data.channels, verify=data.verify, store=store, **more)


def build_shape_masks(data: Any) -> ShapeMasks:
    """Return the generated segmentation samples that `data` describes."""
    return ShapeMasks(data.samples, data.size, data.classes, data.channels)


def build_shape_pictures(data: Any) -> ShapePictures:
    """Return the generated diffusion samples that `data` describes."""
    return ShapePictures(data.samples, data.size, data.classes or 4, data.channels)


def build_labeled_sources(
    data: Any, known: Sequence[str] = (), store: Any = None
) -> tuple[dict[Split, Source], list[str]]:
    """Return sources of images with labels for a classification recipe, and the class names.

    Classes that are `known` from training keep their numbers, and no others are allowed.
    """
    if data.name == "shapes":
        drawn = ShapeLabels(data.samples, data.size, data.classes or 4, data.channels)
        return split_recipe_source(drawn, data), drawn.classes
    names = list(known)

    def folder(root: Path) -> Source:
        # `build_both_splits` builds the training source first; the validation source reuses its class numbers.
        found = ImageFolder(root, data.channels, classes=names or None)
        names[:] = found.classes
        return found

    def shards(root: str | Path) -> Source:
        found = _open_recipe_shards(root, data, store, parts=("label",))
        # Both splits use the same class numbers (classes.txt, or the numbers themselves); the longer list has all
        # names.
        names.extend(found.classes[len(names) :])
        return found

    sources = build_both_splits(data, folder if data.name == "folder" else shards)
    return _require_sample_part(sources, "label"), _require_class_count(names, data)


def build_diffusion_sources(data: Any, condition: str, store: Any = None) -> tuple[dict[Split, Source], list[str]]:
    """Return sources of images with their condition for a diffusion recipe, and the class names.

    Raise `BadRecipe` if the data does not have the condition.
    """
    _check_condition(data, condition)
    if condition == "class" and data.name == "shapes":
        drawn_by_class = build_shape_pictures(data)
        return split_recipe_source(drawn_by_class, data), drawn_by_class.classes
    if condition == "class":
        return build_labeled_sources(data, store=store)

    def asked_for(source: Source, under: str = "") -> Source:
        return (
            EmbeddingSource(source, resolve_data_path(data.embeddings), under) if condition == "embedding" else source
        )

    def made(root: Any) -> Source:
        if is_store_address(root):
            return _open_recipe_shards(root, data, store, parts=())
        # One embeddings file serves both splits, which may contain images of the same name: prefix the split's folder.
        apart = root.is_dir() and root != resolve_data_path(data.path)
        return asked_for(_build_image_source(root, data, condition), f"{root.name}/" if apart else "")

    if data.name == "shapes":
        return split_recipe_source(asked_for(build_shape_pictures(data)), data), []
    if data.name == "maps":
        drawn = RadioMaps(data.samples, data.size, data.channels, data.condition_channels)
        return split_recipe_source(asked_for(drawn), data), []
    return build_both_splits(data, made), []


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


def _build_image_source(root: Path, data: Any, condition: str) -> Source:
    """Return the images below a folder, without other parts of a sample that are not needed."""
    if data.name == "shards":
        return _open_recipe_shards(root, data, None, parts=())
    if data.name == "folder":
        return UnlabeledImages(root, data.channels)
    if condition != "image":
        return UnlabeledImages(root / "images", data.channels)
    return ImagePairs(*resolve_pair_folders(root, "condition"), data.channels, data.condition_channels)


def build_both_splits(data: Any, make: Make) -> dict[Split, Source]:
    """Return both splits, from separate folders or by splitting one folder, built with `make`.

    Raise `BadData` if there is a validation folder but no training folder.
    """
    if is_store_address(data.path):
        check_store_data(data)
        if not isinstance(data.val, str):
            return split_recipe_source(make(data.path), data)
        val = data.val if is_store_address(data.val) else f"{data.path.rstrip('/')}/{data.val}"
        return {"train": make(data.path), "val": make(val)}
    root = resolve_data_path(data.path)
    if not isinstance(data.val, str):
        return split_recipe_source(make(resolve_split_folder(root, data)), data)
    apart = (root / "train").is_dir()
    # Joining an absolute path yields the path itself, which may exist without being below `root`.
    if not apart and not Path(data.val).is_absolute() and (root / data.val).is_dir():
        raise BadData(
            f"{root} has the folder {data.val} but no folder train",
            allowed=f"{root}/train and {root}/{data.val}; or all samples in one folder, and a share for validation",
            do="write data.val=0.2, or move the training samples into a folder train",
        )
    train = make(root / "train" if apart else root)
    return {"train": train, "val": make(resolve_validation_folder(root, data.val))}


def resolve_validation_folder(root: Path, val: str) -> Path:
    """Return the validation folder: below `root` where it exists there, otherwise anywhere."""
    inside = root / val
    return inside if inside.is_dir() else resolve_data_path(val)


def resolve_split_folder(root: Path, data: Any) -> Path:
    """Return the folder to split; where a folder `train` exists, that one, since split names are not classes."""
    inside = root / "train"
    if getattr(data, "masks", None) is not None or not inside.is_dir():
        return root
    # A class or a clip may be called train as well: it holds images directly and has siblings that are not splits.
    named = (
        data.name in ("folder", "frames") and not list_folders(inside) and not _SPLITS.issuperset(list_folders(root))
    )
    return root if named else inside


def split_recipe_source(source: Source, data: Any) -> dict[Split, Source]:
    """Split one source into training and validation."""
    share = DRAWN_FOR_VALIDATION if isinstance(data.val, str) else data.val
    train, rest = split_source(source, share, HELD_OUT[data.split])
    return {"train": train, "val": rest}


def _require_sample_part(sources: dict[Split, Source], part: str) -> dict[Split, Source]:
    """Raise `BadData` before the first step where samples lack a part; shards may contain anything."""
    for source in sources.values():
        try:
            found = part in source.read(0)
        except BadSample:
            continue  # unreadable samples are replaced and counted later
        if not found:
            raise _build_missing_part_error(source, part)
    return sources


def _build_missing_part_error(source: Source, part: str) -> BadData:
    shards, name = find_shards(source), source.name(0)
    unread = None if shards is None else shards.find_unread_column(part, source.index_in_base(0))
    if unread is None:
        return BadData(
            f"{name} has no {part}",
            allowed=f"samples with an image and a {part}",
            do="check data.path and the task of the recipe",
        )
    columns = {"label": "a column label, labels or fine_label of integers: class numbers from 0"}
    allowed = columns.get(part, "a column mask or annotation of images")
    return BadData(f"{name} has no {part}: {unread}", allowed=allowed, do=unread.do)


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
