"""Describe how sharded tensors are cut into chunks, and which rank's file holds each chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from halfstep.errors import WrongUse
from halfstep.safetensors_header import DTYPES

LAYOUTS, TENSORS = "layouts", "tensors"
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
"""The dtypes by their names in safetensors files."""


class Chunk(NamedTuple):
    """A block of a tensor, and the rank whose file holds it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the tensor."""
        return build_block_index(self.offsets, self.sizes)


def build_block_index(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a block of a tensor."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor that is cut along one dimension, as DTensor's `Shard` cuts it: equal chunks, and a shorter last one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    rows: int
    """The length of a chunk along `dim`; the last chunk that has any may be shorter."""
    ranks: tuple[int, ...]
    """The ranks whose files hold the chunks, in their order."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks that are not empty."""
        for place, rank in enumerate(self.ranks):
            begin = place * self.rows
            length = min(self.rows, self.shape[self.dim] - begin)
            if length <= 0:
                return
            yield Chunk(rank, self._along(begin, 0), self._along(length, None))

    def is_held_by(self, rank: int) -> bool:
        """Return whether the file of a rank holds a chunk."""
        return any(chunk.rank == rank for chunk in self.chunks())

    def _along(self, here: int, elsewhere: int | None) -> tuple[int, ...]:
        sides = self.shape if elsewhere is None else (elsewhere,) * len(self.shape)
        return (*sides[: self.dim], here, *sides[self.dim + 1 :])


def find_chunk_layout(name: str, tensor: Tensor) -> ChunkedTensor:
    """Return how a DTensor is cut, and by which ranks its chunks are written.

    Each chunk has one writer. Replicas of a chunk, as in HSDP, take turns by the tensor's name, so that they share the
    work. Raises WrongUse for a tensor that is cut along several dimensions.
    """
    dtensor: Any = tensor
    cuts = [(place, p.dim) for place, p in enumerate(dtensor.placements) if not p.is_replicate()]
    if len(cuts) != 1 or not dtensor.placements[cuts[0][0]].is_shard():
        raise WrongUse(
            f"{name} is placed as {dtensor.placements}, which a checkpoint cannot store",
            allowed="tensors sharded along one dimension, as FSDP2 shards them",
            do="save it with torch.distributed.checkpoint",
        )
    along, dim = cuts[0]
    mesh = dtensor.device_mesh.mesh.movedim(along, -1)
    parts = mesh.shape[-1]
    groups = mesh.reshape(-1, parts).tolist()
    ranks = groups[crc32(name.encode()) % len(groups)]
    # The padding of FSDP2 is not saved: a chunk ends where the tensor ends.
    rows = max(1, math.ceil(dtensor.shape[dim] / parts))
    return ChunkedTensor(tuple(dtensor.shape), dtensor.dtype, dim, rows, tuple(ranks))


def convert_chunks_to_json(tensors: Mapping[str, ChunkedTensor]) -> dict[str, object]:
    """Return the table for the manifest; lists of ranks are written once, since most tensors share theirs."""
    layouts = list(dict.fromkeys(one.ranks for one in tensors.values()))
    places = {ranks: place for place, ranks in enumerate(layouts)}
    table = {
        name: [list(one.shape), DTYPES[one.dtype], one.dim, one.rows, places[one.ranks]]
        for name, one in tensors.items()
    }
    return {LAYOUTS: [list(ranks) for ranks in layouts], TENSORS: table}


def parse_chunks(content: Any, world_size: int) -> dict[str, ChunkedTensor]:
    """Return the table of a manifest; raise ValueError for one that `convert_chunks_to_json` did not write."""
    if not isinstance(content, dict) or set(content) != {LAYOUTS, TENSORS}:
        raise ValueError("not a table of chunks")
    layouts = [tuple(_check_counts(ranks, world_size)) for ranks in content[LAYOUTS]]
    return {name: _parse_entry(name, entry, layouts) for name, entry in content[TENSORS].items()}


def _parse_entry(name: str, entry: Any, layouts: list[tuple[int, ...]]) -> ChunkedTensor:
    try:
        shape, dtype, dim, rows, layout = entry
        (dim, layout), (rows,) = _check_counts([dim, layout], 2**31), _check_counts([rows], 2**53)
        found = ChunkedTensor(tuple(_check_counts(shape, 2**53)), BY_NAME[dtype], dim, rows, layouts[layout])
        # Every row must be in a chunk: otherwise a part of the tensor would stay uninitialized.
        if rows < 1 or found.shape[dim] > rows * len(found.ranks):
            raise ValueError(f"{rows} rows a chunk")
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"not chunks of a tensor: {name[:80]}: {error}") from None
    return found


def _check_counts(values: Any, below: int) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < below for value in values):
        raise ValueError(f"{str(values)[:80]} instead of counts")
    return values
