"""Every piece of memory that a run takes: when it came, when it went, and what it was for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.formats import format_of, is_narrow
from halfstep.measure.memory.covered import is_covered, name_of
from halfstep.measure.memory.kernels import hidden_bytes, sums_in_place
from halfstep.observe.recorder import OUTSIDE, Operation

FORWARD, BACKWARD, UPDATE = "the forward", "the backward", "the update"
NEVER = 2**62
_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class Block:
    """The memory behind one tensor and its views."""

    bytes: int
    born: int
    """The number of the operation that made it; 0 for what was there before."""
    part: str = "temporary"
    format: str = ""
    module: str = OUTSIDE
    died: int = NEVER
    """The number of the last operation during which it was there."""


@dataclass(frozen=True)
class Moment:
    """Where a run was during one operation."""

    phase: str
    module: str

    def __str__(self) -> str:
        return self.phase if self.module == OUTSIDE else f"{self.phase} of {self.module or 'the model itself'}"


class Timeline:
    """A listener that knows all memory that is alive, without keeping any of it alive.

    An operation's results are there together with everything that is freed after it, as in a real run.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.moments: list[Moment] = [Moment("the beginning", OUTSIDE)]
        self.phase = FORWARD
        self.kept: list[Block] = []
        """What the last forward left for its backward: activations."""
        self.not_covered: dict[str, str] = {}
        """Operations whose memory nobody has held against a real run, and the first module that ran each."""
        self._alive: dict[int, Block] = {}
        self._watched: dict[int, Any] = {}
        self._phase_began = 0
        self._recomputing: int | None = None
        """The operation before a forward that is repeated in backward."""

    @property
    def now(self) -> int:
        """The number of the last operation."""
        return len(self.moments) - 1

    def __call__(self, operation: Operation) -> None:
        if operation.function.namespace == "prim":  # asks a fake tensor for its device or layout, and computes nothing
            return
        self._follow_recomputing(operation)
        self.moments.append(Moment(self.phase, operation.module))
        part = "cast copies" if _casts_weights(operation) else "temporary"
        born = self.now + sums_in_place(operation)
        for tensor in _tensors(operation.result):
            self._meet(tensor, part, operation.module, born)
        for tensor in _tensors((operation.arguments, dict(operation.keywords))):
            # Nobody told of it, so it was there before: a table of a loss, or a model beside the one that is trained.
            self._meet(tensor, "weights" if isinstance(tensor, nn.Parameter) else "buffers", operation.module, born=0)
        if not is_covered(operation):
            self.not_covered.setdefault(name_of(operation), operation.module)
        hidden = hidden_bytes(operation)
        if hidden:
            self.blocks.append(Block(hidden, self.now, module=operation.module, died=self.now))

    def hold(self, tensors: Iterable[Tensor], part: str) -> None:
        """These are there now, and this is what they are for."""
        for tensor in tensors:
            self._meet(tensor, part, OUTSIDE).part = part

    def begin(self, phase: str) -> None:
        """A new phase. What forward leaves to be alive is kept for backward."""
        if self.phase == FORWARD:
            self._keep(since=self._phase_began)
            self.kept = [block for block in self._alive.values() if block.part == "activations"]
        self.phase, self._phase_began = phase, self.now

    def _meet(self, tensor: Tensor, part: str, module: str, born: int | None = None) -> Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._alive.get(key)
        if block is None:
            block = Block(storage.nbytes(), self.now if born is None else born, part, _format(tensor.dtype), module)
            self.blocks.append(block)
            self._alive[key] = block
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
        block.bytes = max(block.bytes, storage.nbytes())  # resized
        return block

    def _gone(self, key: int, _reference: object) -> None:
        self._alive.pop(key).died = self.now
        del self._watched[key]

    def _follow_recomputing(self, operation: Operation) -> None:
        if self.phase != BACKWARD:
            return
        if not operation.backward and operation.module != OUTSIDE:
            self._recomputing = self.now if self._recomputing is None else self._recomputing
        elif self._recomputing is not None:
            self._keep(since=self._recomputing)
            self._recomputing = None

    def _keep(self, since: int) -> None:
        for block in self._alive.values():
            if block.part == "temporary" and block.born > since:
                block.part = "activations"


def _casts_weights(operation: Operation) -> bool:
    return (
        operation.function is _CAST
        and isinstance(operation.arguments[0], nn.Parameter)
        and is_narrow(operation.result.dtype)
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those that have memory of their own kind: sparse ones are made of others."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def _format(dtype: torch.dtype) -> str:
    found = format_of(dtype)
    return found.name if found else str(dtype).removeprefix("torch.")
