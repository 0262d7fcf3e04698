"""How many processes train together, and how they agree. One process is a world too."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_AGREEMENT = 16
"""Numbers in one agreement: 16 doubles are 128 bytes, whatever the model's size."""


def size() -> int:
    return dist.get_world_size() if _together() else 1


def rank() -> int:
    return dist.get_rank() if _together() else 0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def agree(numbers: Tensor) -> Tensor:
    """The sum over all ranks, in float64. Anything not finite on one rank stays so for all."""
    if not _together():
        return numbers
    if numbers.numel() > LARGEST_AGREEMENT:
        raise ValueError(f"{numbers.numel()} numbers to agree on; at most {LARGEST_AGREEMENT}")
    total = numbers.to(torch.float64)
    dist.all_reduce(total)
    return total


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor holds only a part, the rest of which is with other processes."""
    # Nobody can have made one before the module was loaded, and loading it takes most of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def holders(tensor: Tensor) -> float:
    """How many processes hold each element of a tensor."""
    if not is_shard(tensor):
        return size()
    placed: Any = tensor
    mesh, placements = placed.device_mesh, placed.placements
    pieces: list[int] = [mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard()]
    return size() / math.prod(pieces)


def from_rank_zero(text: str) -> str:
    """Rank 0's text, on every rank, as bytes rather than a pickle. For decisions made once, not for the hot path."""
    if not _together():
        return text
    encoded = text.encode() if rank() == 0 else b""
    length = torch.tensor([len(encoded)], device=_talks_on())
    dist.broadcast(length, src=0)
    content = torch.zeros(int(length.item()), dtype=torch.uint8)
    if rank() == 0:
        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    content = content.to(length.device)
    dist.broadcast(content, src=0)
    return bytes(content.tolist()).decode()


def from_all(text: str, group: Any = None) -> list[str]:
    """Every rank's text, on every rank. Costs two collectives: for news, not for the hot path."""
    if not _together():
        return [text]
    encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(_talks_on(group))
    lengths = torch.zeros(size(), dtype=torch.int64, device=encoded.device)
    lengths[rank()] = len(encoded)
    dist.all_reduce(lengths, group=group)
    padded = torch.zeros(size(), int(lengths.max()), dtype=torch.uint8, device=encoded.device)
    padded[rank(), : len(encoded)] = encoded
    dist.all_reduce(padded, group=group)
    return [bytes(row[:length].tolist()).decode().strip() for row, length in zip(padded, lengths.tolist(), strict=True)]


def take_from_rank_zero(tensors: Iterable[Tensor]) -> None:
    """Every rank's tensors become rank 0's, in place."""
    if _together():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


class Party:
    """All processes, on a line of their own: what they say here, in whatever thread, never mixes with the training.

    Made by every process at the same moment.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank(), size()
        self._group = dist.new_group(backend="gloo") if _together() else None

    def share(self, text: str) -> list[str]:
        """Every process's text, to every process."""
        return from_all(text, self._group)


def _talks_on(group: Any = None) -> torch.device:
    """Where a tensor must be to be sent: the main memory, unless the group serves nothing but the GPUs."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
