"""Samples in Parquet files with a column of images, as Hugging Face datasets store them, by the index of `Shards`.

A chunk is a row group, which is read completely; the rows of the index have a row group instead of an offset.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfstep.data.dataset import BadSample
from halfstep.data.file_state import FileState
from halfstep.data.layout import is_store_address
from halfstep.data.parquet_file import ParquetReader, RowGroup, UnreadColumn, format_row_key
from halfstep.data.shard_bytes import Part, merge_near_parts
from halfstep.data.shard_index import SampleRow
from halfstep.data.shard_rows import PARQUET
from halfstep.data.shards import SampleBytes, Shards, list_shard_paths
from halfstep.data.tar_members import BLOCK, DamagedTar
from halfstep.host_memory import read_free_memory

LEAST_KEPT = 2**26


def open_shards(root: str | Path, *given: Any, store: Any = None, **options: Any) -> Shards:
    """Return the samples of a folder of tar or Parquet files, or of an address of tar files.

    `store` is the section of that name of a recipe.
    """
    if is_store_address(root):
        from halfstep.data.store_shards import StoreShards  # not loaded for plain paths

        more = {} if store is None else {"patience": store.patience, "cache": store.cache}
        return StoreShards(str(root), *given, **more, **options)
    kind = ParquetShards if list_shard_paths(root)[0].suffix == PARQUET else Shards
    return kind(root, *given, **options)


@lru_cache(64)
def open_cached_reader(path: Path, modified: int) -> ParquetReader:
    """Return the open file; that of a file that was written again is another."""
    return ParquetReader(path)


class ParquetShards(Shards):
    """A source of Parquet files; each process keeps the row groups that it used last."""

    usual_window = "auto"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.most_kept = max(LEAST_KEPT, (read_free_memory() or 0) // 4 // min(os.cpu_count() or 1, 16))
        self._kept: OrderedDict[tuple[int, int], RowGroup] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}

    @property
    def chunk(self) -> int:
        """The rows of a row group, on average."""
        groups = sum(self.index.row(end - 1).image // BLOCK + 1 for end in self.index.ends)
        return max(1, len(self) // groups)

    def most_open(self, nodes: int, ranks: int) -> int:
        """Return the bytes of chunks that may be open at once: what the processes that read keep."""
        return self.most_kept * ranks

    def parts_of(self, samples: Iterable[int]) -> dict[Path, list[Part]]:
        """Return the parts to read for these samples: the row groups that they are in."""
        groups = {(row.shard, row.image // BLOCK) for row in map(self.index.row, samples)}
        found: dict[Path, list[Part]] = {}
        for shard, number in sorted(groups):
            found.setdefault(self.path(shard), []).extend(merge_near_parts(self._reader(shard).parts(number)))
        return found

    def find_unread_column(self, part: str, index: int) -> UnreadColumn | None:
        """Return the column of a sample's file that has the name of a part, and is not read as one."""
        found: UnreadColumn | None = self._reader(self.index.find(index)[0]).find_unread_column(part)
        return found

    def _reader(self, shard: int) -> Any:
        return open_cached_reader(self.path(shard), self.path(shard).stat().st_mtime_ns)

    def _group(self, row: SampleRow) -> RowGroup:
        at = (row.shard, row.image // BLOCK)
        if at not in self._kept:
            self._kept[at] = self._reader(row.shard).group(at[1])
            while len(self._kept) > 1 and sum(one.table.nbytes for one in self._kept.values()) > self.most_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        return self._kept[at]

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read nothing: chunks are kept."""
        return iter(())

    def _content(self, index: int, row: SampleRow, wanted: tuple[bool, bool, bool], doubts: list[str]) -> SampleBytes:
        try:
            self._check(index, row, FileState.of(os.stat(self.path(row.shard))), doubts)
            image, label, mask = self._group(row).parts_at(index - self.index.first(row.shard))
        except (OSError, DamagedTar) as error:
            raise BadSample(self.name(index), str(error)) from error
        return SampleBytes(
            *(part if one else None for one, part in zip(wanted, (image, b"%d" % label, mask), strict=True))
        )

    def _key(self, index: int) -> str:
        return format_row_key(self.index.find(index)[1])
