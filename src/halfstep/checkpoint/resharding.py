"""Read tensors from the chunks in the files of other ranks, for any number of ranks that wrote them.

The planner of torch.distributed.checkpoint works out which parts of which chunks a rank needs; this module opens the
files that hold these, and no others.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from halfstep.checkpoint.chunks import ChunkedTensor
from halfstep.checkpoint.sealed import check_safetensors_header, name_tensors_file


def load_into_tensors(folder: Path, table: Mapping[str, ChunkedTensor], tensors: Mapping[str, Tensor]) -> int:
    """Fill `tensors`, plain ones or DTensors, with the saved values; return the number of files that were opened.

    Every rank reads what it needs by itself: there is no collective, and ranks may have different tensors. Raises
    ValueError where shapes differ from the saved ones or a file does not hold what the table says.
    """
    reader, planner = ChunkReader(folder, table), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    # Not `torch.distributed.checkpoint.load`, which sends pickles between the ranks, or warns where it must not.
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner)
    return reader.opened


class ChunkReader(StorageReader):
    """A reader of a checkpoint's safetensors files for torch.distributed.checkpoint; nothing is unpickled."""

    def __init__(self, folder: Path, table: Mapping[str, ChunkedTensor]) -> None:
        self._folder, self._table = folder, table
        self.opened = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the folder is fixed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table in the form of torch.distributed.checkpoint."""
        table: dict[str, Any] = {}
        for name, one in self._table.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in one.chunks()]
            table[name] = TensorStorageMetadata(TensorProperties(dtype=one.dtype), torch.Size(one.shape), chunks)
        return Metadata(state_dict_metadata=table)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember which file each chunk is in."""
        self._files = {
            MetadataIndex(name, torch.Size(chunk.offsets)): name_tensors_file(chunk.rank)
            for name, one in self._table.items()
            for chunk in one.chunks()
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of the plan into their tensors, file by file."""
        for file, items in self._group_by_file(plan.items):
            self.opened += 1
            check_safetensors_header(self._folder / file)
            with safe_open(self._folder / file, "pt") as stored:
                for item in items:
                    _copy_slice(stored, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _group_by_file(self, items: list[ReadItem]) -> Iterator[tuple[str, list[ReadItem]]]:
        found: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            found[self._files[item.storage_index]].append(item)
        # In the order of the ranks: with many ranks, all of them start at another file.
        yield from sorted(found.items())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoints are opened by their folder, not by an id."""
        return False


def _copy_slice(stored: Any, item: ReadItem, planner: LoadPlanner) -> None:
    part = stored.get_slice(item.storage_index.fqn)
    box = tuple(slice(begin, begin + length) for begin, length in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    # A slice, not the tensor: only these bytes are read.
    target.copy_(part[box] if box else stored.get_tensor(item.storage_index.fqn))
    planner.commit_tensor(item, target)
