"""Collect the facts of a set that settings depend on: number and size of images, classes. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from halfstep.data.image_files import list_folders, list_image_files, open_image, read_exif_orientation
from halfstep.data.layout import CLASSIFICATION, SEGMENTATION, Layout, compute_split_positions
from halfstep.data.mask_classes import MaskReading, count_mask_values, infer_mask_reading
from halfstep.errors import BadSample
from halfstep.status_line import OnProgress

MOST_HEADERS = 500
"""Images whose size is read; of more, evenly spaced ones."""
MOST_MASK_PIXELS = 150 * 2**20
"""Pixels of masks that are read; it takes a second or two."""
FEWEST_MASKS = 16


@dataclass(frozen=True)
class SetFacts:
    """The numbers of a set that decide the settings of a run."""

    images: int
    """Images to train on, before a share is held out."""
    width: int
    """The width of the median image, upright."""
    height: int
    val: str | None = None
    """The validation folder, where there is one."""
    classes: int | None = None
    """The number of class folders."""
    masks: MaskReading | None = None
    masks_read: int = 0
    places: Sequence[float] = ()
    """The position of each image, a hash of its name, which decides whether it is held out."""

    @property
    def longer(self) -> int:
        """The longer side."""
        return max(self.width, self.height)

    @property
    def shorter(self) -> int:
        """The shorter side."""
        return min(self.width, self.height)


def collect_set_facts(layout: Layout, on_progress: OnProgress = lambda done, of: None) -> SetFacts:
    """Inspect a set: every name, the sizes of some images, and the values of some masks."""
    part = layout.train
    files = list_image_files(part.folder)
    places = compute_split_positions(Path(name).as_posix() for name in files)
    width, height = _compute_median_size([part.folder / name for name in _select_spaced_names(files, MOST_HEADERS)])
    if layout.task == CLASSIFICATION:
        return SetFacts(len(files), width, height, layout.val, classes=len(list_folders(part.folder)), places=places)
    assert layout.task == SEGMENTATION
    assert part.masks is not None
    most = max(FEWEST_MASKS, MOST_MASK_PIXELS // max(width * height, 1))
    chosen = _select_spaced_names(list_image_files(part.masks), most)
    masks = _read_mask_files([part.masks / name for name in chosen], on_progress)
    return SetFacts(len(files), width, height, layout.val, masks=masks, masks_read=len(chosen), places=places)


def _compute_median_size(paths: Sequence[Path]) -> tuple[int, int]:
    """Return the size of the image with the median area; files that cannot be opened are skipped."""
    sizes = []
    for path in paths:
        try:
            with open_image(path) as image:
                # Orientations 5 to 8 swap width and height.
                turned = read_exif_orientation(image) >= 5
                sizes.append(image.size[::-1] if turned else image.size)
        except BadSample:
            continue
    by_area = {width * height: (width, height) for width, height in sizes}
    # median_low, because the mean of two areas is the area of no image.
    return by_area[median_low(w * h for w, h in sizes)] if sizes else (0, 0)


def _read_mask_files(paths: Sequence[Path], on_progress: OnProgress) -> MaskReading:
    counts = []
    for done, path in enumerate(paths, 1):
        try:
            with open_image(path, os.fspath(path)) as image:
                counts.append(count_mask_values(image))
        except BadSample:
            continue
        on_progress(done, len(paths))
    return infer_mask_reading(counts)


def _select_spaced_names(names: Sequence[str], most: int) -> list[str]:
    if len(names) <= most:
        return list(names)
    return [names[i * len(names) // most] for i in range(most)]
