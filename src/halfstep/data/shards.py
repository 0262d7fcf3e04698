"""Read WebDataset shards by number through a sealed index, so that order and resume work as for folders."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from halfstep.data.dataset import BadSample, Files, Sample, Seal
from halfstep.data.file_state import FileState, RecordedFile, change_since
from halfstep.data.folders import same_size
from halfstep.data.held_out import Numbers, divided
from halfstep.data.image_files import MOST_BYTES, existing, files
from halfstep.data.image_io import MaskClasses, Palette, mask_of, read_image
from halfstep.data.layout import place_of
from halfstep.data.shard_index import (
    SOME_LABELS,
    SOME_MASKS,
    SOME_UNLABELLED,
    SOME_UNMASKED,
    SampleRow,
    ShardIndex,
    ShardSet,
    build_index,
    existing_index,
)
from halfstep.data.shard_scan import LONGEST_LABEL, MASK_PERSON, NONE, key_at, label_in
from halfstep.data.tar_members import FEW, DamagedTar, opened_tar
from halfstep.errors import BadData

T = TypeVar("T")
MOST_SHARDS = 100_000
LONG_SCAN = 2**30
"""Bytes of shards above which the progress of a scan is displayed."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_NEAR = 4096
"""Bytes between the parts of a sample, such as tar headers, that are read along with them."""
_BITS = 2**64 - 1
"""Times before 1970 are negative, and some file systems number files beyond 63 bits."""


def read_parts(
    path: Path, parts: Sequence[tuple[int, int]], name: Callable[[], str], check: Callable[[FileState], None]
) -> list[bytes]:
    """Read parts of a shard by offset and size, after a `check` of its state.

    Raise BadSample, with the name that `name` gives, where they cannot be read.
    """
    try:
        # Opened each time: a handle shared by processes would share its position.
        with open(path, "rb", buffering=0) as file:
            check(FileState.of(os.fstat(file.fileno())))
            return _read_parts(file.fileno(), parts)
    except OSError as error:
        raise BadSample(name(), error.strerror or type(error).__name__) from error
    except EOFError:
        raise BadSample(name(), "the shard ends before the sample does") from None


def _read_parts(handle: int, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    """Read parts of a file, in one go where they lie side by side; raise EOFError where it ends before."""
    first, end = min(start for start, _ in parts), max(start + size for start, size in parts)
    if end - first <= sum(size for _, size in parts) + _NEAR:
        content = os.pread(handle, end - first, first)
        found = [content[start - first : start - first + size] for start, size in parts]
    else:
        found = [os.pread(handle, size, start) for start, size in parts]
    if any(len(part) < size for part, (_, size) in zip(found, parts, strict=True)):
        raise EOFError
    return found


class Shards:
    """A source of `image`, and of those `parts` that the shards have: `label`, `mask`.

    `root` is a folder of .tar files, one file, or a pattern such as `train-{000..003}.tar`. Raises BadData where a
    shard cannot be used.
    """

    notices_changes = True

    def __init__(
        self,
        root: str | Path,
        channels: int = 3,
        classes: int = 2,
        ignore_index: int | None = None,
        palette: Palette | None = None,
        parts: Collection[str] = ("label", "mask"),
    ) -> None:
        self.channels, self.mask_classes, self.parts = channels, MaskClasses(classes, ignore_index, palette), parts
        shards = shards_at(root)
        self.root = shards.root
        self._states = np.array([[value & _BITS for value in state] for state in shards.states], np.uint64)
        self.index = existing_index(root, shards) or _built(shards)
        self._kinds = self._checked_kinds()
        self.classes = self._class_names()

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample where it cannot be read, BadData where its mask does not fit."""
        row = self.index.row(index)
        image, rest = self._read(index, row, (row.image, row.image_size))
        found = self._named(index, lambda name: read_image(image, self.channels, name))
        if "mask" in rest:
            self._named(index, lambda name: same_size(found.shape[-2:], rest["mask"].shape, name))
        return {"image": found, **rest}

    def without_image(self, index: int) -> Sample:
        """Return the label or mask."""
        return self._read(index, self.index.row(index))[1]

    def _read(self, index: int, row: SampleRow, image: tuple[int, int] | None = None) -> tuple[bytes, Sample]:
        """Read the bytes of the image, if it is asked for, and the label or mask, from the shard at once."""
        has_label, has_mask = self._kinds
        parts = [image] if image else []
        # The label is in the index, too; that of the shard counts, whatever was done to the index.
        parts += [(row.label_at, LONGEST_LABEL + 1)] * has_label + [(row.mask, row.mask_size)] * has_mask
        if not parts:
            return b"", {}
        if (size := max(size for _, size in parts)) > MOST_BYTES:
            raise BadSample(self.name(index), f"{size:,} bytes, more than {MOST_BYTES:,}")
        path, doubts = self.path(row.shard), list[str]()
        content = read_parts(path, parts, lambda: self.name(index), lambda now: self._check(index, row, now, doubts))
        if doubts and self.digest(row) != row.digest:
            raise BadSample(self.name(index), doubts[0])
        picture = content.pop(0) if image else b""
        rest: Sample = {}
        if has_label:
            rest["label"] = torch.tensor(self._checked_label(content.pop(0), index, row))
        if has_mask:
            mask = content.pop(0)
            rest["mask"] = self._named(index, lambda name: mask_of(mask, self.mask_classes, name))
        return picture, rest

    def _check(self, index: int, row: SampleRow, now: FileState, doubts: list[str]) -> None:
        """Raise BadSample where the shard has another size; note where it may be another file."""
        if self.is_as_before(row.shard, now):
            return
        before = FileState(*self._states[row.shard].tolist())
        if change := change_since(RecordedFile(before), now, self.path(row.shard)):
            doubts.append(change.replace("its file", "its shard"))
            if now.size != before.size:
                raise BadSample(self.name(index), doubts[0])

    def is_as_before(self, shard: int, now: FileState) -> bool:
        """Return whether a shard has the state that it had when the source was opened."""
        return bool(self._states[shard].tolist() == [value & _BITS for value in now])

    def digest(self, row: SampleRow) -> int:
        """Return the digest of a sample as its shard has it now; -1 where it cannot be read."""
        try:
            with opened_tar(self.path(row.shard), FEW) as tar:
                mask = tar.digest(row.mask, row.mask_size, MASK_PERSON) if row.mask >= 0 else 0
                return tar.digest(row.image, row.image_size) ^ mask
        except (OSError, DamagedTar):
            return NONE

    def _named(self, index: int, work: Callable[[str], T]) -> T:
        """Return what `work` returns; its error has the name of the sample, which is read only then."""
        try:
            return work("")
        except (BadSample, BadData):
            return work(self.name(index))

    def path(self, shard: int) -> Path:
        """Return the path of a shard."""
        return self.root / self.index.names[shard]

    def name(self, index: int) -> str:
        """Return the shard and key for display."""
        shard, number = self.index.find(index)
        try:
            return f"{self.path(shard)}/{self._key(index)}"
        except (OSError, DamagedTar):
            return f"{self.path(shard)}/sample {number}"

    def key(self, index: int) -> str:
        """Return the name of the shard and the key; raise BadData where the shard cannot be read."""
        shard, number = self.index.find(index)
        try:
            return f"{self.path(shard).name}/{self._key(index)}"
        except (OSError, DamagedTar) as error:
            raise BadData(
                f"the name of sample {number} cannot be read from {self.path(shard)}: {error}",
                allowed="shards as they were indexed",
                do="look at the shard, and start the same command again",
            ) from error

    def _key(self, index: int) -> str:
        row = self.index.row(index)
        with opened_tar(self.path(row.shard), FEW) as tar:
            return key_at(tar, self.index.start_of_headers(row.shard, row.image), row.image)

    def files_of(self, index: int) -> Files:
        """Return the shard."""
        shard, _ = self.index.find(index)
        return [(self.index.names[shard], self.path(shard))]

    @property
    def seal(self) -> Seal:
        """The seal of the index, which stands for every sample."""
        return Seal(self, "")

    def divided(self, share: float) -> tuple[Numbers, Numbers]:
        """Return the numbers of the samples for training, and of those for validation."""
        return divided(self.index, share, lambda index: place_of(self.key(index)))

    def _checked_kinds(self) -> tuple[bool, bool]:
        """Return whether samples have a label and a mask that are asked for.

        Raise BadData unless all samples have the same: a batch cannot have labels for some.
        """
        kinds, found = self.index.table["kinds"], []
        for part, some, without in (("label", SOME_LABELS, SOME_UNLABELLED), ("mask", SOME_MASKS, SOME_UNMASKED)):
            has = [(kinds & one).any() for one in (some, without)]
            if all(has) and part in self.parts:
                one, other = (self._first_with(part, present) for present in (True, False))
                raise BadData(
                    f"{self.name(min(one, other))} and {self.name(max(one, other))} differ in having a label or a mask",
                    allowed="samples that all have the same parts",
                    do="write the shards again, or give data.path only those that belong together",
                )
            found.append(bool(has[0]) and part in self.parts)
        return found[0], found[1]

    def _first_with(self, part: str, present: bool) -> int:
        some, without = (SOME_LABELS, SOME_UNLABELLED) if part == "label" else (SOME_MASKS, SOME_UNMASKED)
        shard = int(np.argmax(self.index.table["kinds"] & (some if present else without) != 0))
        has = self.index.labels(shard) >= 0 if part == "label" else self.index.has_masks(shard)
        return self.index.first(shard) + int(np.argmax(has == present))

    def _class_names(self) -> list[str]:
        """Return the lines of `classes.txt` beside the shards or one folder up; else the numbers."""
        most = int(self.index.table["largest"].max())
        first = self.path(0).parent
        for folder in (first, first.parent):
            listed = folder / "classes.txt"
            if listed.is_file() and listed.stat().st_size < 2**20:
                names = _lines(listed)
                if len(names) > most:
                    return names
        return [str(number) for number in range(most + 1)]

    def _checked_label(self, content: bytes, index: int, row: SampleRow) -> int:
        """Return the label that the shard holds; raise BadData where its index has another."""
        content = content.split(b"\0", 1)[0]
        try:
            label = label_in(content, "")
        except DamagedTar:
            label = NONE
        if label != row.label:
            raise BadData(
                f"{self.name(index)} has the label {label if label >= 0 else content!r} in its shard, and {row.label} "
                "in the index of it: the shard was written again, and kept its size and times",
                allowed="shards that do not change after they were indexed",
                do=f"rm {self.index.path}, and start the same command again",
            )
        return label


def _built(shards: ShardSet) -> ShardIndex:
    if sum(state.size for state in shards.states) < LONG_SCAN:
        return build_index(shards, lambda done, of: None)
    from halfstep.terminal import progress  # here, because rich takes a while to import

    with progress("indexing the shards", "MB") as on_progress:
        return build_index(shards, on_progress)


def shards_at(root: str | Path) -> ShardSet:
    """Return the shards of a folder, a file or a pattern; raise BadData where there is none."""
    paths = shard_paths(root)
    try:
        return ShardSet.of(paths)
    except OSError as error:
        raise BadData(
            f"the shards of {root} cannot be looked at: {error}",
            allowed="a folder of .tar files that this user can read",
            do="check data.path",
        ) from error


def _lines(listed: Path) -> list[str]:
    try:
        lines = listed.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadData(
            f"{listed} is not UTF-8: {error.reason} at byte {error.start}",
            allowed="the names of the classes, one a line, in UTF-8",
            do="save the file as UTF-8, or remove it",
        ) from error
    return [line.strip() for line in lines if line.strip()]


def shard_paths(root: str | Path) -> list[Path]:
    """Return the sorted shards of a folder, a file or a pattern; raise BadData where there is none."""
    given = Path(root)
    if _RANGE.search(str(root)):
        paths = [Path(name) for name in _expanded(str(root))]
    elif given.is_file():
        paths = [given]
    else:
        folder = existing(given, "the folder of shards")
        paths = [folder / name for name in files(folder, (".tar",))]
        packed = [] if paths else files(folder, (".tar.gz", ".tgz"))
        if packed:
            raise BadData(
                f"{root} holds compressed shards, such as {packed[0]}, which cannot be read by offset",
                allowed="plain .tar files: images do not become smaller by compression",
                do=f"gunzip {folder / packed[0]}, and the others likewise",
            )
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise BadData(
            f"{missing[0]} is not there" if missing else f"{root} holds no .tar file",
            allowed="a folder of .tar files, one of them, or a pattern such as train-{000..003}.tar",
            do="check data.path",
        )
    return paths


def _count(ranges: list[tuple[str, str]]) -> float:
    """Return the number of shards; infinity where a number is absurdly long, and 0 where a range is empty."""
    if max(len(number) for both in ranges for number in both) > 18:
        return math.inf
    return math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges)


def _expanded(pattern: str) -> list[str]:
    parts = _RANGE.split(pattern)
    between, ranges = parts[::3], list(zip(parts[1::3], parts[2::3], strict=True))
    if not 1 <= _count(ranges) <= MOST_SHARDS:
        raise BadData(
            f"the pattern {pattern} counts {', '.join(f'from {first} to {last}' for first, last in ranges)}",
            allowed=f"upwards, at most {MOST_SHARDS:,} shards in all",
            do="correct data.path",
        )
    # The first number's width decides the padding, as in the shell.
    numbers = [[str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] for first, last in ranges]
    return [
        between[0] + "".join(number + after for number, after in zip(chosen, between[1:], strict=True))
        for chosen in product(*numbers)
    ]
