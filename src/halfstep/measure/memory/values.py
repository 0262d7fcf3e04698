"""Track the numbers that branches and sizes depend on, on tensors without values; state the assumptions on the rest.

Fake tensors have shapes and no numbers. Numbers that do not depend on the model (labels, masks, lengths, positions) are
computed next to them. For those that do, an assumption is made and recorded with its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import WrongUse
from halfstep.measure.assumption import Assumption
from halfstep.observe.recorder import predict_written_tensors
from halfstep.user_code import MEASURING, find_running_line_outside, format_line_with_text

NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_ATEN = torch.ops.aten
_MOST_INTEGERS, _MOST_FLOATS = 1 << 22, 1 << 16
"""The elements up to which integers and floats are followed; images and activations are not."""
_MANY_READS, _TOO_MANY_READS = 100, 10_000
"""How often a line may read an assumed number: from the first on it reads 0, which ends most loops."""
_MANY_LEVELS = 16
_NUMBERS = "_halfstep_numbers"
"""The attribute of a fake tensor that holds its numbers."""
_COMPUTES_NOTHING = ("prim", "profiler")

FINITE = "every number is finite"
EVEN = "the model's choices (argmax, topk, sort, clamp) are spread evenly"
SELECTED = "a mask that depends on the model selects every element"
DIFFERENT = "numbers that depend on the model are all different"
KEPT = "no box is suppressed"
ONCE = "each element is repeated once"


@dataclass(frozen=True)
class TrackedNumbers:
    """The numbers of a fake tensor, or of a tuple of them, and the assumptions behind them."""

    value: Any
    assumed: frozenset[str] = frozenset()


class OpCall(NamedTuple):
    """One call of an operation."""

    func: OpOverload
    args: Any
    kwargs: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """Return an argument by its name, or its default; -1 where the operation has none of this name."""
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                given = place < len(self.args)
                return self.args[place] if given else self.kwargs.get(name, argument.default_value)
        return -1


class ValueTracker(TorchDispatchMode):
    """A mode for code on fake tensors that reads numbers. Enter it inside the mode of the fake tensors.

    A condition that depends on the model is assumed to be true, except at the lines in `not_true`.
    """

    def __init__(self, not_true: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.last_condition: str | None = None
        """The line of the last condition that was assumed to be true."""
        self._not_true = not_true
        self._assumed: dict[Assumption, None] = {}
        self._reads: Counter[str] = Counter()
        self._stale: dict[int, Tensor] = {}
        """Numbers that are no longer right, by storage; kept, so that no other tensor gets the same address."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return tuple(self._assumed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace in _COMPUTES_NOTHING:
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return self._read(args[0])
        if func is _ATEN.equal.default:
            return self._compare(*args)
        if func._schema.name in _DESCRIPTIONS:
            return _DESCRIPTIONS[func._schema.name](self, *args)
        if func is _ATEN.index.Tensor:
            args = (args[0], [by_number for index in args[1] for by_number in self._indices_of_mask(index)])
        call = OpCall(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except NEEDS_NUMBERS:
            return self._size_result(call)
        numbers = self._computed(call, result) or self._told(call, result)
        if numbers is not None:
            _attach_numbers(result, numbers)
        elif func._schema.is_mutable:
            self._forget(predict_written_tensors(func, args, kwargs))
        return result

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, tensor: Tensor) -> bool | int | float | complex:
        numbers = self._numbers(tensor)
        if numbers is not None:
            self._state(numbers.assumed)
            with no_dispatch():
                found: bool | int | float | complex = numbers.value.item()
            return found
        line = _find_running_line()
        self._reads[line] += 1
        if self._reads[line] > _TOO_MANY_READS:
            raise WrongUse(
                f"{line} reads the model's numbers more than {_TOO_MANY_READS} times",
                allowed="loops that end after a number of rounds",
                do="limit the rounds: for _ in range(100)",
            )
        true = line not in self._not_true and self._reads[line] <= _MANY_READS
        if tensor.dtype is torch.bool:
            self._assume_condition(line, true)
            return true
        self._assume(line, f"the number is {int(true)}")
        return float(true) if tensor.is_floating_point() else int(true)

    def _compare(self, first: Tensor, second: Tensor) -> bool:
        numbers = self._numbers(first), self._numbers(second)
        if numbers[0] is not None and numbers[1] is not None:
            self._state(numbers[0].assumed | numbers[1].assumed)
            with no_dispatch():
                return torch.equal(numbers[0].value, numbers[1].value)
        line = _find_running_line()
        self._assume_condition(line, line not in self._not_true)
        return line not in self._not_true

    def _assume_condition(self, line: str, true: bool) -> None:
        self.last_condition = line if true else self.last_condition
        self._assume(line, f"the condition is {'true' if true else 'false'}")

    def _state(self, assumed: frozenset[str]) -> None:
        for what in sorted(assumed):
            self._assume(_find_running_line(), what)

    def _assume(self, line: str, what: str) -> None:
        self._assumed.setdefault(Assumption(line, what))

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _indices_of_mask(self, index: Tensor | None) -> list[Tensor | None]:
        """Return the indices that select what a boolean one does."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        return list(self._size_result(OpCall(_ATEN.nonzero.default, (index,), {})).unbind(1))

    def _size_result(self, call: OpCall) -> Any:
        """Return the result of an operation whose size depends on numbers."""
        numbers = self._computed(call, None)
        if numbers is None:
            assumed = _SIZES.get(call.func._schema.name)
            if assumed is None:
                raise DynamicOutputShapeException(call.func)
            with no_dispatch():
                numbers = TrackedNumbers(assumed[1](call), frozenset({assumed[0]}))
        self._state(numbers.assumed)
        device = _list_tensor_leaves((call.args, call.kwargs))[0].device
        result = pytree.tree_map_only(
            Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype, device=device), numbers.value
        )
        _attach_numbers(result, numbers)
        return result

    # -- following ----------------------------------------------------------------------------------------------------

    def _numbers(self, tensor: Tensor) -> TrackedNumbers | None:
        if not isinstance(tensor, FakeTensor):  # a real table in the loss
            with no_dispatch():
                return TrackedNumbers(tensor.detach()) if tensor.device.type == "cpu" else None
        found: TrackedNumbers | None = getattr(tensor, _NUMBERS, None)
        return None if found is None or found.value.untyped_storage()._cdata in self._stale else found

    def _computed(self, call: OpCall, result: Any) -> TrackedNumbers | None:
        """Return the numbers of a result if those of all arguments are known."""
        func, args, kwargs = call
        leaves = _list_tensor_leaves((args, kwargs))
        if "empty" in func._schema.name or any(leaf.requires_grad for leaf in leaves):
            return None
        known = {id(leaf): numbers for leaf in leaves if (numbers := self._numbers(leaf)) is not None}
        if len(known) < len({id(leaf) for leaf in leaves}):
            return None
        # These make one number of one number: element by element, any, all.
        keeps = torch.Tag.pointwise in func.tags or func._schema.name in ("aten::any", "aten::all")
        same = isinstance(result, Tensor) and bool(leaves) and keeps and not func._schema.is_mutable
        # All elements of each value must be one number in memory.
        values = [numbers.value for numbers in known.values()]
        same = same and all(v.numel() == 1 or (v.numel() > 1 and not any(v.stride())) for v in values)
        if not same and not all(map(_has_few_elements, (*leaves, *_list_tensor_leaves(result)))):
            return None

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, Tensor):
                return leaf
            value = known[id(leaf)].value
            # The user's tensors are not written into.
            value = value if isinstance(leaf, FakeTensor) else value.clone()
            return value.flatten()[0] if same else value

        try:
            with no_dispatch(), torch.no_grad():
                options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
                args, options = pytree.tree_map(real, (args, options))
                value = func(*args, **options)
                value = value.expand(result.shape) if same else value
        except Exception:  # assumed numbers may be out of range
            return None
        return TrackedNumbers(value, frozenset[str]().union(*(numbers.assumed for numbers in known.values())))

    def _told(self, call: OpCall, result: Any) -> TrackedNumbers | None:
        """Return the numbers of a result that does not depend on those of its arguments, by an assumption."""
        func, args, _ = call
        if (
            func._schema.name in _FILLS
            and _has_few_elements(args[0])
            and not (args[0].requires_grad or args[0]._is_view())
        ):
            with no_dispatch():
                return TrackedNumbers(func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:]))
        if (
            func is _ATEN.clamp.default
            and _is_level_clamp(args)
            and _has_few_elements(result)
            and not args[0].requires_grad
        ):
            with no_dispatch():
                low, high = int(args[1]), int(args[2])
                value = (low + torch.arange(result.numel()) % (high - low + 1)).reshape(result.shape).to(result.dtype)
                return TrackedNumbers(value, frozenset({EVEN}))
        finite = _answer_if_finite(func, args)
        if finite is not None:
            with no_dispatch():
                return TrackedNumbers(torch.full((), finite).expand(result.shape), frozenset({FINITE}))
        if func._schema.name not in _CHOICES:
            return None
        chosen = result[-1] if isinstance(result, (tuple, list)) else result
        if not _has_few_elements(chosen):
            return None
        dim = call.argument("dim")
        choices = args[0].numel() if dim is None else args[0].shape[dim] if args[0].dim() else 1
        with no_dispatch():
            value, shape = torch.arange(chosen.numel()) % max(choices, 1), list(chosen.shape)
            if dim is None or len(shape) < max(args[0].dim(), 1):
                value = value.reshape(shape)
            else:
                along = shape.pop(dim)
                value = value.reshape([*shape, along]).movedim(-1, dim)
        _attach_numbers(chosen, TrackedNumbers(value, frozenset({EVEN})))
        return None

    def number(self, tensor: Tensor) -> float | None:
        """Return the one number of a tensor, if it is known and nothing was assumed for it."""
        numbers = self._numbers(tensor)
        if numbers is None or numbers.assumed:
            return None
        with no_dispatch():
            return float(numbers.value.item())

    def longest(self, lengths: Tensor | list[int]) -> int | None:
        """Return the largest of some lengths, if they are known."""
        numbers = self._numbers(lengths) if isinstance(lengths, Tensor) else TrackedNumbers(torch.tensor(lengths))
        if numbers is None:
            return None
        with no_dispatch():
            return int(numbers.value.max())

    def _forget(self, written: list[Tensor]) -> None:
        for tensor in written:
            numbers: TrackedNumbers | None = getattr(tensor, _NUMBERS, None)
            if numbers is not None:
                self._stale[numbers.value.untyped_storage()._cdata] = numbers.value


def attach_real_numbers(fake: Tensor, real: Tensor) -> Tensor:
    """Return the fake tensor with a copy of the numbers of a real one, if there are few enough to follow them."""
    if (
        not isinstance(real, FakeTensor)
        and real.device.type == "cpu"
        and _has_few_elements(real)
        and not real.requires_grad
    ):
        with no_dispatch():
            _attach_numbers(fake, TrackedNumbers(real.detach().clone()))
    return fake


def attach_same_numbers(fake: Tensor, other: Tensor) -> Tensor:
    """Return the fake tensor with the numbers of another one."""
    numbers: TrackedNumbers | None = getattr(other, _NUMBERS, None)
    if numbers is not None:
        with no_dispatch():
            _attach_numbers(fake, TrackedNumbers(numbers.value.clone(), numbers.assumed))
    return fake


def _attach_numbers(result: Any, numbers: TrackedNumbers) -> None:
    for fake, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(numbers.value), strict=False):
        if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
            setattr(fake, _NUMBERS, TrackedNumbers(value, numbers.assumed))


def _list_tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _has_few_elements(tensor: Tensor) -> bool:
    wide = tensor.is_floating_point() or tensor.is_complex()
    return tensor.layout is torch.strided and tensor.numel() <= (_MOST_FLOATS if wide else _MOST_INTEGERS)


def _is_level_clamp(args: Any) -> bool:
    """Return whether a clamp limits numbers to a few whole ones, as for the levels of a feature pyramid."""
    whole = len(args) == 3 and all(limit is not None and limit == int(limit) for limit in args[1:])
    return whole and 0 < args[2] - args[1] < _MANY_LEVELS


def _answer_if_finite(func: OpOverload, args: Any) -> bool | None:
    """Return what a comparison says of finite numbers, if it asks whether numbers are finite."""
    name = func._schema.name
    if name in ("aten::isnan", "aten::isinf"):
        return False
    if name not in ("aten::eq", "aten::ne"):
        return None
    if args[0] is args[1]:  # isnan: x != x
        return name == "aten::eq"
    infinite = isinstance(args[1], float) and abs(args[1]) == inf and args[0].is_floating_point()
    return name == "aten::ne" if infinite else None


def _find_running_line() -> str:
    line = find_running_line_outside(*MEASURING)
    return format_line_with_text(line) if line else "code outside any file"


_FILLS = frozenset(f"aten::{name}_" for name in ("uniform", "normal", "random", "exponential", "fill", "zero"))
"""Operations that replace all numbers of a tensor."""
_CHOICES = frozenset(f"aten::{name}" for name in ("topk", "max", "min", "argmax", "argmin", "sort", "argsort"))
Sized = Callable[[OpCall], Any]


def _select_all_places(call: OpCall) -> Tensor:
    mask = torch.ones((), dtype=torch.bool).expand(tuple(call.args[0].shape))
    # Of a large one only the size is of interest.
    few = mask.numel() <= _MOST_INTEGERS
    return mask.nonzero() if few else torch.zeros((), dtype=torch.int64).expand(mask.numel(), mask.dim())


def _select_all_elements(call: OpCall) -> Tensor:
    shape = torch.broadcast_shapes(call.args[0].shape, call.args[1].shape)
    return torch.zeros((), dtype=call.args[0].dtype).expand(shape.numel())


def _assume_all_different(call: OpCall) -> Any:
    first, *others = call.args
    return call.func(torch.arange(first.numel()).reshape(tuple(first.shape)).to(first.dtype), *others, **call.kwargs)


def _repeat_once(call: OpCall) -> Tensor:
    return torch.arange(call.args[0].shape[0])


def _spread_counts_evenly(call: OpCall) -> Tensor:
    least = max(call.argument("minlength"), 1)
    return torch.full((least,), max(1, call.args[0].numel() // least), dtype=torch.int64)


_SIZES: dict[str, tuple[str, Sized]] = {
    "aten::nonzero": (SELECTED, _select_all_places),
    "aten::masked_select": (SELECTED, _select_all_elements),
    "aten::_unique": (DIFFERENT, _assume_all_different),
    "aten::_unique2": (DIFFERENT, _assume_all_different),
    "aten::unique_dim": (DIFFERENT, _assume_all_different),
    "aten::unique_consecutive": (DIFFERENT, _assume_all_different),
    "aten::repeat_interleave": (ONCE, _repeat_once),
    "aten::bincount": (EVEN, _spread_counts_evenly),
    "torchvision::nms": (KEPT, _repeat_once),
}
"""Assumptions about operations whose size depends on numbers of the model, and their results."""


# -- descriptions -----------------------------------------------------------------------------------------------------
# Results of kernels that torch cannot describe, or only for one format.


def _create_grouped_product(_tracker: ValueTracker, first: Tensor, second: Tensor, *rest: Any) -> Tensor:
    narrow = [torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device=t.device) for t in (first, second)]
    offsets = rest[0] if rest else None
    return torch.empty(_ATEN._grouped_mm(*narrow, offsets).shape, dtype=first.dtype, device=first.device)


def _create_ctc_loss(
    tracker: ValueTracker, scores: Tensor, targets: Tensor, _inputs: Any, lengths: Any, *_: Any
) -> Any:
    samples = scores.shape[1] if scores.dim() == 3 else 1
    longest = tracker.longest(lengths)
    if longest is None:
        longest = targets.shape[-1] if targets.dim() == 2 else targets.numel() // max(samples, 1)
    return scores.new_empty(samples), scores.new_empty((samples, scores.shape[0], 2 * longest + 1))


def _create_ctc_gradient(_tracker: ValueTracker, _gradient: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


def _skip_in_place_update(*_: Any) -> None:
    """Describe an update in place."""


_DESCRIPTIONS: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _create_grouped_product,
    "aten::_ctc_loss": _create_ctc_loss,
    "aten::_ctc_loss_backward": _create_ctc_gradient,
    "aten::_fused_sgd_": _skip_in_place_update,
    "aten::_fused_adagrad_": _skip_in_place_update,
}
