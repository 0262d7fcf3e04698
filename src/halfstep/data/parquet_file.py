"""Parquet files with a column of images, as Hugging Face datasets store them: rows, row groups, columns. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.data.image_files import MOST_BYTES
from halfstep.data.layout import PLACE_PERSON
from halfstep.data.shard_bytes import Part
from halfstep.data.shard_rows import LARGEST_LABEL, MASK_PERSON, NONE, ShardRows
from halfstep.data.tar_members import BLOCK, DamagedTar, compute_bytes_digest
from halfstep.errors import convert_import_error

IMAGES, LABELS, MASKS = ("image", "img"), ("label", "labels", "fine_label"), ("mask", "annotation", "label")
"""The names of columns, the first of them that a file has."""
_PART_COLUMNS = {"label": LABELS, "mask": MASKS[:2]}
"""The names by part; a column `label` may be either, and is called a label."""
LARGEST_GROUP = 2**31
"""Bytes of a row group, which is read whole."""


class UnreadColumn(NamedTuple):
    """A column with the name of a part, whose type is not the part's."""

    name: str
    kind: str
    """What the column is, in words that follow its name: `is a float (double)`."""
    do: str

    def __str__(self) -> str:
        return f"its column {self.name} {self.kind}"


class RowGroup(NamedTuple):
    """A row group in memory."""

    table: Any
    first: int
    """The number of its first row in the file."""
    columns: tuple[str, str | None, str | None]
    """The names of the columns of images, labels and masks."""

    def parts_at(self, number: int) -> tuple[bytes | None, int, bytes | None]:
        """Return the image, the label and the mask of a row of the file; -1 for no label, as Hugging Face has it."""
        if not self.first <= number < self.first + self.table.num_rows:
            raise DamagedTar(f"row {number} is not in the row group that was indexed")
        found = [self.table.column(one)[number - self.first].as_py() if one else None for one in self.columns]
        image, label, mask = found
        if label is not None and label > LARGEST_LABEL:
            raise DamagedTar(f"row {number} has the class number {label}, more than {LARGEST_LABEL:,}")
        return _extract_bytes(image), NONE if label is None or label < 0 else int(label), _extract_bytes(mask)


def _extract_bytes(value: Any) -> bytes | None:
    content = value.get("bytes") if isinstance(value, dict) else value
    return content if isinstance(content, bytes) else None


class ParquetReader:
    """An open file; raises DamagedTar if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found,import-untyped,unused-ignore]

            self._file = ParquetFile(path, pre_buffer=False)
        except ImportError as error:
            raise convert_import_error(error) or error from None
        except Exception as error:  # pyarrow has its own kinds of ValueError, OSError and KeyError
            raise DamagedTar(f"no Parquet file: {str(error)[:200]}") from None
        schema = self._file.schema_arrow
        kinds = {name: _classify_column(schema.field(name).type) for name in schema.names}
        wanted = ((IMAGES, ColumnUse.BYTES), (LABELS, ColumnUse.NUMBERS), (MASKS, ColumnUse.BYTES))
        found = [next((name for name in names if kinds.get(name) == kind), None) for names, kind in wanted]
        if found[0] is None:
            names = ", ".join(schema.names)[:200]
            raise DamagedTar(f"no column {' or '.join(IMAGES)} of {{bytes, path}}; its columns are {names}")
        self._columns = (found[0], found[1], found[2])
        self._types: dict[str, Any] = {name: schema.field(name).type for name in schema.names}
        counts = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self.starts = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        """The first row of each row group, and the number of rows."""

    def find_unread_column(self, part: str) -> UnreadColumn | None:
        """Return the column that has the name of a part, `label` or `mask`, and is not read as one; None without it."""
        name = next((one for one in _PART_COLUMNS[part] if one in self._types), None)
        if name is None:
            return None
        kind = self._types[name]
        if part == "mask":
            return UnreadColumn(name, _describe_column_type(kind), "write the masks as PNG images, {bytes, path}")
        if self._columns[1] == name:
            return UnreadColumn(name, "has no class number in any row", "write a class number into each row")
        return UnreadColumn(name, _describe_column_type(kind), _advise_label_type(name, kind))

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
        return RowGroup(table, self.starts[number], self._columns)

    def parts(self, number: int) -> list[Part]:
        """Return where the columns of a row group are in the file."""
        group, found = self._file.metadata.row_group(number), []
        for one in map(group.column, range(group.num_columns)):
            if one.path_in_schema.partition(".")[0] in self._columns:
                start = one.dictionary_page_offset or one.data_page_offset
                found.append((int(start), int(one.total_compressed_size)))
        return found


def _import_types() -> Any:
    from pyarrow import types  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return types


class ColumnUse(Enum):
    """The use of a column by the type of its values."""

    BYTES, NUMBERS, NONE = "bytes", "numbers", "none"


def _classify_column(kind: Any) -> ColumnUse:
    """Return the use of a column of this type; a category, as pandas writes it, has that of its values."""
    types = _import_types()
    values = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_struct(values):
        return ColumnUse.BYTES if values.get_field_index("bytes") >= 0 else ColumnUse.NONE
    if types.is_binary(values) or types.is_large_binary(values) or types.is_binary_view(values):
        return ColumnUse.BYTES
    return ColumnUse.NUMBERS if types.is_integer(values) else ColumnUse.NONE


def _describe_column_type(kind: Any) -> str:
    """Return what a column is, in words that follow its name."""
    types = _import_types()
    if types.is_null(kind):
        return "is null, without a value in any row"
    if types.is_dictionary(kind):
        return f"is a category of {_find_type_word(kind.value_type) or kind.value_type}s"
    word = _find_type_word(kind)
    if not word:
        return f"is of type {kind}"
    return f"is a {word}" if str(kind) == word else f"is a {word} ({kind})"


def _find_type_word(kind: Any) -> str:
    """Return the word for values of a type; empty if there is none."""
    types = _import_types()
    words: dict[str, tuple[Callable[[Any], bool], ...]] = {
        "string": (types.is_string, types.is_large_string, types.is_string_view),
        "float": (types.is_floating,),
        "bool": (types.is_boolean,),
        "decimal": (types.is_decimal,),
        "integer": (types.is_integer,),
        "list": (types.is_list, types.is_large_list, types.is_fixed_size_list),
    }
    return next((word for word, tests in words.items() if any(test(kind) for test in tests)), "")


def _advise_label_type(name: str, kind: Any) -> str:
    """Return how to make class numbers of a label column that has none."""
    types = _import_types()
    word = _find_type_word(kind.value_type if types.is_dictionary(kind) else kind)
    column = f'df["{name}"]'
    match word:
        case "string":
            return f'write class numbers; in pandas: {column} = {column}.astype("category").cat.codes'
        case "float" | "decimal":
            rows = f'df = df.dropna(subset=["{name}"]); '
            return f'write integers; in pandas: {rows}{column} = {column}.astype("int64")'
        case "bool":
            return f'write integers; in pandas: {column} = {column}.astype("int64")'
        case "list":
            return "write one integer for each row"
    return "write a class number into each row"


def format_row_key(number: int) -> str:
    """Return the key of a row: its number, since the paths of images may be missing or the same."""
    return f"{number:08d}"


def scan_parquet(path: Path) -> ShardRows:
    """Read a file once, a row group at a time."""
    file = ParquetReader(path)
    start = blake2b(os.fsencode(path.name) + b"/", digest_size=8, person=PLACE_PERSON)
    rows, digests = list[tuple[int, ...]](), list[int]()
    for number in range(len(file.starts) - 1):
        group, at = file.group(number), number * BLOCK
        for row in range(group.first, group.first + group.table.num_rows):
            place = start.copy()
            place.update(format_row_key(row).encode())
            image, label, mask = group.parts_at(row)
            if image is None or len(image) > MOST_BYTES:
                raise DamagedTar(f"row {row} has no image of up to {MOST_BYTES:,} bytes in the file itself")
            masked = (NONE, NONE) if mask is None else (at, len(mask))
            rows.append((at, len(image), label, int.from_bytes(place.digest()[:4], "big"), *masked))
            digests.append(
                compute_bytes_digest(image) ^ (0 if mask is None else compute_bytes_digest(mask, MASK_PERSON))
            )
    if not rows:
        raise DamagedTar("no row in it")
    at, sizes, labels, places, *masks = np.array(rows, np.int64).T
    # The label is in the row: a place just before the image stands for it.
    size, digest = os.path.getsize(path), np.array(digests, np.uint64)
    return ShardRows(size, at, sizes, labels, places, digest, masks[0], masks[1], at - BLOCK)
