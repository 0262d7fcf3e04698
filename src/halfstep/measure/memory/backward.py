"""Backward without torch's engine, for tensors that are described as lying on a device that is not here.

torch's engine asks the driver of the device for its streams before it runs anything. The nodes of a graph do not: they
can be called one by one, in the engine's order, and leave what they had saved behind them as the engine does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Gradients = list[Tensor | None]


@dataclass
class Walk:
    """A backward that is under way."""

    waiting: dict[Any, Gradients] = field(default_factory=dict)
    running: Any = None
    """The node that is called just now, as `torch._C._current_autograd_node` tells it."""
    number: int = 0
    """Of this backward."""
    expected: Counter[int] = field(default_factory=Counter)
    """How many gradients are still to come for each leaf, which has them summed first."""

    def run(self, loss: Tensor) -> None:
        """Gradients of a loss for all leaves. The loss lets go of its graph, which dies as it is walked."""
        first = torch.ones_like(loss)  # alive throughout, as it is under the engine
        self.waiting = {loss.grad_fn: [first]}
        self.expected = _edges_to_leaves(loss.grad_fn)
        self.number += 1
        loss.detach_()
        try:
            with torch.no_grad():
                while self.waiting:
                    self.running = max(self.waiting, key=self._order)
                    self._call(self.running)
        finally:
            self.running = None

    def _call(self, node: Any) -> None:
        gradients = self.waiting.pop(node)
        if hasattr(node, "variable"):
            _accumulate(node.variable, gradients[0], self._is_shared(gradients[0]))
            return
        # A node wants a place for each of its outputs, also for those that nothing was computed from.
        gradients += [None] * (len(node._input_metadata) - len(gradients))
        call = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
        found = call(*gradients)
        gradients.clear()
        for (following, number), gradient in zip(node.next_functions, _as_tuple(found), strict=False):
            if hasattr(following, "variable"):
                self.expected[id(following.variable)] -= 1
            if following is not None and gradient is not None:
                self._add(following, number, gradient)

    def _add(self, node: Any, number: int, gradient: Tensor) -> None:
        gradient = _fitted(gradient, node._input_metadata[number])
        slots = self.waiting.setdefault(node, [])
        slots.extend([None] * (number + 1 - len(slots)))
        before = slots[number]
        if before is None:
            slots[number] = gradient
        elif self._is_shared(before, times=2):
            slots[number] = before + gradient
        else:
            before.add_(gradient)

    def _order(self, node: Any) -> int:
        """Nodes made last go first; a leaf's gradient is put in its place as soon as it is complete."""
        if hasattr(node, "variable"):
            return -1 if self.expected[id(node.variable)] > 0 else 2**63
        return int(node._sequence_nr())

    def _is_shared(self, tensor: Tensor | None, times: int = 1) -> bool:
        """Whether another gradient that waits has the same memory, so that it may be neither kept nor changed."""
        if tensor is None:
            return False
        key = tensor.untyped_storage()._cdata
        same = (t for slots in self.waiting.values() for t in slots if t is not None)
        return sum(bool(other.untyped_storage()._cdata == key) for other in same) >= times


def _fitted(gradient: Tensor, wanted: Any) -> Tensor:
    """As the engine hands it on: what was broadcast is summed, and the format is that of the forward's tensor."""
    if gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient if gradient.dtype == wanted.dtype else gradient.to(wanted.dtype)


def _edges_to_leaves(root: Any) -> Counter[int]:
    """By the number of the leaf, not by its node: whoever holds a node keeps alive what it has saved."""
    found: Counter[int] = Counter()
    seen, left = {root}, [root]
    while left:
        for following, _ in left.pop().next_functions:
            if hasattr(following, "variable"):
                found[id(following.variable)] += 1
            elif following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def _accumulate(leaf: Tensor, gradient: Tensor | None, shared: bool) -> None:
    if gradient is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif shared or gradient.stride() != leaf.stride() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)
    else:
        leaf.grad = gradient.detach()


def _as_tuple(found: Any) -> tuple[Tensor | None, ...]:
    return found if isinstance(found, tuple) else (found,)


@contextmanager
def walked() -> Iterator[None]:
    """`loss.backward()` walks the graph in here, and those who ask which node is running are told."""
    walk = Walk()
    torch_backward, torch_node, torch_task = Tensor.backward, torch._C._current_autograd_node, _task()
    Tensor.backward = lambda loss: walk.run(loss)  # type: ignore[method-assign, assignment, misc]
    torch._C._current_autograd_node = lambda: walk.running  # type: ignore[assignment]
    # Activations that are computed again are kept by the number of the backward that asked for them.
    torch._C._current_graph_task_id = lambda: -1 if walk.running is None else walk.number  # type: ignore[attr-defined]
    try:
        yield
    finally:
        Tensor.backward = torch_backward  # type: ignore[method-assign]
        torch._C._current_autograd_node = torch_node
        torch._C._current_graph_task_id = torch_task  # type: ignore[attr-defined]


def _task() -> Any:
    return torch._C._current_graph_task_id  # type: ignore[attr-defined]
