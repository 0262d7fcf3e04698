"""Emulate another format on any device: operations compute in fp32, and their inputs or results are rounded.

Tensors keep a narrow dtype between operations, so that autocast and type promotion decide as in a real run; only the
arithmetic is done in fp32. That is what matrix units do, which accumulate in fp32 and round once; and it avoids the
fp16 kernels of a CPU, which are many times slower than fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from halfstep.formats import FP8_E4M3, Format, is_narrow
from halfstep.observe.recorder import Operation, run_unchanged
from halfstep.precision.precision import widen

WEIGHTS, FORWARD, BACKWARD = "weights", "forward", "backward"


class RoundedTensor(NamedTuple):
    """A tensor before and after it was rounded."""

    wide: Tensor
    after: Tensor
    format: Format
    weight: bool = False


@dataclass(frozen=True)
class OverflowEvent:
    """An operation whose result did not fit."""

    module: str
    operation: str
    """Such as aten.mul; `weight` if a weight itself does not fit."""
    value: float
    """The largest absolute value that did not fit, before it was rounded."""
    largest: float
    """The largest value that would have fit."""


@dataclass
class ValueRange:
    """The values of one module, accumulated."""

    nonzero: int = 0
    largest: float = 0.0
    """The largest finite absolute value before rounding."""
    overflows: int = 0
    """Values that were finite before, and non-finite or saturated after."""
    underflows: int = 0
    """Values that were not zero before, and are zero after."""
    subnormals: int = 0
    """Values that are not zero, but below the smallest normal number, where precision is lost."""
    headroom: float = math.inf
    """Factors of two between the largest value and the end of the format."""

    @property
    def underflow_share(self) -> float:
        """The share of nonzero values that underflowed."""
        return self.underflows / self.nonzero if self.nonzero else 0.0

    @property
    def subnormal_share(self) -> float:
        """The share of nonzero values that became subnormal."""
        return self.subnormals / self.nonzero if self.nonzero else 0.0

    def add(self, other: ValueRange) -> None:
        """Add the counts of another range."""
        self.nonzero += other.nonzero
        self.overflows += other.overflows
        self.underflows += other.underflows
        self.subnormals += other.subnormals
        self.largest = max(self.largest, other.largest)
        self.headroom = min(self.headroom, other.headroom)


class ModuleRanges:
    """Ranges by module and by part: weights, forward, backward."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, str], ValueRange] = {}
        self.first_overflow: dict[str, OverflowEvent] = {}
        """By part, in the order in which they happened."""
        self.first_spoiled: OverflowEvent | None = None
        """The first result that was non-finite even before it was rounded, such as 1/x where x had underflowed."""

    def add(self, operation: Operation, rounded: RoundedTensor) -> None:
        """Count one rounded tensor of an operation."""
        part = WEIGHTS if rounded.weight else BACKWARD if operation.backward else FORWARD
        if not rounded.wide.numel():
            return
        found, did_not_fit, was_finite = _measure_range(rounded)
        self.by_place.setdefault((operation.module, part), ValueRange()).add(found)
        name = "weight" if rounded.weight else str(operation.function._overloadpacket)
        event = OverflowEvent(operation.module, name, did_not_fit, rounded.format.largest)
        if found.overflows:
            self.first_overflow.setdefault(part, event)
        if not was_finite and self.first_spoiled is None:
            self.first_spoiled = event

    @property
    def first_on_the_way_forward(self) -> OverflowEvent | None:
        """The first overflow outside of backward."""
        return next((event for part, event in self.first_overflow.items() if part != BACKWARD), None)

    def total(self, part: str) -> ValueRange:
        """Return the range of one part over all modules."""
        total = ValueRange()
        for (_, of), found in self.by_place.items():
            if of == part:
                total.add(found)
        return total


@torch.no_grad()
def _measure_range(rounded: RoundedTensor) -> tuple[ValueRange, float, bool]:
    """Return the range, the largest value that did not fit, and whether all values were finite before."""
    size, after = rounded.wide.detach().abs(), rounded.after.detach()
    finite = size.isfinite()
    # The spacing at the end of the format; values up to half of it beyond the end still round to the largest number.
    # Larger ones overflow, also in formats without inf, whose cast saturates.
    step = rounded.format.epsilon * 2.0 ** math.floor(math.log2(rounded.format.largest))
    lost = finite & (~after.isfinite() | (size > rounded.format.largest + step / 2))
    nothing = torch.zeros((), dtype=size.dtype, device=size.device)
    # Stacked, so that the device is read once.
    counts = torch.stack([
        size.count_nonzero(),
        lost.count_nonzero(),
        ((size != 0) & (after == 0)).count_nonzero(),
        ((after != 0) & (after.abs() < rounded.format.smallest_normal)).count_nonzero(),
        (~finite).count_nonzero(),
    ])  # fmt: skip
    nonzero, overflows, underflows, subnormals, spoiled = counts.tolist()
    largest = [torch.where(finite, size, nothing).max(), torch.where(lost, size, nothing).max()]
    most, did_not_fit = torch.stack(largest).tolist()
    headroom = math.log2(rounded.format.largest / most) if most else math.inf
    found = ValueRange(nonzero, most, overflows, underflows, subnormals, headroom)
    return found, did_not_fit, not spoiled


Factor = Callable[[Tensor, Format], Tensor]
"""Returns what a tensor is multiplied by before it is rounded, and divided by afterwards."""

_aten = torch.ops.aten
# Operations that change no value, or allocate memory without values: nothing is rounded or counted again.
_MOVES = {
    _aten.clone, _aten._unsafe_view, _aten.cat, _aten.stack, _aten.empty_like, _aten.new_empty, _aten.zeros_like,
    _aten.new_empty_strided, _aten.new_zeros, _aten.index, _aten.gather, _aten.index_select, _aten.constant_pad_nd,
}  # fmt: skip
# Positions of the operands of matrix products and convolutions; the other arguments are biases and numbers.
_OPERANDS = {
    _aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2), _aten.mv: (0, 1),
    _aten.convolution: (0, 1), _aten.convolution_backward: (0, 1, 2),
}  # fmt: skip
_LARGEST_FACTOR = 2.0**100


def round_to_format(format: Format, tensor: Tensor) -> Tensor:
    """Return the nearest values of a format, as torch casts to it.

    Too large values become inf; in e4m3, which has none, they become the largest number or NaN, depending on the
    version of torch.
    """
    return tensor.to(format.dtype).to(tensor.dtype)


def compute_unit_factor(tensor: Tensor, format: Format) -> Tensor:
    """Return the factor 1, for tensors that are rounded as they are."""
    return tensor.new_ones(())


def compute_full_range_factor(tensor: Tensor, format: Format) -> Tensor:
    """Return the factor that maps a tensor's largest value to the format's largest, as fp8 training does."""
    if not tensor.numel():
        return tensor.new_ones(())
    # Bounded, because a tensor of zeros would give inf, and 0 * inf is NaN.
    return (format.largest / tensor.abs().amax()).clamp(max=_LARGEST_FACTOR)


class FormatEmulator(ABC):
    """Runs operations in an emulated format, and listens: give a Recorder both `emulator` and `emulator.run`."""

    carrier: torch.dtype
    """The dtype that autocast should cast to."""

    def __init__(self) -> None:
        self.ranges = ModuleRanges()
        self.not_emulated: set[str] = set()
        """Operations without an fp32 kernel, which ran as they are."""
        self._rounded: list[RoundedTensor] = []

    @abstractmethod
    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        """Return the result of an operation in the emulated format."""

    def __call__(self, operation: Operation) -> None:
        for rounded in self._rounded:
            self.ranges.add(operation, rounded)
        self._rounded.clear()


class OutputRounder(FormatEmulator):
    """An emulation of formats that tensors are stored in, fp16 and bf16: each result is rounded once."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        assert format.dtype is not None
        self.format, self.carrier = format, format.dtype
        self._known: dict[Hashable, list[torch.dtype | None] | None] = {}

    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        """Return the result, computed in fp32 and rounded to the format that torch would store it in."""
        if function._overloadpacket is _aten._to_copy:
            return self._cast(function, arguments, keywords)
        if not _computes_narrow_values(function, arguments, keywords):
            return run_unchanged(function, arguments, keywords)
        written = _list_written_tensors(function, arguments, keywords)
        if written:
            # Only the plain in-place form is emulated; others write several tensors, or another one than the first.
            in_place = len(written) == len(function._schema.returns) == 1 and written[0] is arguments[0]
            return (self._run_in_place if in_place else run_unchanged)(function, arguments, keywords)
        becomes = self._dtypes(function, arguments, keywords)
        if becomes is None or not any(dtype and is_narrow(dtype) for dtype in becomes):
            return run_unchanged(function, arguments, keywords)
        try:
            wide = run_in_fp32(function, arguments, keywords)
        except (RuntimeError, NotImplementedError):
            self.not_emulated.add(str(function._overloadpacket))
            return run_unchanged(function, arguments, keywords)
        leaves, form = pytree.tree_flatten(wide)
        pairs = zip(leaves, becomes, strict=True)
        return pytree.tree_unflatten([self._round(leaf, dtype) for leaf, dtype in pairs], form)

    def _cast(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        """Run a cast, which rounds by itself. autocast casts weights where the module that owns them runs."""
        result, before = function(*arguments, **keywords), arguments[0]
        if result.dtype is self.carrier and before.is_floating_point() and not is_narrow(before.dtype):
            self._rounded.append(RoundedTensor(before, result, self.format, weight=isinstance(before, nn.Parameter)))
        return result

    def _run_in_place(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        wide = run_in_fp32(function, arguments, keywords)
        self._rounded.append(RoundedTensor(wide, arguments[0].copy_(wide), self.format))
        return arguments[0]

    def _round(self, leaf: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(leaf, Tensor) or leaf.dtype is dtype:
            return leaf
        narrow = leaf.to(dtype)
        if dtype is self.carrier:
            self._rounded.append(RoundedTensor(leaf, narrow, self.format))
        return narrow

    def _dtypes(
        self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]
    ) -> list[torch.dtype | None] | None:
        """Return the dtype of each result; None if torch cannot tell without values."""
        known_by = (function, tuple(map(_build_dtype_key, pytree.tree_leaves((arguments, dict(keywords))))))
        if known_by not in self._known:
            self._known[known_by] = _find_group_norm_dtypes(function, arguments) or _predict_dtypes(
                function, arguments, keywords
            )
        return self._known[known_by]


class OperandRounder(FormatEmulator):
    """An emulation of formats that only matrix units take, fp8: operands are rounded, results are kept in bf16."""

    carrier = torch.bfloat16

    def __init__(self, forward: Format, backward: Format, factor: Factor = compute_unit_factor) -> None:
        super().__init__()
        self._forward, self._backward, self._factor = forward, backward, factor
        # A weak reference keeps the storage's address from being reused, without keeping its memory alive.
        self._from_forward: dict[int, StorageWeakRef] = {}

    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        """Return the result of a matrix product with rounded operands; other operations run as they are."""
        places = _OPERANDS.get(function._overloadpacket, ())
        operands = [arguments[place] for place in places]
        if not operands or not all(is_narrow(operand.dtype) for operand in operands):
            return run_unchanged(function, arguments, keywords)
        given = list(arguments)
        for place, operand in zip(places, operands, strict=True):
            # Of the two sides of a product the first one is summed over its columns, and the second over its rows.
            given[place] = self._operand(operand, -1 if place == places[0] else -2)
        wide = run_in_fp32(function, tuple(given), keywords)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(operands[0].dtype), wide)

    @torch.no_grad()
    def _operand(self, operand: Tensor, dim: int) -> Tensor:
        reference = StorageWeakRef(operand.untyped_storage())
        # A forward that is recomputed inside backward is not part of it.
        backward = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
        if not backward:
            self._from_forward.setdefault(reference.cdata, reference)
        # In backward, forward's operands meet the gradients. They have forward's format, and were counted there.
        gradient = backward and reference.cdata not in self._from_forward
        wide, after, factor, format = self._scaled(widen(operand), dim, gradient)
        if gradient or not backward:
            self._rounded.append(RoundedTensor(wide, after, format))
        return after / factor

    def _scaled(self, wide: Tensor, dim: int, gradient: bool) -> tuple[Tensor, Tensor, Tensor, Format]:
        """Return the scaled numbers before and after they are rounded, their factor, and the format."""
        format = self._backward if gradient else self._forward
        factor = self._factor(wide, format)
        scaled = wide * factor
        return scaled, round_to_format(format, scaled), factor, format


NVFP4 = Format("nvfp4", None, largest=6.0, smallest_normal=1.0, epsilon=0.5)
"""e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
_BLOCK = 16
"""The elements with one scale, along the dimension that a product sums over."""


class BlockRounder(OperandRounder):
    """An emulation of nvfp4 in linear layers: a scale in e4m3 for each 16 numbers, and one in fp32 for each tensor.

    Gradients are rounded at random, up or down by their distance. The Hadamard transform that libraries apply to the
    operands of a weight's gradient is not emulated.
    """

    def __init__(self) -> None:
        super().__init__(NVFP4, NVFP4)

    def run(self, function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
        """Return the result of a linear layer's product with rounded operands; other operations run as they are."""
        linear = function._overloadpacket in (_aten.mm, _aten.addmm)
        return super().run(function, arguments, keywords) if linear else run_unchanged(function, arguments, keywords)

    def _scaled(self, wide: Tensor, dim: int, gradient: bool) -> tuple[Tensor, Tensor, Tensor, Format]:
        rows = wide.movedim(dim, -1)
        padded = nn.functional.pad(rows, (0, -rows.shape[-1] % _BLOCK))
        largest = padded.unflatten(-1, (-1, _BLOCK)).abs().amax(-1)
        whole = FP8_E4M3.largest * compute_full_range_factor(largest, NVFP4)
        scales = round_to_format(FP8_E4M3, largest * whole / NVFP4.largest).clamp(min=FP8_E4M3.smallest)
        factor = (whole / scales).repeat_interleave(_BLOCK, -1)[..., : rows.shape[-1]].movedim(-1, dim)
        scaled = wide * factor
        return scaled, _round_to_e2m1(scaled, at_random=gradient), factor, NVFP4


def _round_to_e2m1(tensor: Tensor, *, at_random: bool) -> Tensor:
    size = tensor.abs()
    step = 0.5 + 0.5 * (size >= 2.0) + 1.0 * (size >= 4.0)
    steps = tensor / step
    steps = (steps + torch.rand_like(steps)).floor() if at_random else steps.round()
    return (steps * step).clamp(-NVFP4.largest, NVFP4.largest)


def _computes_narrow_values(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> bool:
    """Return whether an operation computes new values from narrow ones, or turns wide ones into narrow ones."""
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


def _list_written_tensors(
    function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]
) -> list[Tensor]:
    """Return the narrow tensors that an operation writes into."""
    taken = function._schema.arguments
    given = {**dict(zip((a.name for a in taken), arguments, strict=False)), **keywords}
    written = [given.get(a.name) for a in taken if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor) and is_narrow(leaf.dtype)]


@torch.no_grad()
def run_in_fp32(function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]) -> Any:
    """Return the result of the same operation with narrow inputs widened to fp32."""
    arguments, keywords = pytree.tree_map(_widen_leaf, (arguments, dict(keywords)))
    leaves = pytree.tree_leaves((arguments, keywords))
    # An operation such as `full` is given no tensor.
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    with torch.autocast(device.type, enabled=False):
        return function(*arguments, **keywords)


def _widen_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return widen(leaf)
    return torch.float32 if isinstance(leaf, torch.dtype) and is_narrow(leaf) else leaf


def _build_dtype_key(leaf: Any) -> Hashable:
    """Return everything about an argument that the dtype of a result may depend on."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim() == 0
    if isinstance(leaf, torch.dtype | bool):
        return leaf
    return type(leaf).__name__


def _find_group_norm_dtypes(function: OpOverload, arguments: tuple[Any, ...]) -> list[torch.dtype | None] | None:
    """Return the result dtypes of group norm: torch's fake kernel ignores that wide weights make wide statistics."""
    places = {_aten.native_group_norm: (0, 1), _aten.native_group_norm_backward: (1, 4)}.get(function._overloadpacket)
    if places is None:
        return None
    given, weight = (arguments[place] for place in places)
    aside = (given if weight is None else weight).dtype
    return [given.dtype, aside, aside]


def _predict_dtypes(
    function: OpOverload, arguments: tuple[Any, ...], keywords: Mapping[str, object]
) -> list[torch.dtype | None] | None:
    """Return the result dtypes by running the operation on fake tensors; None if that fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    try:
        with torch.no_grad(), FakeTensorMode():
            arguments, keywords = pytree.tree_map_only(Tensor, fake, (arguments, dict(keywords)))
            made = function(*arguments, **keywords)
    except Exception:  # fake kernels raise errors of many types
        return None
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(made)]
