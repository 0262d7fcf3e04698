"""Measure what it costs to sum gradients over the ranks in bf16: on a few steps the same sum is also made in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from halfstep import distributed

EVERY = 100
"""Attempts from one measured step to the next; such a step sends each gradient three times instead of once."""


class ReductionErrorMeter:
    """The relative error of gradients that FSDP2 sums in bf16, measured on the first step and then on every 100th.

    The gradients of a measured step are summed twice, as they are and as fp32, and the results compared where the step
    takes them. Casting a gradient to bf16 before the sum belongs to both: the error is that of the sum alone.
    """

    def __init__(self, model: nn.Module, attempted: Callable[[], int]) -> None:
        """Measure a model under `fully_shard`; `attempted` returns the steps started so far, the same on all ranks."""
        self._attempted = attempted
        # Float64: over a model of 10**9 gradients, sums of fp32 squares would lose digits themselves.
        self._squares: Tensor | None = None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                unit = _MeasuredReduction(self, next(iter(module.parameters())))
                module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]  # torch's base class is private
                module.set_all_reduce_hook(unit.compare)

    @property
    def is_due(self) -> bool:
        """Whether the current step is measured: the same on all ranks, because each of them has to take part."""
        return self._attempted() % EVERY == 1 % EVERY

    def add(self, narrow: Tensor, wide: Tensor) -> None:
        """Add a sum and what it should have been; nothing is read by the host."""
        error = (narrow.to(wide.dtype) - wide).double().square().sum()
        both = torch.stack([error, wide.double().square().sum()])
        self._squares = both if self._squares is None else self._squares + both

    def read(self) -> float | None:
        """Return the error of the step that was measured last, over all ranks, once; None if there is none.

        Every rank must call this after the same steps.
        """
        if self._squares is None:
            return None
        squares, self._squares = self._squares, None
        error, size = distributed.sum_counts_over_ranks(squares).tolist()
        return float((error / size) ** 0.5) if size > 0.0 else 0.0


class _MeasuredReduction:
    """The sums of one unit, with a second one in fp32 on steps that are measured."""

    def __init__(self, owner: ReductionErrorMeter, parameter: Tensor) -> None:
        self._owner = owner
        self._replicas = distributed.find_replica_group(parameter)
        self._wide: Tensor | None = None
        self._op: Any = dist.ReduceOp.SUM

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if self._owner.is_due:
            # Before the other sum, which may write into its input.
            self._op, self._wide = op, torch.empty_like(output_tensor, dtype=torch.float32)
            dist.reduce_scatter_single(self._wide, input_tensor.float(), op=op, group=group)
        work: dist.Work | None = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        return work

    def compare(self, reduced: Tensor) -> None:
        """Compare what the unit's ranks summed. FSDP2 calls it when all sums of the unit are made."""
        wide, self._wide = self._wide, None
        if wide is None:
            return
        if self._replicas is not None:
            # As FSDP2 does under HSDP: a factor in the first sum is not applied again in the second.
            op = self._op if self._op == dist.ReduceOp.AVG else dist.ReduceOp.SUM
            dist.all_reduce(wide, op, group=self._replicas)
        self._owner.add(reduced, wide)
