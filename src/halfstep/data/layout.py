"""Recognize the layout of a user's folder: images with masks or a folder per class, in splits or in one place.

Imports no torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from halfstep.data.image_files import SUFFIXES, require_folder
from halfstep.data.sets import NAMES
from halfstep.data.shard_patterns import is_shard_pattern
from halfstep.errors import BadData, BadRecipe, build_unknown_name_error, choose_caller_wording
from halfstep.files import find_cache_folder

PREFIX = "cache:"


def is_store_address(path: object) -> bool:
    """Return whether a path is the address of an object store, such as `s3://BUCKET/PREFIX`."""
    return isinstance(path, str) and "://" in path


def resolve_data_path(path: str) -> Path:
    """Return the path; `cache:NAME` is a folder in the cache, such as `halfstep data get NAME` makes.

    Raises BadData if that is missing, or if this user may not look into the folder.
    """
    if is_store_address(path):
        raise BadData(
            f"{path} is an address, and this setting takes a path",
            allowed="an address for data.path and data.val with data.name=shards; else a path",
            do="copy the data to a disk, or write it as .tar shards and give data.name=shards",
        )
    if not path.startswith(PREFIX):
        place = Path(os.path.expanduser(path))
        _check_folder_readable(place)
        return place
    name, _, below = path.removeprefix(PREFIX).partition("/")
    parts = [name, *Path(below).parts]
    # The path comes from a recipe, which must not lead out of the cache.
    if not name or ".." in parts or name.startswith(("/", "\\", ".")) or Path(below).is_absolute():
        raise BadData(f"the path {path!r}", allowed="cache:NAME or cache:NAME/FOLDER", do="write cache:cifar10")
    folder = find_cache_folder() / "data" / name
    if not folder.is_dir():
        raise BadData(
            f"the data set {name!r} is not in {folder.parent}",
            allowed="an existing folder, such as one made by halfstep data get",
            do=f"halfstep data get {name}" if name in NAMES else "give the path of your own folder",
        )
    return folder.joinpath(below)


def check_store_data(data: Any) -> None:
    """Raise BadRecipe for an address in data.path that is none, or that has data which an object store cannot have."""
    from halfstep.store.address import check_obstore_installed, parse_address  # not loaded for plain paths

    parse_address(data.path, "data.path")
    check_obstore_installed()
    if data.name != "shards" or getattr(data, "embeddings", None) is not None:
        wrong = f"data.name={data.name}" if data.name != "shards" else "data.embeddings"
        raise BadRecipe(
            f"{wrong} with data.path={data.path}, which is in an object store",
            allowed="data.name=shards, without data.embeddings",
            do="add data.name=shards if they are .tar shards; otherwise copy them to a disk",
        )


def _check_folder_readable(place: Path) -> None:
    """Raise BadData for a folder without permission: `Path.is_dir` of its entries raises PermissionError."""
    try:
        os.stat(os.path.join(place, "."))
    except PermissionError as error:
        raise BadData(
            f"{place} cannot be listed: {error.strerror}",
            allowed="folders that this user can read",
            do=f"chmod -R u+rX {place}, or ask its owner to",
        ) from None
    except (OSError, ValueError):
        return  # a file, a pattern, or nothing: whoever reads it says so


FOLDERS = ("val", "valid", "validation")
"""Names of a folder with the validation samples, next to `train`."""
USUAL_SHARE, SMALLEST_SHARE, ENOUGH = 0.2, 0.05, 500
"""A fifth of a small set; of a large one enough samples to judge a model, but at least a twentieth."""


PLACE_PERSON = b"halfstep val"
"""Separates the hash of a sample's position from any other use of the same names."""


def compute_split_position(key: str) -> float:
    """Return a sample's position between 0 and 1, a hash of its name; those below the share are for validation."""
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, person=PLACE_PERSON).digest()
    return int.from_bytes(digest, "big") / 2**64


def compute_split_positions(keys: Iterable[str]) -> list[float]:
    """Return the positions of samples."""
    return [compute_split_position(key) for key in keys]


Rule = Callable[[Sequence[float], float], set[int]]
"""Returns the numbers of the validation samples, of the positions of all samples and the share."""
FEW = 1000
"""Of fewer samples than this, the share is exact: by chance, a share of a small set may be half or twice as large."""


def select_validation_by_position(places: Sequence[float], share: float) -> set[int]:
    """Return the samples below the share: an added sample moves no other. Neither side is empty."""
    chosen = {number for number, place in enumerate(places) if place < share}
    # Where chance leaves a side empty, the nearest sample is moved there.
    chosen = chosen or {places.index(min(places))}
    return chosen if len(chosen) < len(places) else chosen - {places.index(max(places))}


def select_validation_exactly(places: Sequence[float], share: float) -> set[int]:
    """Return the `round(share × samples)` samples with the smallest position, or of many those below the share."""
    if len(places) >= FEW:
        return select_validation_by_position(places, share)
    count = min(max(1, round(share * len(places))), len(places) - 1)
    return set(sorted(range(len(places)), key=lambda number: places[number])[:count])


HELD_OUT: dict[str | None, Rule] = {
    "exact": select_validation_exactly,
    "by_place": select_validation_by_position,
    None: select_validation_by_position,
}
"""The rules by their names in a recipe; a recipe of an earlier version has none."""


def choose_validation_share(samples: int) -> float:
    """Return the validation share of a set of this size where none is given."""
    return round(min(USUAL_SHARE, max(SMALLEST_SHARE, ENOUGH / max(samples, 1))), 3)


SEGMENTATION, CLASSIFICATION = "segmentation", "classification"
RECIPES = {SEGMENTATION: "segment", CLASSIFICATION: "classify"}
ALL, TRAIN = "all", "train"
_IMAGES = ("images", "image", "img", "imgs", "photos", "photographs", "pictures", "jpegimages", "rgb", "x")
_MASKS = ("masks", "mask", "labels", "label", "annotations", "segmentation", "segmentationclass", "gt", "y")
_SPLITS = (TRAIN, *FOLDERS, "test")
_SHARDS = (".tar", ".parquet", ".tar.gz", ".tgz")
_TEXTS = (".txt", ".md", ".jsonl", ".html", ".tex")
TOKENS = "tokens"
"""The usual folder of tokens."""


@dataclass(frozen=True)
class SplitFolder:
    """The samples of one split: a folder of images with a folder of masks, or a folder of class folders."""

    folder: Path
    masks: Path | None = None


@dataclass(frozen=True)
class Layout:
    """The layout of a set on disk."""

    task: str
    root: Path
    parts: dict[str, SplitFolder]
    """The parts by name of the split; `all` where there is only one."""

    @property
    def train(self) -> SplitFolder:
        """The part to train on."""
        return self.parts.get(TRAIN) or next(iter(self.parts.values()))

    @property
    def val(self) -> str | None:
        """The name of the validation folder, or None."""
        return next((name for name in FOLDERS if name in self.parts), None)


def find_layout(
    root: str | Path, task: str | None = None, masks: str | Path | None = None, *, for_check: bool = False
) -> Layout:
    """Return the layout of a folder, recognized by the names in it; raise BadData with advice if there is none.

    With `for_check`, the advice is worded for `halfstep data check`; else for a run.
    """
    if task is not None and task not in RECIPES:
        raise build_unknown_name_error("task", task, RECIPES)
    if suffix := _find_shard_suffix(Path(root)):
        raise _build_shards_error(Path(root), suffix, task, for_check)
    folder = require_folder(root, "the data folder")
    if masks is not None:
        return Layout(SEGMENTATION, folder, {ALL: SplitFolder(folder, require_folder(masks, "the mask folder"))})
    splits = {name: folder / name for name in _SPLITS if (folder / name).is_dir()}
    # A folder named val or test alone may be a class.
    if TRAIN not in splits:
        splits = {}
    places = splits or {ALL: folder}
    if task != CLASSIFICATION and all(
        (place / part).is_dir() for place in places.values() for part in ("images", "masks")
    ):
        return Layout(
            SEGMENTATION, folder, {name: SplitFolder(p / "images", p / "masks") for name, p in places.items()}
        )
    looks_like_pairs = _find_folder_name(folder, _IMAGES) is not None and _find_folder_name(folder, _MASKS) is not None
    if task != SEGMENTATION and not looks_like_pairs:
        # Classes are folders of images.
        found = {
            name: SplitFolder(place)
            for name, place in places.items()
            if any(_has_images(place / one) for one in _list_folder_names(place))
        }
        if TRAIN in found or ALL in found:
            return Layout(CLASSIFICATION, folder, found)
    raise _build_layout_error(folder, task, for_check)


def _build_layout_error(folder: Path, task: str | None, for_check: bool) -> BadData:
    images, masks = _find_folder_name(folder, _IMAGES), _find_folder_name(folder, _MASKS)
    allowed = _describe_layouts(folder, task)
    if task != CLASSIFICATION and images and masks:
        given = f"{folder} contains {images} and {masks}, not images and masks"
        return BadData(given, allowed=allowed, do=_suggest_folders(folder / images, folder / masks, for_check))
    sibling = _find_sibling_masks(folder)
    if task != CLASSIFICATION and sibling and _has_images(folder):
        given = f"{folder} contains images, and {sibling} next to it may contain their masks"
        return BadData(given, allowed=allowed, do=_suggest_folders(folder, sibling, for_check))
    if _has_images(folder):
        where = "images/, and their masks into masks/" if task != CLASSIFICATION else "a folder for each class"
        return BadData(
            f"{folder} contains images, but no folders for them", allowed=allowed, do=f"move them into {where}"
        )
    for suffix in _SHARDS:
        if any(_has_files(place, (suffix,)) for place in (folder, folder / TRAIN)):
            return _build_shards_error(folder, suffix, task, for_check)
    found = ", ".join(_list_folder_names(folder)[:8]) or "no folder at all"
    do = "give the folder above or below it, or rename these"
    if any(_has_files(place, _TEXTS) for place in (folder, *(folder / name for name in _list_folder_names(folder)))):
        from halfstep.data.token_files import format_tokens_command  # not loaded for images

        do += f"; text becomes tokens first: {format_tokens_command(str(folder), Path(TOKENS))}"
    return BadData(f"{folder} contains {found}", allowed=allowed, do=do)


def _find_sibling_masks(folder: Path) -> Path | None:
    """Return the folder of images next to this one that has a usual name for masks."""
    try:
        name = _find_folder_name(folder.parent, _MASKS)
    except OSError:
        return None
    found = None if name is None else folder.parent / name
    return found if found is not None and found.name != folder.name and _has_images(found) else None


def _describe_layouts(folder: Path, task: str | None) -> str:
    wanted = "images/ and masks/ with one mask for each image" if task != CLASSIFICATION else ""
    classes = "a folder for each class, with images in it" if task != SEGMENTATION else ""
    return f"{folder}/ with {', or '.join(filter(None, (wanted, classes)))}; or the same in train/ and val/"


def _suggest_folders(images: Path, masks: Path, for_check: bool) -> str:
    if for_check:
        return shlex.join(["halfstep", "data", "check", str(images), "--masks", str(masks)])
    options = shlex.join(["--data_dir", str(images), "--masks", str(masks)])
    return f"give {choose_caller_wording(options, f'data.path={str(images)!r} and data.masks={str(masks)!r}')}"


def _find_shard_suffix(root: Path) -> str:
    """Return the suffix of a path that is a shard, or a pattern of shards; empty for a folder."""
    is_one = root.is_file() or is_shard_pattern(root.name)
    return next((suffix for suffix in _SHARDS if is_one and root.name.endswith(suffix)), "")


def _build_shards_error(place: Path, suffix: str, task: str | None, for_check: bool) -> BadData:
    index = shlex.join(["halfstep", "data", "index", str(place)])
    recipe = RECIPES[task or CLASSIFICATION]
    train = shlex.join(["halfstep", "train", recipe, "--data_dir", str(place), "data.name=shards"])
    return BadData(
        f"{place} {'is a' if place.is_file() else 'contains' if place.is_dir() else 'stands for'} {suffix} "
        f"{'shard' if place.is_file() else 'shards'}",
        allowed=f"folders of images{' and of tokens' if for_check else ''}; a run reads shards with data.name=shards",
        do=f"{index} (reads each file completely); then: {train}" if for_check else "add data.name=shards",
    )


def _find_folder_name(folder: Path, names: Iterable[str]) -> str | None:
    found = {name.lower(): name for name in _list_folder_names(folder)}
    return next((found[name] for name in names if name in found), None)


def _list_folder_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _has_images(folder: Path) -> bool:
    return _has_files(folder, SUFFIXES)


def _has_files(folder: Path, suffixes: tuple[str, ...]) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.lower().endswith(suffixes) and not entry.name.startswith(".") for entry in entries)
    except OSError:
        return False
