"""Read MOVi recordings from tar shards that hold a video and the numbers of its objects as .npy.

`movi_e-train-000000.tar` holds `0.video.npy` (frames × height × width × 3) and `0.segmentations.npy` (frames × height ×
width × 1), the same for `1`, and so on; other members are ignored. Arrays are never unpickled, and only the requested
frames of a recording are read.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.data.dataset import BadSample, Files, Sample
from halfstep.data.file_state import (
    FileState,
    RecordedFile,
    compute_block_digest,
    describe_file_change,
    list_block_offsets,
)
from halfstep.data.image_files import find_files, require_folder
from halfstep.data.shard_bytes import read_parts
from halfstep.data.shard_scan import build_shard_error, decode_member_name
from halfstep.data.tar_members import DamagedTar, open_tar
from halfstep.data.video import MOST_CLIP_PIXELS, Recordings, build_natural_key
from halfstep.errors import BadData

VIDEO, THINGS = ".video.npy", ".segmentations.npy"
LAYOUT = "ROOT/movi_e-train-000000.tar with 0.video.npy and 0.segmentations.npy in it, and so on"
_LONGEST_HEADER = 4096
_SPLITS = ("train", "validation", "val", "test")


class ArrayPlace(NamedTuple):
    """The position of an array in its shard."""

    start: int
    size: int


class Recording(NamedTuple):
    """A recording in a shard."""

    shard: str
    key: str
    video: ArrayPlace
    things: ArrayPlace | None


class ArrayHeader(NamedTuple):
    """The shape and dtype of an array, and the offset of its values."""

    frames: int
    height: int
    width: int
    channels: int
    kind: np.dtype[Any]
    start: int


class MoviShards(Recordings):
    """The recordings of a split; `mask` has the object number of each pixel where all recordings have it."""

    notices_changes = True

    def __init__(self, root: str | Path, split: str = "train") -> None:
        self.root = require_folder(root, "the folder of MOVi's shards")
        shards = _select_split_shards(find_files(self.root, (".tar",)), split)
        # Recorded before they are scanned: what changes in between is noticed.
        self._shards = {shard: _record_shard(self.root / shard) for shard in shards}
        self._found = [one for shard in shards for one in _list_recordings(self.root, shard)]
        if not self._found:
            raise BadData(
                f"{self.root} contains no recording of the split {split!r}",
                allowed=LAYOUT,
                do="check data.path; a share, such as data.val=0.1, divides the training recordings",
            )
        self.has_masks = all(one.things for one in self._found)

    def __len__(self) -> int:
        return len(self._found)

    def length(self, number: int) -> int:
        """Return the number of frames; 0 if the recording cannot be read."""
        try:
            return self._header(number, self._found[number].video, 3).frames
        except BadSample:
            return 0

    def part(self, number: int, frames: range) -> Sample:
        """Read these frames; raise BadSample if they cannot be read."""
        one = self._found[number]
        video = self._frames(number, one.video, frames, channels=3)
        sample = {"image": video.permute(0, 3, 1, 2).contiguous()}
        if self.has_masks and one.things:
            things = self._frames(number, one.things, frames, channels=1)[..., 0]
            if things.shape != video.shape[:-1]:
                sizes = f"{tuple(video.shape[1:3])} and {tuple(things.shape[1:])}"
                raise BadSample(self.name(number), f"video and segmentations of different sizes: {sizes}")
            if int(things.max()) > 255:
                raise BadSample(self.name(number), f"an object has the number {int(things.max())}, more than 255")
            sample["mask"] = things.to(torch.uint8)
        return sample

    def name(self, number: int) -> str:
        """Return the shard and key for display."""
        return f"{self.root / self._found[number].shard}/{self._found[number].key}"

    def key(self, number: int) -> str:
        """Return the name below the root."""
        return f"{self._found[number].shard}/{self._found[number].key}"

    def files_of(self, number: int, frames: range) -> Files:
        """Return the shard."""
        shard = self._found[number].shard
        return [(shard, self.root / shard)]

    def _header(self, number: int, part: ArrayPlace, channels: int) -> ArrayHeader:
        head = self._read(number, part.start, min(part.size, _LONGEST_HEADER))
        try:
            found = parse_npy_header(head)
        except ValueError as error:
            raise BadSample(self.name(number), str(error)) from None
        pixels = found.frames * found.height * found.width * found.channels
        # The size of the member must match the header exactly: it decides how much is read.
        if found.channels != channels or found.start + pixels * found.kind.itemsize != part.size:
            raise BadSample(self.name(number), f"an array of {found[:4]}, which does not match its file")
        return found

    def _frames(self, number: int, part: ArrayPlace, frames: range, channels: int) -> Tensor:
        head = self._header(number, part, channels)
        if len(frames) * head.height * head.width > MOST_CLIP_PIXELS:
            raise BadSample(self.name(number), f"{len(frames)} frames, more than {MOST_CLIP_PIXELS:,} pixels together")
        if frames[-1] >= head.frames:
            raise BadSample(self.name(number), f"ends before frame {frames[-1]}")
        shape = (head.height, head.width, channels)
        size = head.height * head.width * channels * head.kind.itemsize
        read = [self._read(number, part.start + head.start + frame * size, size) for frame in frames]
        taken = np.stack([np.frombuffer(one, head.kind).reshape(shape) for one in read])
        # torch supports few operations on uint16.
        return torch.from_numpy(taken if head.kind == np.uint8 else taken.astype(np.int32))

    def _read(self, number: int, start: int, size: int) -> bytes:
        def check(now: FileState) -> None:
            if now == self._shards[shard].state:
                return
            if change := describe_file_change(self._shards[shard], now, self.root / shard):
                raise BadSample(self.name(number), change.replace("its file", "its shard"))
            # Its content was compared, which need not be done again.
            self._shards[shard] = self._shards[shard]._replace(state=now)

        shard = self._found[number].shard
        return read_parts(self.root / shard, [(start, size)], lambda: self.name(number), check)[0]


def _record_shard(shard: Path) -> RecordedFile:
    """Return the state of a shard, with a digest of a few of its blocks; raise BadData if it cannot be read."""
    try:
        state = FileState.of(shard.stat())
        return RecordedFile(
            state, compute_block_digest(shard, list_block_offsets(state.size, whole=False)), whole=False
        )
    except OSError as error:
        raise build_shard_error(shard, error.strerror or type(error).__name__) from error


def _select_split_shards(shards: list[str], split: str) -> list[str]:
    """Return the shards of a split by name or folder; all, for training, where no name contains a split."""

    def names_split(name: str, word: str) -> bool:
        return re.search(rf"(^|[-_/\\]){re.escape(word)}([-_./\\])", name) is not None

    own = [shard for shard in shards if names_split(shard, split)]
    unnamed = not any(names_split(shard, word) for shard in shards for word in _SPLITS)
    return own or (shards if split == "train" and unnamed else [])


def _list_recordings(root: Path, shard: str) -> list[Recording]:
    found: dict[str, dict[str, ArrayPlace]] = {}
    try:
        with open_tar(root / shard) as tar:
            for member in tar.members():
                key, dot, kind = decode_member_name(member.name).partition(".")
                if dot + kind in (VIDEO, THINGS):
                    found.setdefault(key, {})[dot + kind] = ArrayPlace(member.at, member.size)
    except (DamagedTar, OSError) as error:
        raise build_shard_error(root / shard, str(error), f"plain, whole tar files: {LAYOUT}") from error
    keys = sorted((key for key, parts in found.items() if VIDEO in parts), key=build_natural_key)
    return [Recording(shard, key, found[key][VIDEO], found[key].get(THINGS)) for key in keys]


def parse_npy_header(content: bytes) -> ArrayHeader:
    """Return the header of an .npy file in C order with four axes; raise ValueError if it is another."""
    file = io.BytesIO(content)
    try:
        major, _ = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, turned, kind = read(file, max_header_size=_LONGEST_HEADER)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError("no .npy array, or one with a header that cannot be read") from None
    if kind not in (np.uint8, np.uint16) or turned or len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"an array of {shape} and {kind}; frames × height × width × channels of uint8 are wanted")
    return ArrayHeader(*shape, kind, file.tell())
