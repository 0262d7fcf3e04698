"""What each module did in a step: its work and its results by format, and what it kept for backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep.formats import FP32, name_of
from halfstep.observe.flops import computed_in, flops
from halfstep.observe.recorder import Operation


@dataclass
class Work:
    """Of one module, without those inside it."""

    flops: Counter[str] = field(default_factory=Counter)
    """Of matrix products, convolutions and attention, forward and backward, by the format they multiplied in."""
    results: Counter[str] = field(default_factory=Counter)
    """Numbers that its forward made, by format."""
    saved: Counter[str] = field(default_factory=Counter)
    """Bytes that its forward kept for backward, by format; weights are there anyway and do not count."""

    @property
    def computed(self) -> dict[str, float]:
        """Shares by format, most first: of the work, or of the results where there is no such work."""
        counted = self.flops or self.results
        total = sum(counted.values())
        return {name: count / total for name, count in counted.most_common()} if total else {}


class Works:
    """A listener, and a hook for what autograd keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.by_module: dict[str, Work] = defaultdict(Work)
        self._weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self._kept: dict[int, StorageWeakRef] = {}

    def __call__(self, operation: Operation) -> None:
        done = flops(operation)
        work = self.by_module[operation.module]
        found = computed_in(operation) if done else ""
        # What torch itself widens, for want of a kernel, is not counted as anybody's fp32.
        if done and not (operation.widened and found == FP32.name):
            work.flops[found] += done
        if not operation.backward and not _casts(operation):
            for leaf in pytree.tree_leaves(operation.result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    work.results[name_of(leaf.dtype)] += leaf.numel()

    @contextmanager
    def keeping(self, running: Callable[[], str]) -> Iterator[None]:
        """Round forward and backward: what is kept counts for the module that `running` names."""

        def pack(tensor: Tensor) -> Any:
            if tensor.layout is torch.strided and self._is_new(tensor):
                self.by_module[running()].saved[name_of(tensor.dtype)] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def _is_new(self, tensor: Tensor) -> bool:
        """Neither a weight, which may come as a view of it, nor kept already."""
        reference = StorageWeakRef(tensor.untyped_storage())
        known = self._kept.get(reference.cdata)
        if reference.cdata in self._weights or (known is not None and not known.expired()):
            return False
        self._kept[reference.cdata] = reference
        return True


def _casts(operation: Operation) -> bool:
    """A cast is not what a module computes in, and a view computes nothing."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in operation.function._schema.returns)
    return views or operation.function._overloadpacket is torch.ops.aten._to_copy
