"""Clips of a few frames, cut out of longer recordings; and recordings that are folders of frames."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfstep.errors import BadData
from halfstep.train.data.listing import existing, image_files
from halfstep.train.data.masks import Meaning, mask_of
from halfstep.train.data.pairs import RULE, paired, same_size
from halfstep.train.data.reading import MOST_PIXELS, read_image
from halfstep.train.data.source import BadSample, Files, Sample
from halfstep.train.data.split import Subset, split

MOST_CLIP_PIXELS = 4 * MOST_PIXELS
"""Over all frames of a clip, which are in memory together: 800 MB in colour."""
_LAYOUT = "ROOT/CLIP/FRAME; with masks ROOT/images/CLIP/FRAME and ROOT/masks/CLIP/FRAME"
_NUMBERED = Meaning(classes=256)
"""A mask has a number for each thing, and 0 for what is behind them."""


class Recordings(Protocol):
    """Long clips by number, of which parts are read. Safe to use from several processes at once."""

    def __len__(self) -> int: ...

    def length(self, number: int) -> int:
        """How many frames it has; 0 where that cannot be told, and reading it will say why."""
        ...

    def part(self, number: int, frames: range) -> Sample:
        """Those frames, or BadSample where one of them cannot be read."""
        ...

    def name(self, number: int) -> str: ...

    def key(self, number: int) -> str: ...

    def files_of(self, number: int, frames: range) -> Files: ...


class Windows:
    """Clips of `frames` frames, one of `every`, one after the other; a recording that is too short gives none."""

    def __init__(self, recordings: Recordings, frames: int, every: int = 1) -> None:
        self.recordings, self.frames, self.every = recordings, frames, every
        lengths = [recordings.length(number) for number in range(len(recordings))]
        self._windows = [(number, first) for number, length in enumerate(lengths) for first in self._firsts(length)]
        if not self._windows:
            longest = max(lengths, default=0)
            raise BadData(
                f"the longest of {len(lengths)} clips has {longest} frames, and {self._span} are needed",
                allowed=f"clips of at least {self._span} frames, for data.frames={frames} and data.every={every}",
                do="add a smaller data.frames or data.every, or give longer clips",
            )

    def __len__(self) -> int:
        return len(self._windows)

    def read(self, index: int) -> Sample:
        return self.recordings.part(*self._at(index))

    def name(self, index: int) -> str:
        number, frames = self._at(index)
        return f"{self.recordings.name(number)} from frame {frames.start}"

    def key(self, index: int) -> str:
        number, frames = self._at(index)
        return f"{self.recordings.key(number)}#{frames.start}"

    def files_of(self, index: int) -> Files:
        return self.recordings.files_of(*self._at(index))

    def by_recording(self) -> list[list[int]]:
        """The numbers of the windows of each recording that has any."""
        found: dict[int, list[int]] = {}
        for index, (number, _) in enumerate(self._windows):
            found.setdefault(number, []).append(index)
        return list(found.values())

    @property
    def _span(self) -> int:
        return (self.frames - 1) * self.every + 1

    def _firsts(self, length: int) -> range:
        # A recording that cannot be opened is a sample, too: a bad one, which is counted when its turn comes.
        return range(0, length - self._span + 1, self.frames * self.every) if length else range(1)

    def _at(self, index: int) -> tuple[int, range]:
        number, first = self._windows[index]
        return number, range(first, first + self._span, self.every)


def split_recordings(windows: Windows, fraction: float) -> tuple[Subset, Subset]:
    """As `split` does, by recording: two parts of one are too much alike to be on both sides."""
    groups = windows.by_recording()
    if len(groups) == 1:
        raise BadData(
            f"one recording that is long enough for a clip, with data.val={fraction:g}",
            allowed="at least 2 recordings: parts of one are never on both sides",
            do="add recordings, or give data.val a folder",
        )
    # The first window stands for its recording: it is there, and named alike, however long the clips are.
    sides = split(Subset(windows, [group[0] for group in groups]), fraction)
    train, val = ([index for number in side.numbers for index in groups[number]] for side in sides)
    return Subset(windows, train), Subset(windows, val)


class FrameFolders:
    """A folder for each recording, and its frames in it as images, numbered: 2 comes before 10.

    With `images` and `masks` in the root, `mask` has the number of a thing for each pixel.
    """

    def __init__(self, root: str | Path) -> None:
        folder = existing(root, "the folder of clips")
        self.masks = mask_folder(folder)
        self.images = folder / "images" if self.masks else folder
        pairs = (
            paired(self.images, self.masks, RULE, "_mask")
            if self.masks
            else [(path, "") for path in image_files(folder)]
        )
        found: dict[str, list[tuple[str, str]]] = {}
        for image, mask in pairs:
            found.setdefault(os.path.dirname(image), []).append((image, mask))
        if not found:
            raise BadData(f"{folder} holds no image", allowed=_LAYOUT, do="check data.path")
        self._names = sorted(found)
        self._frames = [sorted(found[name], key=lambda pair: in_order(pair[0])) for name in self._names]

    def __len__(self) -> int:
        return len(self._names)

    def length(self, number: int) -> int:
        return len(self._frames[number])

    def part(self, number: int, frames: range) -> Sample:
        pairs = [self._frames[number][frame] for frame in frames]
        images = joined((read_image(self.images / image) for image, _ in pairs), len(pairs), self.name(number))
        if not self.masks:
            return {"image": images}
        masks = [self._mask(self.masks / mask, images) for _, mask in pairs]
        return {"image": images, "mask": torch.stack(masks)}

    def name(self, number: int) -> str:
        return str(self.images / self._names[number])

    def key(self, number: int) -> str:
        return Path(self._names[number]).as_posix()

    def files_of(self, number: int, frames: range) -> Files:
        for image, mask in (self._frames[number][frame] for frame in frames):
            yield f"images/{Path(image).as_posix()}", self.images / image
            if self.masks:
                yield f"masks/{Path(mask).as_posix()}", self.masks / mask

    def _mask(self, path: Path, images: Tensor) -> Tensor:
        try:
            mask = mask_of(path, _NUMBERED, str(path))
        except BadData as error:
            # Here are no classes, and no palette that could be written.
            raise BadData(
                error.given,
                allowed="the number of a thing for each pixel, 0 to 255; or a palette PNG, of which the numbers count",
                do="write the masks again, in grey or with a palette",
            ) from error
        same_size(images.shape[-2:], mask.shape, str(path))
        return mask


def mask_folder(root: Path) -> Path | None:
    """Where the masks of a folder of clips are; None where there are none."""
    masks = root / "masks"
    if not masks.is_dir():
        return None
    if not (root / "images").is_dir():
        raise BadData(
            f"{root} holds the folder masks, and no folder images beside it",
            allowed=_LAYOUT,
            do="move the frames into a folder images",
        )
    return masks


def in_order(name: str) -> list[tuple[int, str]]:
    """For sorting: numbers in a name count as numbers."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def joined(frames: Iterable[Tensor], count: int, name: str) -> Tensor:
    """Frames × channels × height × width, or BadSample where they are not alike, or too many for the memory."""
    taken: list[Tensor] = []
    for frame in frames:
        if count * frame.shape[-2] * frame.shape[-1] > MOST_CLIP_PIXELS:
            raise BadSample(name, f"{count} frames of {_size(frame)}, more than {MOST_CLIP_PIXELS:,} together")
        if taken and (frame.shape, frame.dtype) != (taken[0].shape, taken[0].dtype):
            both = f"{_size_and_depth(taken[0])}, then {_size_and_depth(frame)}"
            raise BadSample(name, f"frames of different sizes or depths: {both}")
        taken.append(frame)
    return torch.stack(taken)


def _size(frame: Tensor) -> str:
    return f"{frame.shape[-1]} × {frame.shape[-2]} pixels"


def _size_and_depth(frame: Tensor) -> str:
    return f"{_size(frame)} of {8 * frame.element_size()} bits"
