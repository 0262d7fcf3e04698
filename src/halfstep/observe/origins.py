"""Where numbers that are not finite come from: the first operation that made them out of finite ones.

Not every inf is trouble: masks are filled with -inf on purpose and softmax absorbs them, `empty` gives whatever was in
memory, and the branch of a `where` that is not taken may be anything. So what is not finite is followed from operation
to operation, and only what the loss or a gradient was reached by is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep.formats import name_of
from halfstep.observe.code_line import running_line
from halfstep.observe.finite import MINUS_INF, NAN, Kinds, all_finite, kinds_of, largest_finite, local
from halfstep.observe.leaves import leaves
from halfstep.observe.recorder import Operation, as_written
from halfstep.observe.rounding import run_wide

_aten = torch.ops.aten
_UNSET = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
"""Their numbers are whatever was in memory, and nothing is meant by them."""
BATCH = "the batch"
"""How the name of a tensor begins that came with it; the way to it follows, as in the batch[0]['image']."""
CONSTANT = "a constant"
OTHERS = "another process"
_SENT = ("c10d", "_c10d_functional")
"""Where the operations are that bring numbers of other processes."""


@dataclass(frozen=True)
class Given:
    """One of the tensors that an operation computed from."""

    format: str
    shape: tuple[int, ...]
    largest: float
    """The largest absolute value that is finite."""
    has_zero: bool
    has_negative: bool
    kinds: Kinds


@dataclass(frozen=True)
class Made:
    """An operation whose result is not finite, or a tensor that came from outside as such."""

    order: int
    name: str
    """Such as aten.mul."""
    module: str
    backward: bool
    line: str | None
    """The line of the person's code; of a backward operation, the line of the forward one that it belongs to."""
    kinds: Kinds
    format: str
    """Of the result."""
    parents: tuple[Made, ...] = ()
    on_purpose: bool = False
    """Infinities that were asked for, as in a mask."""
    outside: str | None = None
    """What came from outside and was not finite before anything was computed: a weight, a buffer, the batch."""
    meant_by: tuple[Made, ...] = ()
    """Where infinities that were asked for came from."""
    reduces: bool = False
    """Made fewer numbers out of many: where a mask hides all of them, nothing is left."""
    given: tuple[Given, ...] = ()
    operands: tuple[Given, ...] = ()
    """The first two arguments as they were written, tensors or plain numbers: what is divided, and by what."""
    in_fp32: float | None = None
    """The largest absolute value of the result where the same is computed in fp32; None where that fails too."""

    @property
    def is_origin(self) -> bool:
        return not self.parents and not self.on_purpose


class Origins:
    """A listener. After a step, `reaching(tensors)` tells what made them not finite."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.order = 0
        self._bad: dict[int, tuple[StorageWeakRef, Made]] = {}
        self._computed: dict[int, StorageWeakRef] = {}
        self._lines: dict[int, str | None] = {}
        self._outside: dict[int, Made] = {}
        self._names = {_key(leaf): BATCH + path for path, leaf in leaves(batch) if _has_numbers(leaf)}
        self._names |= {
            _key(buffer): f"buffer {as_written(name)}" for name, buffer in model.named_buffers() if _has_numbers(buffer)
        }
        self._names |= {_key(weight): f"weight {as_written(name)}" for name, weight in model.named_parameters()}
        ours = [*(leaf for _, leaf in leaves(batch)), *model.buffers(), *model.parameters()]
        self._bad_before = {_key(tensor) for tensor in ours if _has_numbers(tensor) and not all_finite(tensor)}

    @torch.no_grad()
    def __call__(self, operation: Operation) -> None:
        self.order += 1
        line = running_line()
        if not operation.backward and operation.node is not None:
            self._lines[operation.node] = line
        if _is_view(operation):
            return
        written = _results(operation)
        spoiled = [] if operation.function._overloadpacket in _UNSET else [t for t in written if not all_finite(t)]
        if spoiled:
            made = self._made(operation, spoiled, line)
            for tensor in spoiled:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._bad[reference.cdata] = reference, made
        for tensor in written:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._computed[reference.cdata] = reference

    def reaching(self, tensors: Iterable[Tensor]) -> Made | None:
        """The first of those that spoiled any of these; None where all of them are finite."""
        ends = [made for tensor in tensors if (made := self._of(tensor)) is not None]
        return _first(ends) or _left_nothing(ends)

    def reaching_backward(self) -> Made | None:
        """The same for gradients of a model in shards, which other processes have a part in: nothing leads to them."""
        return _first([made for _, made in self._bad.values() if made.backward])

    def _made(self, operation: Operation, spoiled: list[Tensor], line: str | None) -> Made:
        kinds = frozenset[str]().union(*map(kinds_of, spoiled))
        inputs = _tensors((operation.arguments, dict(operation.keywords)))
        parents = self._parents(operation, inputs)
        guilty = tuple(made for made in parents if not made.on_purpose)
        meant = frozenset[str]().union(*(made.kinds for made in parents if made.on_purpose))
        on_purpose = not guilty and NAN not in kinds and (kinds <= meant or _asks_for_infinity(operation))
        made = Made(
            self.order,
            str(operation.function._overloadpacket),
            operation.module,
            operation.backward,
            line or self._lines.get(-1 if operation.node is None else operation.node),
            kinds,
            name_of(spoiled[0].dtype),
            guilty,
            on_purpose,
            OTHERS if operation.function.namespace in _SENT and not guilty else None,
            tuple(made for made in parents if made.on_purpose) if on_purpose else (),
            max((tensor.numel() for tensor in inputs), default=0) > sum(tensor.numel() for tensor in spoiled),
        )
        if not made.is_origin:
            return made
        wide = _in_fp32(operation)
        return replace(made, given=tuple(map(_given, inputs)), operands=_operands(operation), in_fp32=wide)

    def _parents(self, operation: Operation, inputs: list[Tensor]) -> list[Made]:
        """What is written to holds the result by now: it tells nothing but what was known of it before."""
        written = {_key(tensor) for tensor in _written(operation)}
        known = [t for t in inputs if (key := _key(t)) not in written or key in self._bad or key in self._bad_before]
        return [made for tensor in known if (made := self._of(tensor)) is not None]

    def _of(self, tensor: Tensor) -> Made | None:
        """What made this tensor not finite; None where it is finite, or holds what was never set."""
        if all_finite(tensor):
            return None
        key = _key(tensor)
        if key in self._bad:
            return self._bad[key][1]
        return None if key in self._computed else self._from_outside(tensor, key)

    def _from_outside(self, tensor: Tensor, key: int) -> Made:
        if key not in self._outside:
            kinds, name = kinds_of(tensor), self._names.get(key, CONSTANT)
            # A constant of -inf is a mask. In a weight or in the batch it is not taken for one.
            on_purpose = kinds == {MINUS_INF} and not name.startswith((BATCH, "weight"))
            self._outside[key] = Made(
                self.order, "", "", False, None, kinds, name_of(tensor.dtype), on_purpose=on_purpose, outside=name
            )
        return self._outside[key]


def _first(ends: list[Made]) -> Made | None:
    """Of all that led to these."""
    # A batch may bring a mask of -inf with it, which is to blame only where nothing else is.
    origins = [made for made in _behind(ends, lambda made: made.parents) if made.is_origin]
    return min(origins, key=lambda made: (_may_be_a_mask(made), made.order), default=None)


def _left_nothing(ends: list[Made]) -> Made | None:
    """Where all infinities were asked for: the first operation that had nothing else to make a number of."""
    reducing = [made for made in _behind(ends, lambda made: made.meant_by) if made.reduces]
    return min(reducing or ends, key=lambda made: made.order, default=None)


def _behind(ends: list[Made], led_by: Callable[[Made], tuple[Made, ...]]) -> list[Made]:
    """These, and all that led to them."""
    found: dict[int, Made] = {}
    left = list(ends)
    while left:
        made = left.pop()
        if id(made) not in found:
            found[id(made)] = made
            left += led_by(made)
    return list(found.values())


def _may_be_a_mask(made: Made) -> bool:
    return made.outside is not None and made.outside.startswith(BATCH) and made.kinds == {MINUS_INF}


def _given(tensor: Tensor) -> Given:
    has_zero = bool((tensor == 0).any())
    has_negative = not tensor.is_complex() and bool((tensor < 0).any())
    shape = tuple(tensor.shape)
    return Given(name_of(tensor.dtype), shape, largest_finite(tensor), has_zero, has_negative, kinds_of(tensor))


def _operands(operation: Operation) -> tuple[Given, ...]:
    found = []
    for argument in operation.arguments[:2]:
        if isinstance(argument, (int, float)):
            argument = torch.tensor(float(argument))
        if not isinstance(argument, Tensor) or argument.layout is not torch.strided or argument.is_meta:
            break
        found.append(_given(local(argument)))
    return tuple(found)


def _in_fp32(operation: Operation) -> float | None:
    if operation.function.namespace != "aten":
        return None  # it may do more than compute: a second call of what sends numbers would wait without end
    if _written(operation):
        return None  # its input is gone already
    try:
        wide = _tensors(run_wide(operation.function, operation.arguments, operation.keywords))
    except (RuntimeError, NotImplementedError):
        return None
    return max(map(largest_finite, wide)) if wide and all(map(all_finite, wide)) else None


def _key(tensor: Tensor) -> int:
    key: int = local(tensor).untyped_storage()._cdata
    return key


def _tensors(tree: Any) -> list[Tensor]:
    found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and _has_numbers(leaf)]
    return list(map(local, found))


def _has_numbers(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided and not tensor.is_meta


def _results(operation: Operation) -> list[Tensor]:
    """What was returned, and what was written into where nothing is, as by operations on lists of tensors."""
    if operation.result is not None:
        return _tensors(operation.result)
    return _written(operation)


def _written(operation: Operation) -> list[Tensor]:
    taken = operation.function._schema.arguments
    if not any(a.alias_info is not None and a.alias_info.is_write for a in taken):
        return []
    given = {**dict(zip((a.name for a in taken), operation.arguments, strict=False)), **operation.keywords}
    return _tensors([given.get(a.name) for a in taken if a.alias_info is not None and a.alias_info.is_write])


def _is_view(operation: Operation) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operation.function._schema.returns)


def _asks_for_infinity(operation: Operation) -> bool:
    leaves = pytree.tree_leaves((operation.arguments, dict(operation.keywords)))
    return any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
