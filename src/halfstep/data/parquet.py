"""Read Parquet files with a column of images, as Hugging Face datasets store them. Imports no torch."""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.data.image_files import MOST_BYTES
from halfstep.data.layout import PLACE_PERSON
from halfstep.data.shard_bytes import Part
from halfstep.data.shard_scan import LARGEST_LABEL, MASK_PERSON, NONE, ShardRows
from halfstep.data.tar_members import BLOCK, DamagedTar, digest_of
from halfstep.errors import missing_extra

SUFFIX = ".parquet"
IMAGES, LABELS, MASKS = ("image", "img"), ("label", "labels", "fine_label"), ("mask", "annotation", "label")
"""The names of columns, the first of them that a file has."""
LARGEST_GROUP = 2**31
"""Bytes of a row group, which is read whole."""


class RowGroup(NamedTuple):
    """A row group in memory."""

    table: Any
    first: int
    """The number of its first row in the file."""
    image: str
    label: str | None
    mask: str | None
    """The names of its columns."""

    def image_at(self, number: int) -> bytes | None:
        """Return the image of a row of the file."""
        return self._bytes(self.image, number)

    def mask_at(self, number: int) -> bytes | None:
        """Return the mask of a row of the file."""
        return self._bytes(self.mask, number) if self.mask else None

    def label_at(self, number: int) -> int:
        """Return the class number of a row; -1 where there is none, as Hugging Face has it too."""
        label = self._at(self.label, number) if self.label else None
        if label is not None and label > LARGEST_LABEL:
            raise DamagedTar(f"row {number} has the class number {label}, more than {LARGEST_LABEL:,}")
        return NONE if label is None or label < 0 else int(label)

    def _bytes(self, name: str, number: int) -> bytes | None:
        found = self._at(name, number)
        content = found.get("bytes") if isinstance(found, dict) else found
        return content if isinstance(content, bytes) else None

    def _at(self, name: str, number: int) -> Any:
        if not self.first <= number < self.first + self.table.num_rows:
            raise DamagedTar(f"row {number} is not in the row group that was indexed")
        return self.table.column(name)[number - self.first].as_py()


class ParquetReader:
    """An open file; raises DamagedTar where it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found,import-untyped,unused-ignore]

            self._file = ParquetFile(path, pre_buffer=False)
        except ImportError as error:
            raise missing_extra(error) or error from None
        except Exception as error:  # pyarrow has its own kinds of ValueError, OSError and KeyError
            raise DamagedTar(f"no Parquet file: {str(error)[:200]}") from None
        schema = self._file.schema_arrow
        kinds = {name: _kind(schema.field(name).type) for name in schema.names}
        image = next((name for name in IMAGES if kinds.get(name) == "bytes"), None)
        if image is None:
            names = ", ".join(schema.names)[:200]
            raise DamagedTar(f"no column {' or '.join(IMAGES)} of {{bytes, path}}; its columns are {names}")
        self._columns = (
            image,
            next((name for name in LABELS if kinds.get(name) == "number"), None),
            next((name for name in MASKS if kinds.get(name) == "bytes"), None),
        )
        counts = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self.starts = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        """The first row of each row group, and the number of rows."""

    def group(self, number: int) -> RowGroup:
        """Read a row group."""
        if number >= len(self.starts) - 1:
            raise DamagedTar(f"it has no row group {number}")
        if (size := self._file.metadata.row_group(number).total_byte_size) > LARGEST_GROUP:
            raise DamagedTar(f"row group {number} has {size:,} bytes, more than {LARGEST_GROUP:,}")
        try:
            # One thread: those of a pool would not live in a forked worker.
            names = [one for one in self._columns if one]
            table = self._file.read_row_group(number, columns=names, use_threads=False)
        except Exception as error:
            raise DamagedTar(f"row group {number} cannot be read: {str(error)[:200]}") from None
        return RowGroup(table, self.starts[number], *self._columns)

    def parts(self, number: int) -> list[Part]:
        """Return where the columns of a row group are in the file."""
        group, found = self._file.metadata.row_group(number), []
        for one in map(group.column, range(group.num_columns)):
            if one.path_in_schema.partition(".")[0] in self._columns:
                start = one.dictionary_page_offset or one.data_page_offset
                found.append((int(start), int(one.total_compressed_size)))
        return found


def _kind(kind: Any) -> str:
    if kind.num_fields:
        names = [kind.field(number).name for number in range(kind.num_fields)]
        return "bytes" if "bytes" in names else ""
    return "bytes" if "binary" in str(kind) else "number" if "int" in str(kind) else ""


def key_of_row(number: int) -> str:
    """Return the key of a row: its number, since the paths of images may be missing or the same."""
    return f"{number:08d}"


def scan_parquet(path: Path) -> ShardRows:
    """Read a file once, a row group at a time."""
    file = ParquetReader(path)
    start = blake2b(os.fsencode(path.name) + b"/", digest_size=8, person=PLACE_PERSON)
    rows: list[tuple[int, ...]] = []
    for number in range(len(file.starts) - 1):
        group, at = file.group(number), number * BLOCK
        for row in range(group.first, group.first + group.table.num_rows):
            place = start.copy()
            place.update(key_of_row(row).encode())
            image, mask = group.image_at(row), group.mask_at(row)
            if image is None or len(image) > MOST_BYTES:
                raise DamagedTar(f"row {row} has no image of at most {MOST_BYTES:,} bytes in the file itself")
            digest = digest_of(image) ^ (0 if mask is None else digest_of(mask, MASK_PERSON))
            masked = (NONE, NONE) if mask is None else (at, len(mask))
            high, low = divmod(digest, 2**32)
            upper = int.from_bytes(place.digest()[:4], "big")
            rows.append((at, len(image), group.label_at(row), upper, high, low, *masked))
    if not rows:
        raise DamagedTar("no row in it")
    at, sizes, labels, places, high, low, mask_at, mask_sizes = np.array(rows, np.int64).T
    digests = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    # The label is in the row: a place just before the image stands for it.
    return ShardRows(os.path.getsize(path), at, sizes, labels, places, digests, mask_at, mask_sizes, at - BLOCK)


@lru_cache(64)
def reader_of(path: Path, modified: int) -> ParquetReader:
    """Return the open file; that of a file that was written again is another."""
    return ParquetReader(path)
