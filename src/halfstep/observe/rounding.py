"""Another format, emulated on any device: operations compute in fp32, and what they take or give is rounded to it.

Tensors keep a narrow dtype between operations, so that autocast and type promotion decide as they would in earnest;
only the arithmetic is done wide. That is what matrix units do, which add up in fp32 and round once; and it leaves
alone the fp16 kernels of a CPU, which are many times slower than fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep.formats import Format, is_narrow
from halfstep.observe.ranges import Ranges, Rounded
from halfstep.observe.recorder import Operation, as_it_is
from halfstep.precision.precision import widen

Factor = Callable[[Tensor, Format], Tensor]
"""What a tensor is multiplied with before it is rounded, and divided by afterwards."""

_aten = torch.ops.aten
# They change no number, or make memory without numbers: nothing is rounded, and nothing is to be counted again.
_MOVES = {
    _aten.clone, _aten._unsafe_view, _aten.cat, _aten.stack, _aten.empty_like, _aten.new_empty, _aten.zeros_like,
    _aten.new_empty_strided, _aten.new_zeros, _aten.index, _aten.gather, _aten.index_select, _aten.constant_pad_nd,
}  # fmt: skip
# Where matrix products and convolutions have their operands; the others are biases and numbers.
_OPERANDS = {
    _aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2), _aten.mv: (0, 1),
    _aten.convolution: (0, 1), _aten.convolution_backward: (0, 1, 2),
}  # fmt: skip
_LARGEST_FACTOR = 2.0**100


def rounded_to(format: Format, tensor: Tensor) -> Tensor:
    """The nearest numbers of a format, as torch casts to it.

    What is too large becomes inf; in e4m3, which has none, the largest number or NaN, as torch's version has it.
    """
    return tensor.to(format.dtype).to(tensor.dtype)


def as_is(tensor: Tensor, format: Format) -> Tensor:
    """The factor for tensors that are rounded as they are."""
    return tensor.new_ones(())


def over_the_whole_range(tensor: Tensor, format: Format) -> Tensor:
    """The factor that makes the largest value of a tensor the largest of the format, as training in fp8 does."""
    if not tensor.numel():
        return tensor.new_ones(())
    return (format.largest / tensor.abs().amax()).clamp(max=_LARGEST_FACTOR)


class Rounding(ABC):
    """A way to run operations, and a listener: give a Recorder both `rounding` and `rounding.run`."""

    carrier: torch.dtype
    """What autocast is to cast to."""

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.not_emulated: set[str] = set()
        """Operations that have no kernel in fp32, and ran as they are."""
        self._rounded: list[Rounded] = []

    @abstractmethod
    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """The result of an operation in the emulated format."""

    def __call__(self, operation: Operation) -> None:
        for rounded in self._rounded:
            self.ranges.add(operation, rounded)
        self._rounded.clear()


class RoundedOutputs(Rounding):
    """For formats that tensors are kept in, fp16 and bf16: each result is rounded once."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        assert format.dtype is not None
        self.format, self.carrier = format, format.dtype
        self._known: dict[Hashable, list[torch.dtype | None] | None] = {}

    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if function._overloadpacket is _aten._to_copy:
            return self._cast(function, arguments, keywords)
        if not _computes(function, arguments, keywords):
            return as_it_is(function, arguments, keywords)
        written = _written(function, arguments, keywords)
        if written:
            in_place = len(written) == len(function._schema.returns) == 1 and written[0] is arguments[0]
            return (self._run_in_place if in_place else as_it_is)(function, arguments, keywords)
        becomes = self._dtypes(function, arguments, keywords)
        if becomes is None or not any(dtype and is_narrow(dtype) for dtype in becomes):
            return as_it_is(function, arguments, keywords)
        try:
            wide = run_wide(function, arguments, keywords)
        except (RuntimeError, NotImplementedError):
            self.not_emulated.add(str(function._overloadpacket))
            return as_it_is(function, arguments, keywords)
        leaves, form = pytree.tree_flatten(wide)
        pairs = zip(leaves, becomes, strict=True)
        return pytree.tree_unflatten([self._round(leaf, dtype) for leaf, dtype in pairs], form)

    def _cast(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """A cast rounds by itself. Weights are cast by autocast where the module that owns them runs."""
        result, before = function(*arguments, **keywords), arguments[0]
        if result.dtype is self.carrier and before.is_floating_point() and not is_narrow(before.dtype):
            self._rounded.append(Rounded(before, result, self.format, weight=isinstance(before, nn.Parameter)))
        return result

    def _run_in_place(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        wide = run_wide(function, arguments, keywords)
        self._rounded.append(Rounded(wide, arguments[0].copy_(wide), self.format))
        return arguments[0]

    def _round(self, leaf: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(leaf, Tensor) or leaf.dtype is dtype:
            return leaf
        narrow = leaf.to(dtype)
        if dtype is self.carrier:
            self._rounded.append(Rounded(leaf, narrow, self.format))
        return narrow

    def _dtypes(
        self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> list[torch.dtype | None] | None:
        """What each result would be stored in; None where torch cannot tell without numbers."""
        known_by = (function, tuple(map(_kind, pytree.tree_leaves((arguments, dict(keywords))))))
        if known_by not in self._known:
            self._known[known_by] = _of_group_norm(function, arguments) or _asked(function, arguments, keywords)
        return self._known[known_by]


class RoundedOperands(Rounding):
    """For formats that only matrix units take, fp8: operands are rounded, results are kept in bf16."""

    carrier = torch.bfloat16

    def __init__(self, forward: Format, backward: Format, factor: Factor = as_is) -> None:
        super().__init__()
        self._forward, self._backward, self._factor = forward, backward, factor
        # Held weakly, so that no other memory can be taken for one of these.
        self._from_forward: dict[int, StorageWeakRef] = {}

    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        places = _OPERANDS.get(function._overloadpacket, ())
        operands = [arguments[place] for place in places]
        if not operands or not all(is_narrow(operand.dtype) for operand in operands):
            return as_it_is(function, arguments, keywords)
        given = list(arguments)
        for place, operand in zip(places, operands, strict=True):
            given[place] = self._operand(operand)
        wide = run_wide(function, tuple(given), keywords)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(operands[0].dtype), wide)

    @torch.no_grad()
    def _operand(self, operand: Tensor) -> Tensor:
        reference, backward = StorageWeakRef(operand.untyped_storage()), _in_backward()
        if not backward:
            self._from_forward.setdefault(reference.cdata, reference)
        # In backward, what forward computed with meets the gradients; it was counted there.
        gradient = backward and reference.cdata not in self._from_forward
        format = self._backward if gradient else self._forward
        factor = self._factor(widen(operand), format)
        wide = widen(operand) * factor
        after = rounded_to(format, wide)
        if gradient or not backward:
            self._rounded.append(Rounded(wide, after, format))
        return after / factor


def _in_backward() -> bool:
    """Not in a forward that is computed again inside backward, either."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _computes(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Whether an operation makes new numbers from narrow ones, or turns wide ones into narrow ones."""
    packet = function._overloadpacket
    views = any(made.alias_info is not None and not made.alias_info.is_write for made in function._schema.returns)
    if views or packet in _MOVES:
        return False
    leaves = [leaf for leaf in pytree.tree_leaves((arguments, dict(keywords))) if isinstance(leaf, Tensor)]
    if packet is _aten.copy_:
        return is_narrow(arguments[0].dtype) and not is_narrow(arguments[1].dtype)
    asked_for: Any = keywords.get("dtype")
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    return any(is_narrow(leaf.dtype) for leaf in floating) or bool(floating and asked_for and is_narrow(asked_for))


def _written(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The narrow tensors that an operation writes into."""
    taken = function._schema.arguments
    given = {**dict(zip((a.name for a in taken), arguments, strict=False)), **keywords}
    written = [given.get(a.name) for a in taken if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor) and is_narrow(leaf.dtype)]


@torch.no_grad()
def run_wide(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The same operation with narrow numbers widened to fp32."""
    arguments, keywords = pytree.tree_map(_wide, (arguments, dict(keywords)))
    device = next(leaf.device for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor))
    with torch.autocast(device.type, enabled=False):
        return function(*arguments, **keywords)


def _wide(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return widen(leaf)
    return torch.float32 if isinstance(leaf, torch.dtype) and is_narrow(leaf) else leaf


def _kind(leaf: Any) -> Hashable:
    """All of an argument that the dtype of a result may depend on."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim() == 0
    if isinstance(leaf, torch.dtype | bool):
        return leaf
    return type(leaf).__name__


def _of_group_norm(function: OpOverload, arguments: tuple[Any, ...]) -> list[torch.dtype | None] | None:
    """torch's description of it leaves out narrow numbers with wide weights: statistics are as wide as the weights."""
    places = {_aten.native_group_norm: (0, 1), _aten.native_group_norm_backward: (1, 4)}.get(function._overloadpacket)
    if places is None:
        return None
    given, weight = (arguments[place] for place in places)
    aside = (given if weight is None else weight).dtype
    return [given.dtype, aside, aside]


def _asked(
    function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[torch.dtype | None] | None:
    """Run the operation on tensors without numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    try:
        with torch.no_grad(), FakeTensorMode():
            arguments, keywords = pytree.tree_map_only(Tensor, fake, (arguments, dict(keywords)))
            made = function(*arguments, **keywords)
    except Exception:  # whatever torch raises, it could not tell
        return None
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(made)]
