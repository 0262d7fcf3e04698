"""Count the FLOPs of matrix products, convolutions, attention and recurrent layers, and the format they ran in.

Nothing is counted without an exact formula: `is_uncounted_operation` recognizes operations that may do such work and
have none. Nor is work that torch cannot compute in 16 bits, such as decompositions and complex products (`is_wide`): it
says nothing about the precision that was requested, and lowers the confidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import flop_counter

from halfstep.formats import FP32, name_dtype
from halfstep.numbers import format_percent
from halfstep.observe.recorder import Operation
from halfstep.precision.flags import is_tf32_enabled
from halfstep.precision.island import find_islands

_aten = torch.ops.aten


def _count_cpu_attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _count_cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _count_recurrent_layer(input: Tensor, over_input: Tensor, over_hidden: Tensor, *_: Any, **__: Any) -> int:
    """Count all gates of one layer in one direction, at each position of each sequence."""
    return 2 * _count_positions(input) * (over_input.numel() + over_hidden.numel())


def _count_recurrent_layers(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """Count every matrix of every layer and direction, at each position; biases have one dimension."""
    return 2 * _count_positions(input) * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _count_positions(input: Tensor) -> int:
    return input.numel() // max(input.shape[-1], 1)


def _build_backward_formula(forward: Callable[..., int]) -> Callable[..., int]:
    """Return the formula of a backward: gradients of inputs and of weights each cost as much as the forward."""

    def backward(*arguments: Any, **keywords: Any) -> int:
        return 2 * forward(*arguments, **keywords)

    return backward


def _count_grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count products of groups of rows, each with its own matrix."""
    if left.dim() == 3 and right.dim() == 2:
        return 2 * left.shape[-2] * right.numel()
    return 2 * left.numel() * right.shape[-1]


def _count_vector_product(matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _count_addmv(_bias: Tensor, matrix: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


# torch's registry has CUDA's attention kernels, but not those of the CPU, recurrent layers or products with vectors.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _count_cpu_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_cpu_attention_backward,
    _aten.mkldnn_rnn_layer: _count_recurrent_layer,
    _aten.mkldnn_rnn_layer_backward: _build_backward_formula(_count_recurrent_layer),
    _aten._cudnn_rnn: _count_recurrent_layers,
    _aten._cudnn_rnn_backward: _build_backward_formula(_count_recurrent_layers),
    _aten.miopen_rnn: _count_recurrent_layers,
    _aten.miopen_rnn_backward: _build_backward_formula(_count_recurrent_layers),
    _aten._grouped_mm: _count_grouped_product,
    _aten._scaled_grouped_mm: _count_grouped_product,
    _aten._scaled_mm_v2: _count_grouped_product,
    _aten.mv: _count_vector_product,
    _aten.dot: _count_vector_product,
    _aten.vdot: _count_vector_product,
    _aten.addmv: _count_addmv,
    _aten._sparse_addmm: flop_counter.addmm_flop,
}
_ADDED = (
    _aten.addmm, _aten.baddbmm, _aten.addmv, _aten.addmm_, _aten.baddbmm_, _aten.addmv_, _aten._sparse_addmm,
)  # fmt: skip
"""Operations whose first argument is what the product is added to."""
_FORMULAS |= {
    in_place: _FORMULAS[packet]
    for packet, in_place in ((_aten.addmm, _aten.addmm_), (_aten.baddbmm, _aten.baddbmm_), (_aten.addmv, _aten.addmv_))
}


def count_flops(operation: Operation) -> int:
    """Return the FLOPs of real products, convolutions, attention and recurrent layers; 0 for other operations."""
    if _find_formula_key(operation) not in _FORMULAS:
        return 0
    operands = _select_operands(operation)
    if not operands or not all(operand.is_floating_point() for operand in operands):
        return 0
    if any(operand.layout is not torch.strided for operand in operands):
        return _count_sparse_product(operands)
    return _count_by_formula(operation)


def _count_by_formula(operation: Operation) -> int:
    keywords = {name: value for name, value in operation.keywords.items() if name != "out"}
    return int(_FORMULAS[_find_formula_key(operation)](*operation.arguments, **keywords, out_val=operation.result))


def name_operation_format(operation: Operation) -> str:
    """Return the name of the format that an operation with `flops` multiplied in."""
    return _name_format(_select_operands(operation)[-1])


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def has_no_narrow_kernel(operation: Operation) -> bool:
    """Return whether torch has this operation in fp32 only, such as sparse rows on a CPU."""
    return any(
        operand.layout in _COMPRESSED and operand.device.type == "cpu" for operand in _select_operands(operation)
    )


_CUBIC: dict[str, float] = {
    "cholesky": 1 / 3, "cholesky_ex": 1 / 3, "cholesky_inverse": 1, "cholesky_solve": 2, "ldl_factor_ex": 1 / 3,
    "ldl_solve": 2, "lu": 2 / 3, "lu_factor_ex": 2 / 3, "lu_solve": 2, "solve_ex": 8 / 3, "inv_ex": 2, "det": 2 / 3,
    "slogdet": 2 / 3, "solve_triangular": 1, "triangular_solve": 1, "qr": 10 / 3, "geqrf": 4 / 3, "ormqr": 4,
    "householder_product": 4 / 3, "lstsq": 10 / 3, "eigh": 9, "eig": 25, "eigvals": 10, "svd": 20, "pinv": 22,
    "matrix_exp": 16,
}  # fmt: skip
"""Operations by their name without `linalg`, with their usual FLOPs as multiples of n³ for a square matrix."""
_LIGHT_LINALG = frozenset({"linalg_vector_norm", "linalg_check_errors", "linalg_cross", "linalg_powsum"})
_DISTANCES = frozenset({
    "euclidean_dist", "cdist_forward", "cdist_backward", "pdist_forward", "pdist_backward",
})  # fmt: skip
_TRANSFORMS = frozenset({"fft_r2c", "fft_c2r", "fft_c2c"})


def _is_fp32_only(operation: Operation) -> bool:
    if getattr(operation.function, "namespace", "") != "aten":
        return False
    packet = _find_formula_key(operation)
    if packet in _FORMULAS:
        operands = _select_operands(operation)
        # torch computes a complex convolution as three real ones, two of them of views.
        split = packet is _aten.convolution and all(
            operand._base is not None and operand._base.is_complex() for operand in operands
        )
        return split or any(operand.is_complex() for operand in operands)
    name = packet.__name__.strip("_")
    return (
        (name.startswith("linalg_") and name not in _LIGHT_LINALG)
        or name.removeprefix("linalg_") in _CUBIC
        or name in _DISTANCES
        or name in _TRANSFORMS
    )


def _count_fp32_only_flops(operation: Operation) -> int | None:
    """Return about how many FLOPs wide work has; None if no rule counts them."""
    packet, given = _find_formula_key(operation), _list_floating_tensors(operation)
    if packet in _FORMULAS:
        # A complex product is four real ones.
        return _count_by_formula(operation) * (4 if given and given[0].is_complex() else 1)
    name, sizes = packet.__name__.strip("_").removeprefix("linalg_"), [_count_stored_values(tensor) for tensor in given]
    if not given:
        return None
    if name in _CUBIC and given[0].dim() > 1:
        rows, columns = sorted(given[0].shape[-2:])
        return round(_CUBIC[name] * sizes[0] * rows * (4 if given[0].is_complex() else 1)) if columns else 0
    if name in _DISTANCES:
        # Three operations for each number of each pair; a backward is given the gradients of the pairs first.
        backward = name.endswith("backward")
        made = (
            given if backward else [leaf for leaf in pytree.tree_leaves(operation.result) if isinstance(leaf, Tensor)]
        )
        return (6 if backward else 3) * _count_stored_values(made[0]) * given[int(backward)].shape[-1]
    if name in _TRANSFORMS:
        axes = operation.arguments[1]
        points = math.prod(given[0].shape[axis] for axis in axes)
        return round(5 * sizes[0] * math.log2(max(points, 2)))
    return None


_CHEAP = frozenset({
    "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "inductor",
    "rngprims", "debugprims", "streams", "symm_mem",
})  # fmt: skip
"""Namespaces of torch whose operations move values, or compute them elementwise."""
# Words in the names of aten operations that multiply matrices; names are split at underscores.
_HEAVY = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "mv", "addmv", "hspmm", "smm", "sspaddmm", "rnn", "lstm",
    "gru", "attention", "linear", "trilinear", "convolution", "conv2d", "conv3d", "dilated2d", "dilated3d",
    "depthwise2d", "depthwise3d", "transpose2d", "transpose3d", "tbc",
})  # fmt: skip
_LIGHT = frozenset({"upsample", "thnn", "flatten", "reorder", "convert", "prepack", "combination"})
"""Words that mark operations which only sound like those: they interpolate, or rearrange weights."""


def is_uncounted_operation(operation: Operation) -> bool:
    """Return whether this may be matrix work without a formula: a custom operation, or one of torch's."""
    function, packet = operation.function, _find_formula_key(operation)
    if _is_fp32_only(operation):
        return True
    if function.namespace == "aten":
        if packet in _FORMULAS:
            operands = _select_operands(operation)
            return len(operands) == 2 and all(operand.layout is not torch.strided for operand in operands)
        words = set(packet.__name__.strip("_").split("_"))
        return bool(words & _HEAVY) and not words & _LIGHT and bool(_list_floating_tensors(operation))
    if function.namespace in _CHEAP or packet in _FORMULAS or function.is_view or torch.Tag.pointwise in function.tags:
        return False
    return bool(_list_floating_tensors(operation))


def estimate_unknown_flops(operation: Operation) -> tuple[int, str]:
    """Return an unknown operation's FLOPs, as if its arguments were multiplied, and the format of the largest one.

    For a product of two matrices the square root is exact: (m k)(k n)(m n) = (m n k)².
    """
    given = sorted(_list_floating_tensors(operation), key=_count_stored_values, reverse=True)
    if _is_fp32_only(operation) and (work := _count_fp32_only_flops(operation)) is not None:
        return work, _name_format(given[0])
    made = [leaf for leaf in pytree.tree_leaves(operation.result) if isinstance(leaf, Tensor)]
    out = max(map(_count_stored_values, made), default=1)
    pairs = [2 * math.isqrt(_count_stored_values(given[0]) * _count_stored_values(other) * out) for other in given[1:]]
    return sum(pairs) if pairs else _count_stored_values(given[0]), _name_format(given[0])


def _list_floating_tensors(operation: Operation) -> list[Tensor]:
    leaves = pytree.tree_leaves((operation.arguments, dict(operation.keywords)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]


def _find_formula_key(operation: Operation) -> Any:
    """Return the key of the formulas: the operation without its overload, or a higher-order operator itself."""
    function: Any = operation.function
    return getattr(function, "operator", function._overloadpacket)


def _select_operands(operation: Operation) -> list[Tensor]:
    """Return two tensors that were multiplied with each other."""
    first = 1 if _find_formula_key(operation) in _ADDED else 0
    given = [*operation.arguments, *operation.keywords.values()][first : first + 2]
    # A recurrent layer on a GPU gets its weights as a list.
    given = [item[0] if isinstance(item, (list, tuple)) and item else item for item in given]
    return [item for item in given if isinstance(item, Tensor)]


def _count_sparse_product(operands: list[Tensor]) -> int:
    """Count the product of a sparse and a dense matrix; a product of two sparse ones is not counted."""
    sparse = [operand for operand in operands if operand.layout is not torch.strided]
    dense = [operand for operand in operands if operand.layout is torch.strided]
    if len(sparse) != 1 or len(dense) != 1:
        return 0
    # Each stored value is multiplied with one row or column of the dense matrix, on the side that is not summed over.
    columns = dense[0].shape[-1] if operands[0] is sparse[0] else dense[0].shape[-2]
    return 2 * _count_stored_values(sparse[0]) * (columns if dense[0].dim() > 1 else 1)


def _count_stored_values(tensor: Tensor) -> int:
    """Return the number of stored values."""
    if tensor.layout is torch.strided:
        return tensor.numel()
    return (tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()).numel()


def _name_format(operand: Tensor) -> str:
    # torchao's tensors show the format that they stand for, and hold codes.
    if type(operand).__module__.startswith("torchao."):
        return "mxfp8" if type(operand).__name__.startswith("MX") else "fp8"
    dtype = operand.dtype.to_real()
    if dtype is FP32.dtype and is_tf32_enabled(operand.device):
        return "tf32"
    return name_dtype(dtype)


# -- the work of a step -----------------------------------------------------------------------------------------------


SHARE_REQUIRED = 0.9
"""The share of the work outside islands; the rest is what autocast leaves in fp32 on purpose."""
DOUBT = 10
"""The estimate for an operation without a formula may be too small by this factor."""


@dataclass(frozen=True)
class Observation:
    """The work of one step by the format it was done in."""

    expected: str
    flops: Mapping[str, int]
    """Matrix products, convolutions and recurrent layers outside islands, forward and backward."""
    island_flops: int
    strays: Mapping[str, int]
    """Work done in another format than expected, by module, most first."""
    idle_islands: tuple[str, ...] = ()
    """Islands in which nothing ran: their weights may be used without calling them, which protects nothing."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operations without a formula, by name, module and format, with estimated work, most first."""
    unknown_as_expected: int = 0
    """The part of it whose inputs were in the expected format."""
    fp8: Mapping[str, int] = field(default_factory=dict)
    """Work that the model itself requested in fp8, which autocast never does. It is not in `flops`."""

    @property
    def share(self) -> float | None:
        """The share of the counted work that was in the expected format; None if there was none."""
        total = sum(self.flops.values())
        return self.flops.get(self.expected, 0) / total if total else None

    @property
    def confidence(self) -> float:
        """The share of all work that is known, with estimates for unknown operations."""
        known = sum(self.flops.values()) + sum(self.fp8.values()) + self.island_flops
        total = known + sum(self.unknown.values())
        return known / total if total else 1.0

    @property
    def as_asked(self) -> bool:
        """Whether the precision is acceptable; False only if no format of the unknown work could change that."""
        # A wrong refusal stops a good run, so unknown work counts in favor of the step, ten times over.
        unseen = DOUBT * sum(self.unknown.values())
        total = sum(self.flops.values())
        return not total or (self.flops.get(self.expected, 0) + unseen) / (total + unseen) >= SHARE_REQUIRED

    @property
    def in_doubt(self) -> bool:
        """Whether the unknown work decides: without it the step would be refused, or it had another format."""
        if not self.unknown or not self.as_asked:
            return False
        total = sum(self.flops.values()) + sum(self.unknown.values())
        likely = (self.flops.get(self.expected, 0) + self.unknown_as_expected) / total if total else 1.0
        return min(likely, 1.0 if self.share is None else self.share) < SHARE_REQUIRED

    def __str__(self) -> str:
        islands = f", {self.island_flops:.3g} FLOPs in islands" if self.island_flops else ""
        fp8 = "".join(f", {work:.3g} FLOPs in {name}" for name, work in self.fp8.items())
        doubt = f", {format_percent(self.confidence)} of the work known" if self.unknown else ""
        if self.share is None:
            other = "other " if self.fp8 else ""
            return f"{self.expected}: no {other}matrix product or convolution was seen{islands}{fp8}{doubt}"
        return (
            f"{self.expected}: {format_percent(self.share)} of {sum(self.flops.values()):.3g} "
            f"FLOPs{islands}{fp8}{doubt}"
        )


def is_fp8(name: str) -> bool:
    """Return whether a format of counted work is an 8-bit one."""
    return name.startswith(("fp8", "mxfp8", "float8_"))


class OperationWork(NamedTuple):
    """The work of an operation: products, or an operation that may compute some."""

    flops: int
    """0 if no formula counts them."""
    is_wide: bool
    """Whether torch only does it in fp32, regardless of the requested precision.

    These are decompositions, distances and Fourier transforms, which have no 16-bit kernel or which autocast keeps in
    fp32, complex products, and the products in the backward of all of these.
    """


class WorkByFormat:
    """A listener that adds up work by format and counts islands separately, including those outside the model.

    It must be called with every operation of a step, in its order.
    """

    def __init__(self, model: nn.Module, expected: str) -> None:
        self.expected = expected
        self._flops: Counter[str] = Counter()
        self._strays: Counter[str] = Counter()
        self._fp8: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._unknown_as_expected = 0
        self._in_islands = 0
        self._idle = {id(module): path for path, module in find_islands(model).items() if not _is_frozen(module)}
        self.backward_seen = False
        self._wide_nodes: set[int] = set()

    def __call__(self, operation: Operation) -> None:
        self.backward_seen |= operation.backward
        work = self._work_of(operation)
        if operation.islands:
            self._in_islands += work.flops if work else 0
            for island in operation.islands:
                self._idle.pop(id(island), None)
        elif work and work.flops and not work.is_wide:
            self._count(operation, work.flops, name_operation_format(operation))
        elif work:
            self._guess(operation, "; torch has nothing narrower" if work.is_wide else "")

    def observation(self) -> Observation:
        """Return the observations so far."""
        return Observation(
            self.expected,
            dict(self._flops),
            self._in_islands,
            dict(self._strays.most_common()),
            tuple(sorted(self._idle.values())),
            dict(self._unknown.most_common()),
            self._unknown_as_expected,
            dict(self._fp8),
        )

    def _work_of(self, operation: Operation) -> OperationWork | None:
        """Return the work of an operation; None for one that multiplies nothing."""
        is_wide = operation.backward and operation.node in self._wide_nodes
        if (
            not is_wide
            and (is_wide := _is_fp32_only(operation))
            and not operation.backward
            and operation.node is not None
        ):
            self._wide_nodes.add(operation.node)
        count = count_flops(operation)
        return OperationWork(count, is_wide) if count or is_uncounted_operation(operation) else None

    def _count(self, operation: Operation, work: int, found: str) -> None:
        # Not the model's choice: torch itself has no narrower kernel for these.
        if found == FP32.name and (operation.widened or has_no_narrow_kernel(operation)):
            return
        # autocast never casts to fp8, so the model has requested it by name.
        if is_fp8(found):
            self._fp8[found] += work
            return
        self._flops[found] += work
        if found != self.expected:
            self._strays[f"{operation.module or '(the model itself)'} [{found}]"] += work

    def _guess(self, operation: Operation, note: str) -> None:
        work, found = estimate_unknown_flops(operation)
        if operation.widened and found == FP32.name:
            return
        place = operation.module or "the model itself"
        self._unknown[f"{operation.function._overloadpacket} in {place} [{found}{note}]"] += work
        if found == self.expected:
            self._unknown_as_expected += work


def _is_frozen(module: nn.Module) -> bool:
    """Return whether all parameters are frozen: such a module may be idle, like an autoencoder with cached latents."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
