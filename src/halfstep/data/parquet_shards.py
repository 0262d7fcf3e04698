"""Samples in Parquet files, as `Shards` has those in tar files: a chunk is a row group, which is read whole."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.data.dataset import BadSample
from halfstep.data.file_state import FileState
from halfstep.data.parquet import SUFFIX, RowGroup, key_of_row, reader_of
from halfstep.data.shard_bytes import Part, joined
from halfstep.data.shard_index import SampleRow
from halfstep.data.shard_scan import MASK_PERSON, NONE
from halfstep.data.shards import Content, Shards, shard_paths
from halfstep.data.tar_members import BLOCK, DamagedTar, digest_of
from halfstep.host_memory import free_memory

LEAST_KEPT = 2**26


def open_shards(root: str | Path, *given: Any, **options: Any) -> Shards:
    """Return the samples of a folder of tar or Parquet files."""
    kind = ParquetShards if shard_paths(root)[0].suffix == SUFFIX else Shards
    return kind(root, *given, **options)


class ParquetShards(Shards):
    """A source of Parquet files; each process keeps the row groups that it used last."""

    usual_window = "auto"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.most_kept = max(LEAST_KEPT, (free_memory() or 0) // 4 // min(os.cpu_count() or 1, 16))
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
            found.setdefault(self.path(shard), []).extend(joined(self._reader(shard).parts(number)))
        return found

    def _reader(self, shard: int) -> Any:
        return reader_of(self.path(shard), self.path(shard).stat().st_mtime_ns)

    def _group(self, row: SampleRow) -> RowGroup:
        at = (row.shard, row.image // BLOCK)
        if at not in self._kept:
            self._kept[at] = self._reader(row.shard).group(at[1])
            while len(self._kept) > 1 and sum(one.table.nbytes for one in self._kept.values()) > self.most_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        return self._kept[at]

    def _content(self, index: int, row: SampleRow, with_image: bool, doubts: list[str]) -> Content:
        has_label, has_mask = self._kinds
        number = index - self.index.first(row.shard)
        try:
            self._check(index, row, FileState.of(os.stat(self.path(row.shard))), doubts)
            group = self._group(row)
            image = group.image_at(number) if with_image else None
            label = b"%d" % group.label_at(number) if has_label else None
            return Content(image, label, group.mask_at(number) if has_mask else None)
        except (OSError, DamagedTar) as error:
            raise BadSample(self.name(index), str(error)) from error

    def digest(self, index: int, row: SampleRow) -> int:
        """Return the digest of a sample as its file has it; -1 where it cannot be read."""
        number = index - self.index.first(row.shard)
        try:
            group = self._group(row)
            image, mask = group.image_at(number), group.mask_at(number)
        except (OSError, DamagedTar):
            return NONE
        return NONE if image is None else digest_of(image) ^ (0 if mask is None else digest_of(mask, MASK_PERSON))

    def _key(self, index: int) -> str:
        return key_of_row(self.index.find(index)[1])
