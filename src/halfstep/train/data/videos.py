"""Recordings that are video files: only the frames that are wanted are kept, and decoding begins shortly before them.

A file is read as what its name says and as nothing else: formats that lead to other files or to the network, such as
playlists, are not guessed from the content.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import BadData, HalfstepError, MissingExtra
from halfstep.train.data.clips import joined
from halfstep.train.data.listing import existing, files
from halfstep.train.data.reading import MOST_PIXELS
from halfstep.train.data.source import BadSample, Files, Sample

KINDS = {".mp4": "mov", ".m4v": "mov", ".mov": "mov", ".avi": "avi", ".mkv": "matroska", ".webm": "matroska"}
"""What ffmpeg calls the format of a file with this ending."""
SUFFIXES = tuple(KINDS)
MOST_BYTES = 64 * 2**30
"""Of a file, as it is on disk: it is read in parts."""
MOST_FRAMES = 10_000_000
"""Of a file: four days at 30 a second."""
MOST_BEFORE = 20_000
"""Frames that are decoded before the last one that is wanted; more is a file that one cannot seek in."""


class VideoFiles:
    """The videos of a folder, or one video; `image` is frames × 3 × height × width."""

    def __init__(self, root: str | Path) -> None:
        given = Path(root)
        alone = given.is_file() and given.suffix.lower() in KINDS
        self.root = given.parent if alone else existing(given, "the folder of videos")
        self._files = [given.name] if alone else files(self.root, SUFFIXES)
        if not self._files:
            raise BadData(f"{given} holds no video", allowed=", ".join(SUFFIXES), do="check data.path")
        _av()

    def __len__(self) -> int:
        return len(self._files)

    def length(self, number: int) -> int:
        try:
            with _opened(self.name(number)) as (container, stream):
                # Some formats do not say, and the packets have to be counted; there is one for each frame.
                count: int = stream.frames or _packets(container, stream)
        except BadSample:
            return 0
        return count if count <= MOST_FRAMES else 0

    def part(self, number: int, frames: range) -> Sample:
        with _opened(self.name(number)) as (container, stream):
            wanted = _wanted(container, stream, frames)
            return {"image": joined(wanted, len(frames), self.name(number))}

    def name(self, number: int) -> str:
        return str(self.root / self._files[number])

    def key(self, number: int) -> str:
        return Path(self._files[number]).as_posix()

    def files_of(self, number: int, frames: range) -> Files:
        return [(self.key(number), self.name(number))]


class _Unreadable(Exception):
    """The reason, in words."""


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtra(
            "reading videos without the package av", allowed="av", do="pip install halfstep[video]"
        ) from error
    return av


@contextmanager
def _opened(name: str) -> Iterator[tuple[Any, Any]]:
    """A video and its first stream of pictures; all that fails inside is a BadSample."""
    av = _av()
    try:
        _regular(name)
        # A path that begins with a slash is a file; others could be taken for addresses.
        with av.open(os.path.abspath(name), format=KINDS[os.path.splitext(name)[1].lower()]) as container:
            if not container.streams.video:
                raise _Unreadable("no pictures in it")
            stream = container.streams.video[0]
            # Workers read side by side: more threads in each would only be in one another's way.
            stream.codec_context.thread_count = 1
            yield container, stream
    except _Unreadable as error:
        raise BadSample(name, str(error)) from None
    except (BadSample, HalfstepError):
        raise
    except Exception as error:
        # Decoders raise whatever their damaged input leads them to.
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadSample(name, f"cannot be decoded: {' '.join(words.split())[:200]}") from error


def _regular(name: str) -> None:
    status = os.stat(name)
    if not stat.S_ISREG(status.st_mode):
        raise _Unreadable("not a file but a folder, pipe or device")
    if not status.st_size:
        raise _Unreadable("empty, 0 bytes")
    if status.st_size > MOST_BYTES:
        raise _Unreadable(f"{status.st_size:,} bytes, more than {MOST_BYTES:,}")


def _packets(container: Any, stream: Any) -> int:
    return sum(1 for packet in islice(container.demux(stream), MOST_FRAMES + 1) if packet.size)


def _wanted(container: Any, stream: Any, frames: range) -> Iterator[Tensor]:
    left = list(frames)
    for before, (at, frame) in enumerate(_from(container, stream, frames.start)):
        if left and at >= left[0]:
            pixels = _pixels(frame)
        # A frame that is missing, where their distance varies, is shown as the one that follows.
        while left and at >= left[0]:
            left.pop(0)
            yield pixels
        if not left:
            return
        if before > MOST_BEFORE + frames[-1] - frames.start:
            raise _Unreadable(
                f"{before + 1:,} frames were decoded on the way to frame {left[0]}: there is no nearer start"
            )
    raise _Unreadable(f"ends before frame {left[0]}")


def _from(container: Any, stream: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Frames with their numbers, from `first` or from somewhat before it."""
    rate, start = stream.average_rate or stream.guessed_rate, stream.start_time or 0
    if not rate or not stream.time_base:
        raise _Unreadable("does not say how many frames a second has")
    per_frame = 1 / (rate * stream.time_base)
    if first:
        container.seek(start + math.floor(first * per_frame), stream=stream)
        decoded = _numbered(container, stream, start, per_frame)
        head = next(decoded, None)
        if head is not None and head[0] <= first:
            yield head
            yield from decoded
            return
        # An index that is wrong leads behind what was wanted; the beginning is always right.
        container.seek(start, stream=stream)
    yield from _numbered(container, stream, start, per_frame)


def _numbered(container: Any, stream: Any, start: int, per_frame: Any) -> Iterator[tuple[int, Any]]:
    frame: Any = None
    for frame in container.decode(stream):
        if frame.pts is None:
            raise _Unreadable("a frame without a time")
        yield round((frame.pts - start) / per_frame), frame
    if frame is not None:
        # Where their distance varies the last one may be shown for longer than one: it stands for all of these.
        yield round((frame.pts - start + (frame.duration or 0)) / per_frame) - 1, frame


def _pixels(frame: Any) -> Tensor:
    if frame.width * frame.height > MOST_PIXELS:
        raise _Unreadable(f"{frame.width} × {frame.height} pixels, more than {MOST_PIXELS:,}")
    # Telephones film on their side, and say by how much the picture is to be turned.
    upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
    return torch.from_numpy(np.ascontiguousarray(upright)).permute(2, 0, 1)
