"""Whether numbers are finite, and what they are where they are not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep import world

Kinds = frozenset[str]
NAN, INF, MINUS_INF = "nan", "inf", "-inf"


def all_finite(tensor: Tensor) -> bool:
    """Reads the device: for looking closely, not for every step."""
    return bool(torch.isfinite(_real(tensor)).all())


def kinds_of(tensor: Tensor) -> Kinds:
    """Which of nan, inf and -inf are in it."""
    real = _real(tensor)
    found = {NAN: real.isnan(), INF: real == torch.inf, MINUS_INF: real == -torch.inf}
    return frozenset(kind for kind, where in found.items() if bool(where.any()))


def largest_finite(tensor: Tensor) -> float:
    """The largest absolute value that is finite; 0 where there is none."""
    real = _real(tensor)
    if not real.numel():
        return 0.0
    return float(torch.where(real.isfinite(), real.abs(), 0).max().item())


def norm_of(tensor: Tensor) -> float:
    """The 2-norm, as a number of the host's: it fits where fp32 would not hold the squares."""
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce().values()  # an element may be there several times
    largest = largest_finite(tensor)
    if not largest or not all_finite(tensor):
        return 0.0 if all_finite(tensor) else math.nan
    real = _real(tensor)
    wide = real if real.dtype is torch.float64 else real.float()
    return float(torch.linalg.vector_norm(wide / largest).item()) * largest


def local(tensor: Tensor) -> Tensor:
    """What this process has of it: looking at all of a tensor in shards would need every process to look."""
    if tensor.is_sparse:
        return tensor.detach()._values()
    if not world.is_shard(tensor):
        return tensor.detach()
    shards: Any = tensor.detach()
    mine: Tensor = shards.to_local()
    return mine


def _real(tensor: Tensor) -> Tensor:
    found = local(tensor)
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    # There are few kernels for one byte, and all of fp8 fits into two.
    return (
        found.to(torch.float16 if found.dtype is torch.float8_e5m2 else torch.float32) if found.itemsize == 1 else found
    )
