"""Run backward without torch's engine, for fake tensors on an absent device.

The engine queries the device's driver for streams before it runs anything. The nodes of a graph do not: they can be
called one by one, in the engine's order, and they free their saved tensors as under the engine.
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
    """A backward in progress."""

    waiting: dict[Any, Gradients] = field(default_factory=dict)
    running: Any = None
    """The node being called; reported in place of `torch._C._current_autograd_node`."""
    number: int = 0
    """The id of this backward."""
    expected: Counter[int] = field(default_factory=Counter)
    """Gradients still to come for each leaf; they are summed before they are accumulated."""

    def run(self, loss: Tensor) -> None:
        """Compute the gradients of all leaves. The loss drops its graph, which is freed as it is walked."""
        first = torch.ones_like(loss)  # alive throughout, as under the engine
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
        # A node takes one argument for each of its outputs, including those that nothing was computed from.
        gradients += [None] * (len(node._input_metadata) - len(gradients))
        call = node.apply if isinstance(node, torch.autograd.function.BackwardCFunction) else node
        found = call(*gradients)
        # Dropped before the next nodes run, so that freed gradients leave the timeline as under the engine.
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
        """Return the priority: last created first, but a complete leaf gradient is accumulated at once."""
        if hasattr(node, "variable"):
            return -1 if self.expected[id(node.variable)] > 0 else 2**63
        return int(node._sequence_nr())

    def _is_shared(self, tensor: Tensor | None, times: int = 1) -> bool:
        """Return whether another pending gradient shares this memory; it must then not be stored or changed."""
        if tensor is None:
            return False
        key = tensor.untyped_storage()._cdata
        same = (t for slots in self.waiting.values() for t in slots if t is not None)
        return sum(bool(other.untyped_storage()._cdata == key) for other in same) >= times


def _fitted(gradient: Tensor, wanted: Any) -> Tensor:
    """Return the gradient as the engine passes it on: reduced to the tensor's shape, in its dtype."""
    if gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient if gradient.dtype == wanted.dtype else gradient.to(wanted.dtype)


def _edges_to_leaves(root: Any) -> Counter[int]:
    """Count the edges to each leaf, by id: a reference to a node would keep its saved tensors alive."""
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
    # Copied unless it can be stolen, as in AccumulateGrad: its memory is its own and its layout the leaf's.
    elif shared or gradient.stride() != leaf.stride() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)
    else:
        leaf.grad = gradient.detach()


def _as_tuple(found: Any) -> tuple[Tensor | None, ...]:
    return found if isinstance(found, tuple) else (found,)


@contextmanager
def walked() -> Iterator[None]:
    """Replace `loss.backward()` by the walk, and report the node that is running."""
    walk = Walk()
    torch_backward, torch_node, torch_task = Tensor.backward, torch._C._current_autograd_node, _task()
    Tensor.backward = lambda loss: walk.run(loss)  # type: ignore[method-assign, assignment, misc]
    torch._C._current_autograd_node = lambda: walk.running  # type: ignore[assignment]
    # Non-reentrant checkpointing stores recomputed activations by the id of the backward that needs them.
    torch._C._current_graph_task_id = lambda: -1 if walk.running is None else walk.number  # type: ignore[attr-defined]
    try:
        yield
    finally:
        Tensor.backward = torch_backward  # type: ignore[method-assign]
        torch._C._current_autograd_node = torch_node
        torch._C._current_graph_task_id = torch_task  # type: ignore[attr-defined]


def _task() -> Any:
    return torch._C._current_graph_task_id  # type: ignore[attr-defined]
