"""Cut clips of a few frames out of longer recordings, and read recordings that are folders of frames or videos."""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.data.dataset import BadSample, Files, Sample, Source, Subset, split_source
from halfstep.data.folders import MASKS_RULE, NumberedFiles, check_same_size, pair_images
from halfstep.data.image_files import (
    MOST_PIXELS,
    UnreadableFile,
    check_regular_file,
    find_files,
    list_image_files,
    require_folder,
)
from halfstep.data.image_io import MaskClasses, read_image, read_mask
from halfstep.data.layout import Rule, select_validation_by_position
from halfstep.errors import BadData, HalfstepError, MissingExtra

MOST_CLIP_PIXELS = 4 * MOST_PIXELS
"""Pixels over all frames of a clip, which are in memory together: 800 MB in color."""
_LAYOUT = "ROOT/CLIP/FRAME; with masks ROOT/images/CLIP/FRAME and ROOT/masks/CLIP/FRAME"
_NUMBERED = MaskClasses(classes=256)
"""A mask has a number for each object, and 0 for the background."""


class Recordings(ABC):
    """Long clips by number, of which parts are read. Safe to use from several processes at once."""

    notices_changes: bool = False
    """Whether it notices files that change under a run by itself."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def length(self, number: int) -> int:
        """Return the number of frames; 0 if it is unknown, and reading raises the reason."""

    @abstractmethod
    def part(self, number: int, frames: range) -> Sample:
        """Read these frames; raise BadSample if one cannot be read."""

    @abstractmethod
    def name(self, number: int) -> str: ...

    @abstractmethod
    def key(self, number: int) -> str: ...

    @abstractmethod
    def files_of(self, number: int, frames: range) -> Files: ...


class ClipWindows(Source):
    """A source of clips of `frames` frames, one in `every`, without overlap; short recordings give none.

    Raises BadData if no recording is long enough.
    """

    def __init__(self, recordings: Recordings, frames: int, every: int = 1) -> None:
        self.recordings, self.frames, self.every = recordings, frames, every
        self.notices_changes = recordings.notices_changes
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
        """Read a clip; raise BadSample if a frame cannot be read."""
        return self.recordings.part(*self._at(index))

    def name(self, index: int) -> str:
        """Return the recording and first frame for display."""
        number, frames = self._at(index)
        return f"{self.recordings.name(number)} from frame {frames.start}"

    def key(self, index: int) -> str:
        """Return the name that does not depend on where the set is."""
        number, frames = self._at(index)
        return f"{self.recordings.key(number)}#{frames.start}"

    def files_of(self, index: int) -> Files:
        """Return the files of the clip."""
        return self.recordings.files_of(*self._at(index))

    def by_recording(self) -> list[list[int]]:
        """Return the clips of each recording that has any."""
        found: dict[int, list[int]] = {}
        for index, (number, _) in enumerate(self._windows):
            found.setdefault(number, []).append(index)
        return list(found.values())

    @property
    def _span(self) -> int:
        return (self.frames - 1) * self.every + 1

    def _firsts(self, length: int) -> range:
        # A recording that cannot be opened is one bad sample, counted when its turn comes.
        return range(0, length - self._span + 1, self.frames * self.every) if length else range(1)

    def _at(self, index: int) -> tuple[int, range]:
        number, first = self._windows[index]
        return number, range(first, first + self._span, self.every)


def split_recordings(
    windows: ClipWindows, fraction: float, rule: Rule = select_validation_by_position
) -> tuple[Subset, Subset]:
    """Split by recording, like `split`: two parts of one recording are too similar to be on both sides."""
    groups = windows.by_recording()
    if len(groups) == 1:
        raise BadData(
            f"one recording that is long enough for a clip, with data.val={fraction:g}",
            allowed="at least 2 recordings: parts of one are never on both sides",
            do="add recordings, or give data.val a folder",
        )
    # The first clip stands for its recording: it exists, with the same name, however long the clips are.
    sides = split_source(Subset(windows, [group[0] for group in groups]), fraction, rule)
    train, val = ([index for number in side.numbers for index in groups[number]] for side in sides)
    return Subset(windows, train), Subset(windows, val)


class FrameFolders(NumberedFiles, Recordings):
    """Recordings as folders of numbered images: 2 comes before 10.

    With `images` and `masks` in the root, `mask` has the object number of each pixel.
    """

    def __init__(self, root: str | Path) -> None:
        folder = require_folder(root, "the folder of clips")
        self.masks = find_mask_folder(folder)
        self.root = self.images = folder / "images" if self.masks else folder
        pairs = (
            pair_images(self.images, self.masks, MASKS_RULE, "_mask")
            if self.masks
            else [(path, "") for path in list_image_files(folder)]
        )
        found: dict[str, list[tuple[str, str]]] = {}
        for image, mask in pairs:
            found.setdefault(os.path.dirname(image), []).append((image, mask))
        if not found:
            raise BadData(f"{folder} contains no image", allowed=_LAYOUT, do="check data.path")
        self._files = sorted(found)
        self._frames = [sorted(found[name], key=lambda pair: build_natural_key(pair[0])) for name in self._files]

    def length(self, number: int) -> int:
        """Return the number of frames."""
        return len(self._frames[number])

    def part(self, number: int, frames: range) -> Sample:
        """Read these frames; raise BadSample if one cannot be read."""
        pairs = [self._frames[number][frame] for frame in frames]
        images = stack_frames((read_image(self.images / image) for image, _ in pairs), len(pairs), self.name(number))
        if not self.masks:
            return {"image": images}
        masks = [self._mask(self.masks / mask, images) for _, mask in pairs]
        return {"image": images, "mask": torch.stack(masks)}

    def files_of(self, number: int, frames: range) -> Files:
        """Yield the files of these frames."""
        for image, mask in (self._frames[number][frame] for frame in frames):
            yield f"images/{Path(image).as_posix()}", self.images / image
            if self.masks:
                yield f"masks/{Path(mask).as_posix()}", self.masks / mask

    def _mask(self, path: Path, images: Tensor) -> Tensor:
        try:
            mask = read_mask(path, _NUMBERED, str(path))
        except BadData as error:
            # There are no classes here, and no palette to advise.
            raise BadData(
                error.given,
                allowed="the number of a thing for each pixel, 0 to 255; or a palette PNG, of which the numbers count",
                do="write the masks again, in gray or with a palette",
            ) from error
        check_same_size(images.shape[-2:], mask.shape, str(path))
        return mask


def find_mask_folder(root: Path) -> Path | None:
    """Return the folder of the masks of a folder of clips; None if there is none."""
    masks = root / "masks"
    if not masks.is_dir():
        return None
    if not (root / "images").is_dir():
        raise BadData(
            f"{root} has the folder masks but no folder images",
            allowed=_LAYOUT,
            do="move the frames into a folder images",
        )
    return masks


def build_natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in a name count as numbers."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def stack_frames(frames: Iterable[Tensor], count: int, name: str) -> Tensor:
    """Return frames × channels × height × width; raise BadSample where frames differ, or exceed the memory limit."""
    taken: list[Tensor] = []
    for frame in frames:
        # Checked with the first frame, before the others are decoded.
        if count * frame.shape[-2] * frame.shape[-1] > MOST_CLIP_PIXELS:
            raise BadSample(
                name, f"{count} frames of {_format_frame_size(frame)}, more than {MOST_CLIP_PIXELS:,} together"
            )
        if taken and (frame.shape, frame.dtype) != (taken[0].shape, taken[0].dtype):
            both = f"{_format_size_and_depth(taken[0])}, then {_format_size_and_depth(frame)}"
            raise BadSample(name, f"frames of different sizes or depths: {both}")
        taken.append(frame)
    return torch.stack(taken)


def _format_frame_size(frame: Tensor) -> str:
    return f"{frame.shape[-1]} × {frame.shape[-2]} pixels"


def _format_size_and_depth(frame: Tensor) -> str:
    return f"{_format_frame_size(frame)} of {8 * frame.element_size()} bits"


# Read recordings from video files: decoding starts shortly before the requested frames, and keeps only those. A file is
# opened as the format of its suffix and as nothing else: formats that refer to other files or to the network, such as
# playlists, are never guessed from the content.


KINDS = {".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".avi": "avi", ".mkv": "matroska", ".webm": "matroska"}
"""ffmpeg's name of the format for each suffix."""
SUFFIXES = tuple(KINDS)
MOST_BYTES = 64 * 2**30
"""Bytes of a file on disk; it is read in parts."""
MOST_FRAMES = 10_000_000
"""Frames of a file: four days at 30 per second."""
MOST_BEFORE = 20_000
"""Frames decoded before the last one requested; more means that the file is not seekable."""


class VideoFiles(NumberedFiles, Recordings):
    """The videos of a folder, or one video; `image` is frames × 3 × height × width."""

    def __init__(self, root: str | Path) -> None:
        given = Path(root)
        alone = given.is_file() and given.suffix.lower() in KINDS
        self.root = given.parent if alone else require_folder(given, "the folder of videos")
        self._files = [given.name] if alone else find_files(self.root, SUFFIXES)
        if not self._files:
            raise BadData(f"{given} contains no video", allowed=", ".join(SUFFIXES), do="check data.path")
        _import_av()

    def length(self, number: int) -> int:
        """Return the number of frames; 0 if the file cannot be read."""
        try:
            with _open_video(self.name(number)) as (container, stream):
                # Some formats do not store the number of frames: packets are counted instead, one per frame.
                packets = islice(container.demux(stream), MOST_FRAMES + 1)
                count: int = stream.frames or sum(1 for packet in packets if packet.size)
        except BadSample:
            return 0
        return count if count <= MOST_FRAMES else 0

    def part(self, number: int, frames: range) -> Sample:
        """Read these frames; raise BadSample if they cannot be decoded."""
        with _open_video(self.name(number)) as (container, stream):
            wanted = _decode_wanted_frames(container, stream, frames)
            return {"image": stack_frames(wanted, len(frames), self.name(number))}

    def files_of(self, number: int, frames: range) -> Files:
        """Return the video file."""
        return [(self.key(number), self.name(number))]


def _import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtra(
            "reading videos without the package av", allowed="av", do="pip install 'halfstep[video]'"
        ) from error
    return av


@contextmanager
def _open_video(name: str) -> Iterator[tuple[Any, Any]]:
    """Open a video and its first video stream; every failure inside is a BadSample."""
    av = _import_av()
    try:
        check_regular_file(os.stat(name), MOST_BYTES)
        # An absolute path is a file; another could be taken for a URL.
        with av.open(os.path.abspath(name), format=KINDS[os.path.splitext(name)[1].lower()]) as container:
            if not container.streams.video:
                raise UnreadableFile("no pictures in it")
            stream = container.streams.video[0]
            # Workers read in parallel: more threads in each would compete for the same cores.
            stream.codec_context.thread_count = 1
            yield container, stream
    except UnreadableFile as error:
        raise BadSample(name, str(error)) from None
    except (BadSample, HalfstepError):
        raise
    except Exception as error:
        # Decoders raise anything on damaged input.
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadSample(name, f"cannot be decoded: {' '.join(words.split())[:200]}") from error


def _decode_wanted_frames(container: Any, stream: Any, frames: range) -> Iterator[Tensor]:
    left = list(frames)
    for before, (at, frame) in enumerate(_iterate_frames_from(container, stream, frames.start)):
        if left and at >= left[0]:
            if frame.width * frame.height > MOST_PIXELS:
                raise UnreadableFile(f"{frame.width} × {frame.height} pixels, more than {MOST_PIXELS:,}")
            # Phones record rotated video, and store the angle.
            upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            pixels = torch.from_numpy(np.ascontiguousarray(upright)).permute(2, 0, 1)
        # With a variable frame rate, a missing frame is replaced by the one that follows.
        while left and at >= left[0]:
            left.pop(0)
            yield pixels
        if not left:
            return
        if before > MOST_BEFORE + frames[-1] - frames.start:
            raise UnreadableFile(
                f"{before + 1:,} frames were decoded on the way to frame {left[0]}: there is no nearer start"
            )
    raise UnreadableFile(f"ends before frame {left[0]}")


def _iterate_frames_from(container: Any, stream: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Yield frames with their numbers, from `first` or somewhat before it."""
    rate, start = stream.average_rate or stream.guessed_rate, stream.start_time or 0
    if not rate or not stream.time_base:
        raise UnreadableFile("does not say how many frames a second has")
    per_frame = 1 / (rate * stream.time_base)
    if first:
        container.seek(start + math.floor(first * per_frame), stream=stream)
        decoded = _iterate_numbered_frames(container, stream, start, per_frame)
        head = next(decoded, None)
        if head is not None and head[0] <= first:
            yield head
            yield from decoded
            return
        # A wrong index leads past the requested frame; the beginning is always right.
        container.seek(start, stream=stream)
    yield from _iterate_numbered_frames(container, stream, start, per_frame)


def _iterate_numbered_frames(container: Any, stream: Any, start: int, per_frame: Any) -> Iterator[tuple[int, Any]]:
    frame: Any = None
    for frame in container.decode(stream):
        if frame.pts is None:
            raise UnreadableFile("a frame without a time")
        yield round((frame.pts - start) / per_frame), frame
    if frame is not None:
        # With a variable frame rate, the last frame may be shown for several: it stands for all of them.
        yield round((frame.pts - start + (frame.duration or 0)) / per_frame) - 1, frame
