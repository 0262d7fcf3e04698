"""Read WebDataset shards by number through a sealed index, so that order and resume work as for folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch

from halfstep.data.dataset import BadSample, Files, Sample, Source, Subset
from halfstep.data.file_bytes import READ
from halfstep.data.file_state import FileState, RecordedFile, describe_file_change
from halfstep.data.folders import check_same_size
from halfstep.data.held_out import SampleNumbers, split_index_samples
from halfstep.data.image_files import MOST_BYTES, find_files, require_folder
from halfstep.data.image_io import MaskClasses, Palette, read_image, read_mask
from halfstep.data.layout import FEW, Rule, compute_split_position
from halfstep.data.parquet_file import UnreadColumn
from halfstep.data.shard_bytes import NEAR, Part, announce_parts, merge_near_parts, read_handle_parts, read_parts
from halfstep.data.shard_index import (
    PLACE,
    SOME_LABELS,
    SOME_MASKS,
    SOME_UNLABELED,
    SOME_UNMASKED,
    SampleRow,
    ShardIndex,
    ShardSet,
    build_index,
    find_index,
)
from halfstep.data.shard_patterns import expand_shard_pattern, is_shard_pattern
from halfstep.data.shard_rows import MASK_PERSON, PARQUET, ShardRows
from halfstep.data.shard_scan import (
    ARCHIVES,
    LONGEST_LABEL,
    list_unread_names,
    parse_padded_label,
    read_member_key,
    scan_shard,
)
from halfstep.data.tar_members import BLOCK, DamagedTar, TarReader, compute_bytes_digest, open_tar
from halfstep.data.tar_members import FEW as FEW_BYTES
from halfstep.errors import BadData, StorageFailed
from halfstep.host_memory import read_free_memory

T = TypeVar("T")
Verify = Literal["all", "sampled", "off"]
SAMPLED: Verify = "sampled"
_VERIFY_EVERY = {"all": 1, "sampled": 64, "off": 0}
OTHER_BYTES = "its bytes differ from those indexed: the shard is damaged, or was rewritten"
MOST_AHEAD = 2**24
"""Bytes of images that are read ahead."""
CHUNK_BYTES, FEWEST_IN_CHUNK = 8 * 2**20, 16
"""The bytes of a chunk, and the samples that it has at least."""
SPLITS = {"train", "validation", "test"}
"""How Hugging Face names the files of a split: `train-00000-of-00005.parquet`."""
LONG_SCAN = 2**30
"""Bytes of shards above which the progress of a scan is displayed."""


class SampleBytes(NamedTuple):
    """The bytes of a sample; None for a part that it does not have, or that is not used."""

    image: bytes | None
    label: bytes | None
    mask: bytes | None


class Shards(Source):
    """A source of `image`, and of those `parts` that the shards have: `label`, `mask`.

    `root` is a folder of .tar files, one file, or a pattern such as `train-{000..003}.tar`. Raises BadData if a
    shard cannot be used.
    """

    notices_changes = True
    usual_window: Literal["all", "auto"] = "all"
    is_local = True
    near = NEAR
    """Bytes between the parts of a chunk that are read along with them."""
    patience = 0.0
    """Seconds for which a read may be repeated."""

    def __init__(
        self,
        root: str | Path,
        channels: int = 3,
        classes: int = 2,
        ignore_index: int | None = None,
        palette: Palette | None = None,
        parts: Collection[str] = ("label", "mask"),
        verify: Verify = SAMPLED,
    ) -> None:
        self.channels, self.mask_classes, self.parts = channels, MaskClasses(classes, ignore_index, palette), parts
        self._verify_every = _VERIFY_EVERY[verify]
        self._open(root)
        self._kinds = self._check_kinds()
        self._ahead: dict[int, tuple[SampleRow, SampleBytes]] = {}
        self.classes = self._class_names()

    def _open(self, root: str | Path) -> None:
        shards = build_shard_set(root)
        self.root, self._start_of_paths = shards.root, f"{shards.root}{os.sep}"
        self._states, self.unread = shards.states, shards.unread
        self.index = find_index(root, shards) or _build_index_with_progress(shards)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample if it cannot be read, BadData where its mask does not fit."""
        content, rest = self._read(index, with_image=True)
        found = self._named(index, lambda name: read_image(content.image or b"", self.channels, name))
        if "mask" in rest:
            self._named(index, lambda name: check_same_size(found.shape[-2:], rest["mask"].shape, name))
        return {"image": found, **rest}

    def without_image(self, index: int) -> Sample:
        """Return the label or mask."""
        return self._read(index, with_image=False)[1]

    def _read(self, index: int, with_image: bool) -> tuple[SampleBytes, Sample]:
        content, rest = self.content(index, with_image), Sample()
        if content.label is not None:
            rest["label"] = torch.tensor(self._check_label(content.label, index))
        if (mask := content.mask) is not None:
            rest["mask"] = self._named(index, lambda name: read_mask(mask, self.mask_classes, name))
        return content, rest

    def content(self, index: int, with_image: bool = True) -> SampleBytes:
        """Return the bytes of a sample; raise BadSample if they cannot be read, or are not those of the index."""
        has_label, has_mask = self._kinds
        doubts: list[str] = []
        if with_image and (ahead := self._ahead.pop(index, None)):
            row, content = ahead
        else:
            row = self.index.row(index)
            content = self._content(index, row, (with_image, has_label, has_mask), doubts)
        if doubts or (with_image and self._is_verified(row)):
            # The digest is that of both, also where one is not used.
            both, is_masked = content, row.mask >= 0
            if not (with_image and is_masked <= has_mask):
                both = self._content(index, row, (True, False, is_masked), doubts)
            mask = compute_bytes_digest(both.mask or b"", MASK_PERSON) if is_masked else 0
            if compute_bytes_digest(both.image or b"") ^ mask != row.digest:
                raise BadSample(self.name(index), doubts[0] if doubts else OTHER_BYTES)
        return content

    def _content(self, index: int, row: SampleRow, wanted: tuple[bool, bool, bool], doubts: list[str]) -> SampleBytes:
        """Read the wanted parts of a sample, of image, label and mask, from its shard at once."""
        self._check_sizes(index, row, wanted)
        if not (parts := _list_parts(row, wanted)):
            return SampleBytes(None, None, None)
        path = self._start_of_paths + self.index.names[row.shard]  # joining a Path takes longer than reading
        found = read_parts(path, parts, lambda: self.name(index), lambda now: self._check(index, row, now, doubts))
        return _build_sample_bytes(found, wanted)

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read the bytes of the next samples, each shard opened once; yield the place of each before it is read.

        `content` reads those that are left out: from the first changed one on, or beyond `MOST_AHEAD`.
        """
        self._ahead.clear()
        wanted, room, shard, handle = (True, *self._kinds), MOST_AHEAD, -1, -1
        try:
            places = sorted(range(len(numbers)), key=numbers.__getitem__)
            for place, row in zip(places, self.index.rows([numbers[place] for place in places]), strict=True):
                yield place
                room -= row.image_size + max(row.mask_size, 0)
                if row.shard != shard:
                    if handle >= 0:
                        os.close(handle)
                    shard, handle = row.shard, -1
                    handle = os.open(self._start_of_paths + self.index.names[shard], READ)
                    if not self.is_as_before(shard, FileState.of(os.fstat(handle))):
                        break
                if room < 0:
                    break
                self._ahead[numbers[place]] = row, _read_sample_bytes(handle, row, wanted)
        except (OSError, EOFError, BadData, StorageFailed):
            pass
        finally:
            if handle >= 0:
                os.close(handle)

    def _check_sizes(self, index: int, row: SampleRow, wanted: tuple[bool, bool, bool]) -> None:
        if (largest := max(row.image_size * wanted[0], row.mask_size * wanted[2])) > MOST_BYTES:
            raise BadSample(self.name(index), f"{largest:,} bytes, more than {MOST_BYTES:,}")

    def _is_verified(self, row: SampleRow) -> bool:
        """Return whether the bytes of a sample are compared with its digest: by seed, epoch and sample in a run."""
        every = self._verify_every
        # The generator was seeded for this sample of this epoch, and is not drawn from.
        return every == 1 or (every > 1 and (torch.initial_seed() ^ row.digest) % every == 0)

    def _check(self, index: int, row: SampleRow, now: FileState, doubts: list[str]) -> None:
        """Raise BadSample if the shard has another size; note where it may be another file."""
        if self.is_as_before(row.shard, now):
            return
        before = self._states[row.shard]
        if change := describe_file_change(RecordedFile(before), now, self.path(row.shard)):
            doubts.append(change.replace("its file", "its shard"))
            if now.size != before.size:
                raise BadSample(self.name(index), doubts[0])

    def is_as_before(self, shard: int, now: FileState) -> bool:
        """Return whether a shard has the state that it had when the source was opened."""
        return self._states[shard] == now

    def _named(self, index: int, work: Callable[[str], T]) -> T:
        """Return what `work` returns; its error has the name of the sample, which is read only then."""
        try:
            return work("")
        except (BadSample, BadData):
            return work(self.name(index))

    @property
    def chunk(self) -> int:
        """The samples of a chunk, for orders that read chunks."""
        return max(FEWEST_IN_CHUNK, CHUNK_BYTES // self.bytes_per_sample)

    @property
    def bytes_per_sample(self) -> int:
        """The bytes of the shards for each sample."""
        return max(1, int(self.index.table["bytes"].sum()) // len(self.index))

    def most_open(self, nodes: int, ranks: int) -> int:
        """Return the bytes of chunks that may be open at once: a quarter of the memory of all nodes."""
        # While a window is read, the next one is announced.
        return (read_free_memory() or 0) // 4 // 2 * nodes

    def bytes_of(self, index: int) -> int:
        """Return the bytes of a sample: its image, and its mask or label where these are used."""
        row = self.index.row(index)
        return row.image_size + self._kinds[1] * max(row.mask_size, 0) + self._kinds[0] * (LONGEST_LABEL + 1)

    def parts_of(self, samples: Iterable[int]) -> dict[Path, list[Part]]:
        """Return the parts to read for these samples: parts of each shard, those that lie side by side as one."""
        found: dict[int, list[Part]] = {}
        for row in map(self.index.row, samples):
            found.setdefault(row.shard, []).extend(_list_parts(row, (True, *self._kinds)))
        return {self.path(shard): merge_near_parts(parts, self.near) for shard, parts in found.items()}

    def announce(self, chunks: Sequence[tuple[int, int]], number: Callable[[int], int]) -> None:
        """Announce chunks to the system; `number` returns the number in the index of a sample of an order."""
        if not hasattr(os, "posix_fadvise"):  # macOS and Windows
            return
        for chunk in chunks:
            for path, parts in self.parts_of(map(number, range(*chunk))).items():
                announce_parts(path, parts)

    def scan(self, shard: int, is_stopped: Callable[[], bool]) -> ShardRows:
        """Read a shard whole; raise BadData if it cannot be used."""
        return scan_shard(self.path(shard), is_stopped)

    def path(self, shard: int) -> Path:
        """Return the path of a shard."""
        return self.root / self.index.names[shard]

    @property
    def place(self) -> str:
        """The folder of the shards for display."""
        return str(self.root)

    def where(self, shard: int) -> str:
        """Return the path of a shard for display."""
        return str(self.path(shard))

    def _tar(self, shard: int, at_once: int) -> AbstractContextManager[TarReader]:
        return open_tar(self.path(shard), at_once)

    def name(self, index: int) -> str:
        """Return the shard and key for display."""
        shard, number = self.index.find(index)
        try:
            return f"{self.where(shard)}/{self._key(index)}"
        except (OSError, DamagedTar):
            return f"{self.where(shard)}/sample {number}"

    def key(self, index: int) -> str:
        """Return the name of the shard and the key; raise BadData if the shard cannot be read."""
        shard, number = self.index.find(index)
        try:
            return f"{self.path(shard).name}/{self._key(index)}"
        except (OSError, DamagedTar) as error:
            raise BadData(
                f"the name of sample {number} cannot be read from {self.where(shard)}: {error}",
                allowed="unchanged shards",
                do="check the shard, and start the same command again",
            ) from error

    def _key(self, index: int) -> str:
        row, start = self.index.row(index), 0
        if index > self.index.first(row.shard):
            before = self.index.row(index - 1)
            # Headers follow the image before; parts that lie apart may have it later.
            start = before.image - -before.image_size // BLOCK * BLOCK if before.image < row.image else 0
        with self._tar(row.shard, FEW_BYTES) as tar:
            return read_member_key(tar, start, row.image)

    def files_of(self, index: int) -> Files:
        """Return the shard."""
        shard, _ = self.index.find(index)
        return [(self.index.names[shard], self.path(shard))]

    @property
    def chosen(self) -> str:
        """Empty: all samples of the index, in its order."""
        return ""

    def divide(self, fraction: float, rule: Rule) -> tuple[Subset, Subset]:
        """Return the samples for training, and those for validation."""
        # Every rule is the same for many samples, and an index has their positions.
        if len(self) < FEW:
            return super().divide(fraction, rule)
        train, val = split_index_samples(self.index, fraction, lambda index: compute_split_position(self.key(index)))
        return IndexSubset(self, train), IndexSubset(self, val)

    def split_positions(self, fraction: float) -> list[float]:
        """Return the position of each sample; names are read only where the index does not tell positions apart."""
        columns = [self.index.packed(shard).column(PLACE) for shard in range(len(self.index.names))]
        upper = np.concatenate(columns).astype(np.uint64)
        _, which, counts = np.unique(upper, return_inverse=True, return_counts=True)
        unclear = (counts[which] > 1) | (upper == int(fraction * 2**32))
        return [compute_split_position(self.key(n)) if unclear[n] else int(one) / 2**32 for n, one in enumerate(upper)]

    def _check_kinds(self) -> tuple[bool, bool]:
        """Return whether samples have a label and a mask that are requested.

        Raise BadData unless all samples have the same: a batch cannot have labels for some.
        """
        kinds, found = self.index.table["kinds"], []
        for part, some, without in (("label", SOME_LABELS, SOME_UNLABELED), ("mask", SOME_MASKS, SOME_UNMASKED)):
            has = [(kinds & one).any() for one in (some, without)]
            if all(has) and part in self.parts:
                raise self._build_parts_error(part)
            found.append(bool(has[0]) and part in self.parts)
        return found[0], found[1]

    def _build_parts_error(self, part: str) -> BadData:
        one, other = (self._first_with(part, present) for present in (True, False))
        unread = self.find_unread_column(part, other)
        reason = f"; {self.where(self.index.find(other)[0])}: {unread}" if unread else ""
        return BadData(
            f"{self.name(min(one, other))} and {self.name(max(one, other))} differ in having a label or a mask{reason}",
            allowed="samples that all have the same parts",
            do=unread.do if unread else "write the shards again, or give data.path only those that belong together",
        )

    def find_unread_column(self, part: str, index: int) -> UnreadColumn | None:
        """Return the column of a sample's shard that has the name of a part, and is not read as one; tar has none."""
        return None

    def _first_with(self, part: str, present: bool) -> int:
        some, without = (SOME_LABELS, SOME_UNLABELED) if part == "label" else (SOME_MASKS, SOME_UNMASKED)
        shard = int(np.argmax(self.index.table["kinds"] & (some if present else without) != 0))
        numbers = range(self.index.first(shard), self.index.ends[shard])
        return next(n for n in numbers if (getattr(self.index.row(n), part) >= 0) == present)

    def _class_names(self) -> list[str]:
        """Return the lines of `classes.txt` next to the shards or one folder up; else the numbers."""
        most = int(self.index.table["largest"].max())
        numbers = [str(number) for number in range(most + 1)]
        return next((names for names in self._class_lists() if len(names) > most), numbers)

    def _class_lists(self) -> Iterator[list[str]]:
        first = self.path(0).parent
        for folder in (first, first.parent):
            listed = folder / "classes.txt"
            if listed.is_file() and listed.stat().st_size < 2**20:
                yield parse_class_names(listed.read_bytes(), str(listed))

    def _check_label(self, content: bytes, index: int) -> int:
        """Return the label that the shard holds; raise BadData if its index has another."""
        row = self.index.row(index)
        label = parse_padded_label(content)
        if label != row.label:
            raise BadData(
                f"{self.name(index)} has the label {label if label >= 0 else content.rstrip(bytes(1))!r} in its shard, "
                f"and {row.label} in the index of it: the shard was rewritten with the same size and times",
                allowed="shards that stay unchanged after indexing",
                do=f"rm {self.index.path}, and start the same command again",
            )
        return label


class IndexSubset(Subset):
    """One side of a share of an index, whose numbers are no list and have a digest."""

    numbers: SampleNumbers

    @property
    def digest(self) -> str:
        """Digits that stand for the share and the side."""
        return self.numbers.digest


def _list_parts(row: SampleRow, wanted: tuple[bool, bool, bool]) -> list[Part]:
    image, label, mask = wanted
    # The label is in the index, too; that of the shard counts, also where the index was edited.
    parts = [(row.image, row.image_size)] if image else []
    if label:
        parts.append((row.label_at, LONGEST_LABEL + 1))
    if mask:
        parts.append((row.mask, row.mask_size))
    return parts


def _read_sample_bytes(handle: int, row: SampleRow, wanted: tuple[bool, bool, bool]) -> SampleBytes:
    """Read a sample from its open shard; raise EOFError if that ends before."""
    _, label, mask = wanted
    image, size, label_at = row.image, row.image_size, row.label_at
    start, end = image, image + size
    if label:
        start, end = (label_at, end) if label_at < image else (image, label_at + LONGEST_LABEL + 1)
    # Most samples are an image and a label next to it: without lists of parts they take a third of the time.
    if mask or end - start > size + NEAR:
        return _build_sample_bytes(read_handle_parts(handle, _list_parts(row, wanted)), wanted)
    content = os.pread(handle, end - start, start)
    if len(content) < end - start:
        raise EOFError
    if not label:
        return SampleBytes(content, None, None)
    image, label_at = image - start, label_at - start
    return SampleBytes(content[image : image + size], content[label_at : label_at + LONGEST_LABEL + 1], None)


def _build_sample_bytes(found: list[bytes], wanted: tuple[bool, bool, bool]) -> SampleBytes:
    image, label, mask = wanted
    last = found.pop() if mask else None
    middle = found.pop() if label else None
    return SampleBytes(found.pop() if image else None, middle, last)


def _build_index_with_progress(shards: ShardSet) -> ShardIndex:
    if sum(state.size for state in shards.states) < LONG_SCAN:
        return build_index(shards, lambda done, of: None)
    from halfstep.terminal import display_progress  # here, because rich takes a while to import

    with display_progress("indexing the shards", "MB") as on_progress:
        return build_index(shards, on_progress)


def resolve_training_folder(root: Path) -> Path:
    """Return the folder that a run trains on: `train` below the root where it exists, otherwise the root."""
    return root / "train" if (root / "train").is_dir() else root


def build_shard_set(root: str | Path) -> ShardSet:
    """Return the shards of a folder, a file or a pattern; raise BadData if there is none."""
    files = find_shard_files(root)
    try:
        return ShardSet.of(files.paths, files.unread)
    except FileNotFoundError as error:
        raise _build_no_shard_error(f"{error.filename} does not exist") from None
    except OSError as error:
        raise BadData(
            f"the shards of {root} cannot be read: {error}",
            allowed="a folder of .tar files that this user can read",
            do="check data.path",
        ) from error


def parse_class_names(content: bytes, listed: str) -> list[str]:
    """Return the lines of a file that are not empty; raise BadData if it is not UTF-8."""
    try:
        lines = content.decode("utf-8").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise BadData(
            f"{listed} is not UTF-8: {error.reason} at byte {error.start}",
            allowed="the names of the classes, one a line, in UTF-8",
            do="save the file as UTF-8, or remove it",
        ) from error
    return [line.strip() for line in lines if line.strip()]


class ShardFiles(NamedTuple):
    """The shards of a set, and the archives next to them that are not read."""

    paths: list[Path]
    unread: list[str]


def find_shard_files(root: str | Path) -> ShardFiles:
    """Return the sorted shards of a folder, a file or a pattern; raise BadData if there is none."""
    given = Path(root)
    if is_shard_pattern(str(root)):
        return ShardFiles([Path(name) for name in expand_shard_pattern(str(root))], [])
    if given.is_file():
        return ShardFiles([given], [])
    folder = require_folder(given, "the folder of shards")
    found = find_files(folder, ARCHIVES)
    # Compressed ones are refused when they are read, with the command that unpacks them.
    for suffixes in ((".tar",), (PARQUET,), (".tar.gz", ".tgz")):
        if names := [name for name in found if name.lower().endswith(suffixes)]:
            if suffixes == (PARQUET,):
                _check_one_split(folder, names)
            return ShardFiles([folder / name for name in names], list_unread_names(found, names))
    raise _build_no_shard_error(f"{root} contains no .tar or {PARQUET} file")


def list_shard_paths(root: str | Path) -> list[Path]:
    """Return the sorted shards of a folder, a file or a pattern; raise BadData if there is none."""
    return find_shard_files(root).paths


def _build_no_shard_error(given: str) -> BadData:
    return BadData(
        given,
        allowed="a folder of .tar or .parquet files, one such file, or a pattern such as train-{000..003}.tar",
        do="give the folder that contains the shards",
    )


def _check_one_split(folder: Path, names: list[str]) -> None:
    """Raise BadData for Parquet files of several splits."""
    splits = sorted({name.partition("-")[0] for name in names} & SPLITS)
    if len(splits) > 1:
        raise BadData(
            f"{folder} contains Parquet files of several splits: {', '.join(splits)}",
            allowed="a folder for each split",
            do=" && ".join(f"mkdir {folder / one} && mv {folder}/{one}-*{PARQUET} {folder / one}" for one in splits),
        )
