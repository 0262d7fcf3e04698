"""Gradients as plain local tensors: their norm, which is also the finite check, and their scaling in place.

A NaN or an infinity anywhere makes the norm not finite, so the norm that clipping needs anyway answers both questions
in one pass. A norm beyond fp32's range counts as not finite: nothing could be clipped by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from halfstep import world
from halfstep.formats import as_fp32


class Gradients:
    """The gradients of some parameters, with what is needed to treat them as one vector over all processes."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.sharded = any(map(world.is_shard, self.parameters))
        self._norm: Callable[[list[Tensor]], Tensor] = _norm if _same_kind(self.parameters) else get_total_norm
        self.local: list[Tensor] = []
        """What backward left on this process; parameters that it did not reach have none."""

    def collect(self) -> bool:
        """After the last backward: were there any?"""
        found = [p.grad for p in self.parameters if p.grad is not None]
        if self.sharded or any(g.is_sparse for g in found):
            found = [_plain(p) for p in self.parameters if p.grad is not None]
        self.local = found
        return bool(found)

    def norm(self) -> Tensor:
        """The 2-norm, as torch computes it."""
        return self._norm(self.local)

    def squared_share(self) -> Tensor:
        """This process's share of the squared norm: summed over processes it is the whole, each element once."""
        if not self.sharded:
            return self.norm().double().square() / world.size()
        shares = [
            _norm([local]).double().square() / world.holders(whole)
            for local, whole in zip(self.local, (p.grad for p in self.parameters if p.grad is not None), strict=True)
        ]
        return torch.stack(shares).sum()

    def first_not_finite(self) -> Tensor | None:
        """The parameter of the first gradient here that is not; one read by the host, for steps that are skipped."""
        reached = [p for p in self.parameters if p.grad is not None]
        finite = torch.stack([norm.isfinite().cpu() for norm in torch._foreach_norm(self.local)]).tolist()
        return next((p for p, good in zip(reached, finite, strict=True) if not good), None)

    def multiply_(self, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(self.local, factor)

    def clamp_(self, limit: float) -> None:
        torch._foreach_clamp_min_(self.local, -limit)
        torch._foreach_clamp_max_(self.local, limit)

    def clear(self) -> None:
        self.local = []
        for parameter in self.parameters:
            parameter.grad = None


def clip_factor(norm: float, largest: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies by, computed on the host with the same roundings."""
    return min(1.0, as_fp32(as_fp32(1.0 / as_fp32(norm + _EPSILON)) * as_fp32(largest)))


def _norm(gradients: list[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return total


def _same_kind(tensors: list[Tensor]) -> bool:
    return len({(t.device, t.dtype) for t in tensors}) == 1


def _plain(parameter: Tensor) -> Tensor:
    """The dense local tensor that holds a gradient's numbers, each once."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient.coalesce()
        return parameter.grad._values()
    part: Any = gradient
    local: Tensor = part.to_local() if world.is_shard(gradient) else gradient
    return local


_EPSILON = as_fp32(1e-6)
