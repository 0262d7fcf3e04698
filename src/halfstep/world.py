"""How many processes train together, and how they agree. One process is a world too."""

from __future__ import annotations

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


def agree(numbers: Tensor) -> Tensor:
    """The sum over all ranks, in float64. Anything not finite on one rank stays so for all."""
    if not _together():
        return numbers
    if numbers.numel() > LARGEST_AGREEMENT:
        raise ValueError(f"{numbers.numel()} numbers to agree on; at most {LARGEST_AGREEMENT}")
    total = numbers.to(torch.float64)
    dist.all_reduce(total)
    return total


def from_rank_zero(value: Any) -> Any:
    """Rank 0's value, on every rank. For decisions made once, not for the hot path."""
    if not _together():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
