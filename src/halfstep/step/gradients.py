"""Gradients as plain local tensors: their norm, which is also the finite check, and scaling in place.

A NaN or an infinity anywhere makes the norm non-finite, so the norm that clipping needs anyway answers both questions
in one pass. A norm beyond fp32's range counts as non-finite: nothing could be clipped by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from halfstep import distributed
from halfstep.formats import as_fp32


class Gradients:
    """The gradients of some parameters, treated as one vector over all ranks."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.sharded = any(map(distributed.is_shard, self.parameters))
        # get_total_norm groups by device and dtype first; with one of each that only costs time.
        self._norm: Callable[[list[Tensor]], Tensor] = _norm if _same_kind(self.parameters) else get_total_norm
        self.local: list[Tensor] = []
        """The gradients that backward left on this rank; parameters that it did not reach have none."""
        self._summed: list[Tensor] = []
        """The same with repeated indices of sparse gradients summed, for norms."""

    def collect(self) -> bool:
        """Collect the gradients after the last backward; return whether there are any."""
        found = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        self.local = self._summed = found
        sparse = any([gradient.is_sparse for gradient in found])
        if self.sharded or sparse:
            self.local = self._summed = [_plain(p) for p in self.parameters if p.grad is not None]
        if sparse:
            # Autograd may repeat an index in a sparse gradient. Only norms see the sum: optimizers differ in how they
            # coalesce, and get what autograd made.
            both = zip(found, self.local, strict=True)
            self._summed = [g.coalesce()._values() if g.is_sparse else plain for g, plain in both]
        return bool(found)

    def norm(self) -> Tensor:
        """Return the 2-norm, as torch computes it."""
        return self._norm(self._summed)

    def squared_share(self) -> Tensor:
        """Return this rank's share of the squared norm: summed over ranks, each element counts once."""
        if not self.sharded:
            return self.norm().double().square() / distributed.size()
        shares = [
            # Squared in float64: a norm near the end of fp32's range must not overflow on its way into the agreement.
            _norm([local]).double().square() / distributed.holders(whole)
            for local, whole in zip(self._summed, (p.grad for p in self.parameters if p.grad is not None), strict=True)
        ]
        return torch.stack([on(shares[0].device, share) for share in shares]).sum()

    def first_not_finite(self) -> Tensor | None:
        """Return the first parameter with a non-finite gradient here, or None; one host read, for skipped steps."""
        reached = [p for p in self.parameters if p.grad is not None]
        finite = torch.stack([norm.isfinite().cpu() for norm in torch._foreach_norm(self.local)]).tolist()
        return next((p for p, good in zip(reached, finite, strict=True) if not good), None)

    def multiply_(self, factor: float) -> None:
        """Multiply all gradients in place."""
        if factor != 1.0:
            torch._foreach_mul_(self.local, factor)

    def clamp_(self, limit: float) -> None:
        """Clamp all elements to [-limit, limit] in place."""
        if self._summed is not self.local:  # repeated indices are summed first: each part could pass the limit alone
            for p in self.parameters:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
            self.local = [_plain(p) for p in self.parameters if p.grad is not None]
        torch._foreach_clamp_min_(self.local, -limit)
        torch._foreach_clamp_max_(self.local, limit)

    def clear(self) -> None:
        """Drop all gradients."""
        self.local = self._summed = []
        for parameter in self.parameters:
            # None rather than zeros, which an optimizer would apply: momentum and weight decay move such a parameter.
            parameter.grad = None


def clip_factor(norm: float, largest: float) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`, computed on the host with the same roundings."""
    # torch evaluates `max_norm / tensor` as `tensor.reciprocal() * max_norm`: two roundings, not one.
    return min(1.0, as_fp32(as_fp32(1.0 / as_fp32(norm + _EPSILON)) * as_fp32(largest)))


def on(device: torch.device, number: Tensor) -> Tensor:
    """Return a number on `device`; with model parallelism, copied without making the host wait."""
    return number if number.device == device else number.to(device, non_blocking=True)


def _norm(gradients: list[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return total


def _same_kind(tensors: list[Tensor]) -> bool:
    return len({(t.device, t.dtype) for t in tensors}) == 1


def _plain(parameter: Tensor) -> Tensor:
    """Return the dense local tensor with a gradient's values."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        return gradient._values()
    if not distributed.is_shard(gradient):
        return gradient
    part, whole = cast(Any, gradient), cast(Any, parameter)
    if any(placement.is_partial() for placement in part.placements):
        parameter.grad = part = part.redistribute(placements=whole.placements)  # a sum that is still pending
    local: Tensor = part.to_local()
    return local


_EPSILON = as_fp32(1e-6)
