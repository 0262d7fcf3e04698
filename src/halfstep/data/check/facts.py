"""Examine a whole set: its files, samples and masks, and how the masks are read."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from halfstep.data.image_files import (
    DEEPEST,
    FORMATS,
    MOST_BYTES,
    MOST_PIXELS,
    SUFFIXES,
    open_regular_file,
    read_exif_orientation,
)
from halfstep.data.layout import (
    ALL,
    SEGMENTATION,
    Layout,
    SplitFolder,
    choose_validation_share,
    compute_split_positions,
    select_validation_exactly,
)
from halfstep.data.mask_classes import MaskCounts, MaskReading, count_mask_values, infer_mask_reading
from halfstep.status_line import OnProgress


@dataclass
class FolderPaths:
    """Paths below a folder, by kind."""

    images: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Files of formats that are not read."""
    outside: list[str] = field(default_factory=list)
    """Links that lead out of the folder."""
    broken: list[str] = field(default_factory=list)
    """Links to nothing."""
    closed: list[str] = field(default_factory=list)
    """Folders that this user cannot read."""
    deep: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    """Pipes, sockets and devices."""


def list_folder_paths(root: Path) -> FolderPaths:
    """List a folder; nothing in it raises."""
    found = FolderPaths()
    _collect_paths(root, "", os.path.realpath(root), 0, found)
    # scandir's order is the file system's.
    for names in vars(found).values():
        names.sort()
    return found


def _collect_paths(root: Path, under: str, boundary: str, depth: int, found: FolderPaths) -> None:
    if depth > DEEPEST:
        found.deep.append(under)
        return
    try:
        entries = list(os.scandir(root / under))
    except OSError:
        found.closed.append(under or ".")
        return
    for entry in entries:
        path = os.path.join(under, entry.name)
        kind = _classify_entry(entry, boundary)
        if kind == "folder":
            _collect_paths(root, path, boundary, depth + 1, found)
        else:
            getattr(found, kind).append(path)


def _classify_entry(entry: os.DirEntry[str], boundary: str) -> str:
    if entry.name.startswith("."):
        return "hidden"
    try:
        mode = entry.stat().st_mode
    except OSError:
        return "broken"
    if entry.is_symlink() and not (os.path.realpath(entry.path) + os.sep).startswith(boundary + os.sep):
        return "outside"
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        return "special"
    return "images" if entry.name.lower().endswith(SUFFIXES) else "other"


EMPTY, CLOSED, NO_IMAGE, DAMAGED, HUGE = "empty", "closed", "no_image", "damaged", "huge"
"""Why a file cannot be read."""
FEW = 200
"""Files below which starting processes takes longer than examining them."""
AT_A_TIME = 16
_SUFFIX_OF = {"JPEG": (".jpg", ".jpeg"), "TIFF": (".tif", ".tiff")}


@dataclass(frozen=True)
class FileFacts:
    """The description of a file."""

    path: str
    fault: str = ""
    """Why it cannot be read; empty if it can."""
    format: str = ""
    mode: str = ""
    size: tuple[int, int] = (0, 0)
    """Width and height, as the pixels are stored."""
    orientation: int = 1
    frames: int = 1
    bits: int = 8
    digest: str = ""
    """A digest of the pixels: equal for two files with the same picture."""
    mask: MaskCounts | None = None

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height after the EXIF rotation."""
        return self.size[::-1] if self.orientation >= 5 else self.size

    @property
    def is_misnamed(self) -> bool:
        """Return whether the suffix belongs to another format."""
        endings = _SUFFIX_OF.get(self.format, (f".{self.format.lower()}",))
        return bool(self.format) and not self.path.lower().endswith(endings)


def examine_file(path: str, as_mask: bool) -> FileFacts:
    """Read a file to its end and describe it; nothing is raised."""
    fault = _find_file_fault(path)
    if fault:
        return FileFacts(path, fault)
    with warnings.catch_warnings():
        # Pillow warns of damaged metadata, which training ignores as well.
        warnings.simplefilter("ignore")
        try:
            with open_regular_file(path) as stream, Image.open(stream, formats=FORMATS) as image:
                return _collect_file_facts(path, image, as_mask)
        except (UnidentifiedImageError, Image.DecompressionBombError) as error:
            return FileFacts(path, NO_IMAGE if isinstance(error, UnidentifiedImageError) else HUGE)
        except Exception:  # decoders raise anything on damaged input
            return FileFacts(path, DAMAGED)


def examine_files(files: Sequence[tuple[str, bool]], told: Callable[[int, int], None]) -> Iterator[FileFacts]:
    """Yield the description of every (path, is a mask) in order, on all cores where there are many files."""
    if len(files) <= FEW:
        for done, one in enumerate(files, 1):
            yield examine_file(*one)
            told(done, len(files))
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Spawn: a fork would inherit the threads and locks of the caller.
    with ProcessPoolExecutor(min(cores, 16), mp_context=get_context("spawn")) as pool:
        waiting: list[Any] = []
        left = iter(range(0, len(files), AT_A_TIME))
        done = 0
        while True:
            # A bounded number of jobs: a million files must not become a million futures.
            waiting += [
                pool.submit(_examine_batch, files[i : i + AT_A_TIME]) for i in islice(left, 4 * cores - len(waiting))
            ]
            if not waiting:
                return
            for found in waiting.pop(0).result():
                done += 1
                yield found
            told(done, len(files))


def _examine_batch(files: Sequence[tuple[str, bool]]) -> list[FileFacts]:
    return [examine_file(*one) for one in files]


def _find_file_fault(path: str) -> str:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            facts = os.fstat(file.fileno())
    except OSError:
        return CLOSED
    if not stat.S_ISREG(facts.st_mode):
        return CLOSED
    return EMPTY if facts.st_size == 0 else HUGE if facts.st_size > MOST_BYTES else ""


def _collect_file_facts(path: str, image: Image.Image, as_mask: bool) -> FileFacts:
    size, stored, frames = image.size, str(image.mode), int(getattr(image, "n_frames", 1))
    if size[0] * size[1] > MOST_PIXELS:
        return FileFacts(path, HUGE, str(image.format), stored, size)
    bits = _read_channel_bits(image)
    # Image.open reads the header only: damage further on shows when the pixels are decoded.
    image.load()
    counts = count_mask_values(image) if as_mask else None
    # Of the pixels, not the file: a copy saved again with other metadata is still a copy.
    digest = hashlib.blake2b(f"{image.mode} {size}".encode() + image.tobytes(), digest_size=16).hexdigest()
    return FileFacts(
        path, "", str(image.format), stored, size, read_exif_orientation(image), frames, bits, digest, counts
    )


def _read_channel_bits(image: Image.Image) -> int:
    """Return the bits per channel in the file, which may be more than Pillow keeps."""
    if image.mode.startswith("I;16"):
        return 16
    if image.mode in ("I", "F"):
        return 32
    # Pillow decodes 16-bit color to 8 bits; only the raw mode of its tiles still shows the depth.
    raw = [tile[3] for tile in getattr(image, "tile", ())]
    modes = [part if isinstance(part, str) else part[0] for part in raw if part]
    return 16 if any(";16" in str(mode) for mode in modes) else 8


_ENDING = "_mask"


@dataclass(frozen=True)
class SampleFacts:
    """An image with its mask or class."""

    split: str
    image: FileFacts
    mask: FileFacts | None = None
    label: str = ""
    """The folder of its class."""


@dataclass
class SplitFiles:
    """The files in the folders of one split."""

    name: str
    part: SplitFolder
    names: FolderPaths
    mask_names: FolderPaths | None = None
    pairs: list[tuple[str, str]] = field(default_factory=list)
    without_mask: list[str] = field(default_factory=list)
    without_image: list[str] = field(default_factory=list)
    same_name: list[str] = field(default_factory=list)
    empty_classes: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    """Images outside of any class folder."""

    def image_paths(self) -> Iterator[str]:
        """Yield the paths of all photographs and masks."""
        for folder, names in ((self.part.folder, self.names), (self.part.masks, self.mask_names)):
            if folder is not None and names is not None:
                yield from (os.path.join(folder, path) for path in names.images)


@dataclass
class ExaminedSet:
    """The facts that the rules need."""

    layout: Layout
    splits: list[SplitFiles]
    samples: list[SampleFacts]
    reading: MaskReading | None
    classes: int | None
    """The number of classes that the user gives."""
    ignore_index: int | None
    """The value without a class that the user gives."""
    unpaired: list[FileFacts]
    """Images that belong to no sample: without a mask or a photograph, or in no class folder."""

    def shown(self, path: str | Path) -> str:
        """Return a path below the set's folder."""
        text = os.path.relpath(path, self.layout.root)
        return str(path) if text.startswith("..") else text

    @property
    def good(self) -> list[SampleFacts]:
        """Return the samples of which every file can be read."""
        return [s for s in self.samples if not s.image.fault and not (s.mask and s.mask.fault)]


def examine_dataset(
    layout: Layout, on_progress: OnProgress, classes: int | None = None, ignore_index: int | None = None
) -> ExaminedSet:
    """List the folders, pair the files, and examine each of them."""
    splits = [_list_split_files(name, part) for name, part in layout.parts.items()]
    wanted = [(split, image, mask) for split in splits for image, mask in split.pairs]
    files = [(path, path == mask) for _, image, mask in wanted for path in (image, mask) if path]
    paired = {path for path, _ in files}
    unpaired = [path for split in splits for path in split.image_paths() if path not in paired]
    looks = {one.path: one for one in examine_files([*files, *((path, False) for path in unpaired)], on_progress)}
    samples = [
        SampleFacts(s.name, looks[image], looks.get(mask), _find_class_name(s, image)) for s, image, mask in wanted
    ]
    if layout.val is None:
        samples = _assign_splits(samples, splits[0].part.folder)
    reading = None
    if layout.task == SEGMENTATION:
        masks = [s.mask.mask for s in samples if s.mask is not None and s.mask.mask is not None]
        reading = infer_mask_reading(masks, classes, ignore_index)
    return ExaminedSet(layout, splits, samples, reading, classes, ignore_index, [looks[path] for path in unpaired])


def _list_split_files(name: str, part: SplitFolder) -> SplitFiles:
    split = SplitFiles(name, part, list_folder_paths(part.folder))
    if part.masks is None:
        _collect_class_files(split)
    else:
        split.mask_names = list_folder_paths(part.masks)
        _pair_files(split, part.folder, part.masks)
    return split


def _pair_files(split: SplitFiles, folder: Path, masks_folder: Path) -> None:
    assert split.mask_names is not None
    images, masks = (
        _map_paths_by_stem(split.names.images, "", split),
        _map_paths_by_stem(split.mask_names.images, _ENDING, split),
    )
    split.without_mask = [os.path.join(folder, path) for stem, path in images.items() if stem not in masks]
    split.without_image = [os.path.join(masks_folder, path) for stem, path in masks.items() if stem not in images]
    split.pairs = [
        (os.path.join(folder, path), os.path.join(masks_folder, masks[stem]))
        for stem, path in images.items()
        if stem in masks
    ]


def _map_paths_by_stem(paths: list[str], ending: str, split: SplitFiles) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        stem = os.path.splitext(path)[0].removesuffix(ending)
        if stem in found:
            split.same_name.append(f"{found[stem]} = {path}")
        found.setdefault(stem, path)
    return found


def _collect_class_files(split: SplitFiles) -> None:
    folder = split.part.folder
    split.loose = [path for path in split.names.images if os.sep not in path]
    split.pairs = [(os.path.join(folder, path), "") for path in split.names.images if os.sep in path]
    filled = {path.split(os.sep)[0] for path in split.names.images}
    try:
        present = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        present = []
    split.empty_classes = sorted(set(present) - filled)


def _find_class_name(split: SplitFiles, image: str) -> str:
    return "" if split.part.masks is not None else os.path.relpath(image, split.part.folder).split(os.sep)[0]


def _assign_splits(samples: list[SampleFacts], folder: Path) -> list[SampleFacts]:
    """Assign each sample to training or validation by its name, where there is no validation folder."""
    # The default share and the rule of a new run, so that copies across the two sides are found.
    open_ = [number for number, sample in enumerate(samples) if sample.split in (ALL, "train")]
    keys = [Path(os.path.relpath(samples[number].image.path, folder)).as_posix() for number in open_]
    places, share = compute_split_positions(keys), choose_validation_share(len(keys))
    chosen = select_validation_exactly(places, share) if len(places) > 1 else set()
    sides = {number: "val" if index in chosen else "train" for index, number in enumerate(open_)}
    return [
        SampleFacts(sides.get(number, sample.split), sample.image, sample.mask, sample.label)
        for number, sample in enumerate(samples)
    ]
