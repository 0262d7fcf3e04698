"""Find where non-finite values come from: the first operation that made them out of finite ones.

Not every inf is an error: masks are filled with -inf on purpose and softmax absorbs them, `empty` returns uninitialized
memory, and the branch of a `where` that is not taken may hold anything. So non-finite values are traced from operation
to operation, and only an origin that reaches the loss or a gradient is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import get_total_norm
from torch.utils import _pytree as pytree

from halfstep import distributed
from halfstep.formats import name_dtype
from halfstep.observe.emulate import run_in_fp32
from halfstep.observe.identities import identify_storage, strip_compile_wrappers
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.observe.recorder import Operation
from halfstep.user_code import find_running_line

Kinds = frozenset[str]
NAN, INF, MINUS_INF = "nan", "inf", "-inf"


def is_all_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. Reads the device: for a diagnosis, not for every step."""
    return bool(torch.isfinite(_convert_to_real(tensor)).all())


def find_nonfinite_kinds(tensor: Tensor) -> Kinds:
    """Return which of nan, inf and -inf a tensor contains."""
    real = _convert_to_real(tensor)
    found = {NAN: real.isnan(), INF: real == torch.inf, MINUS_INF: real == -torch.inf}
    return frozenset(kind for kind, where in found.items() if bool(where.any()))


def find_largest_finite(tensor: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    real = _convert_to_real(tensor)
    if not real.numel():
        return 0.0
    return float(torch.where(real.isfinite(), real.abs(), 0).max().item())


def compute_norm(tensor: Tensor) -> float:
    """Return the 2-norm as a Python float, also where fp32 could not hold the squares; NaN for non-finite values."""
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce().values()  # an index may be repeated
    largest = find_largest_finite(tensor)
    if not largest or not is_all_finite(tensor):
        return 0.0 if is_all_finite(tensor) else math.nan
    real = _convert_to_real(tensor)
    wide = real if real.dtype is torch.float64 else real.float()
    # Divided by the largest value first, so that no square overflows.
    return float(torch.linalg.vector_norm(wide / largest).item()) * largest


def compute_total_norm(gradients: Iterable[Tensor]) -> float:
    """Return the 2-norm of all gradients with a step's own roundings: inf where fp32 cannot hold the squares."""
    plain = [
        extract_local_tensor(gradient.detach().coalesce() if gradient.is_sparse else gradient) for gradient in gradients
    ]
    return float(get_total_norm(plain).item()) if plain else 0.0


def extract_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: a look at all shards would need every rank to take part."""
    if tensor.is_sparse:
        return tensor.detach()._values()
    if not distributed.is_dtensor_shard(tensor):
        return tensor.detach()
    shards: Any = tensor.detach()
    mine: Tensor = shards.to_local()
    return mine


def _convert_to_real(tensor: Tensor) -> Tensor:
    found = extract_local_tensor(tensor)
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    # Few kernels exist for fp8. Every e5m2 value fits fp16; e4m3 is widened to fp32.
    return (
        found.to(torch.float16 if found.dtype is torch.float8_e5m2 else torch.float32) if found.itemsize == 1 else found
    )


_aten = torch.ops.aten
_UNSET = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
"""Operations that return uninitialized memory."""
BATCH = "the batch"
"""The prefix of names of tensors in the batch; the path follows, as in the batch[0]['image']."""
CONSTANT = "a constant"
"""A tensor that existed before the step and belongs to neither the batch nor the model."""
LITERAL = "a number in the code"
"""A tensor that was made of Python numbers during the step."""
OTHERS = "another process"
_CHOOSES = {_aten.nll_loss_forward, _aten.nll_loss2d_forward}
_LIFTS = {_aten.lift_fresh, _aten.lift_fresh_copy}
_NORMALIZES = {_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm}
"""Operations that write running statistics, their fourth and fifth argument, although their schemas do not say so."""
_MOST_IN_FP64 = 2**27
"""Elements of an operation's inputs beyond which it is not recomputed in fp64: a gigabyte."""
_SENT = ("c10d", "_c10d_functional")
"""Namespaces of the operations that receive values from other ranks."""


@dataclass(frozen=True)
class OperationInput:
    """One of the tensors that an operation computed from."""

    format: str
    shape: tuple[int, ...]
    largest: float
    """The largest finite absolute value."""
    has_zero: bool
    has_negative: bool
    kinds: Kinds
    is_number: bool = False
    """Whether it is a Python number."""


@dataclass(frozen=True)
class NonfiniteSource:
    """An operation whose result is non-finite, or a tensor that was so from the outset."""

    order: int
    name: str
    """Such as aten.mul."""
    module: str
    backward: bool
    line: str | None
    """The line of the user's code; for a backward operation, the line of its forward operation."""
    kinds: Kinds
    format: str
    """The format of the result."""
    parents: tuple[NonfiniteSource, ...] = ()
    on_purpose: bool = False
    """Whether the infinities were requested, as in a mask."""
    outside: str | None = None
    """The input that was non-finite before anything was computed: a weight, a buffer, the batch."""
    meant_by: tuple[NonfiniteSource, ...] = ()
    """The sources of infinities that were requested."""
    reduces: bool = False
    """Whether the operation reduces many values to fewer: if a mask hides all of them, nothing is left."""
    given: tuple[OperationInput, ...] = ()
    operands: tuple[OperationInput, ...] = ()
    """The first two arguments as written in the code, tensors or numbers: dividend and divisor."""
    in_fp32: float | None = None
    """The largest absolute value of the result computed in fp32; None if that is non-finite too."""
    in_fp64: float | None = None
    """The same in fp64, whose range no single product of fp32 values exceeds; None if there is no finite result."""
    selects_nothing: bool = False
    """Whether this is a loss over labels that are all ignored, or have zero weight."""
    forward: str = ""
    """For an operation of autograd's backward: the forward operation whose derivative it computes."""

    @property
    def is_origin(self) -> bool:
        """Whether nothing before it was non-finite, and it was not on purpose."""
        return not self.parents and not self.on_purpose


class NonfiniteOrigins:
    """A listener that follows non-finite values; `reaching(tensors)` returns the origin of theirs."""

    def __init__(self, model: nn.Module, batch: Any, held: Mapping[str, Tensor] | None = None) -> None:
        """Follow a step of `model` on `batch`; `held` are other named tensors, such as those of a second model."""
        self.order = 0
        self._line: str | None = None
        self._bad: dict[int, tuple[StorageWeakRef, NonfiniteSource]] = {}
        self._computed: dict[int, StorageWeakRef] = {}
        self._lines: dict[int, str | None] = {}
        self._forward: dict[int, str] = {}
        self._outside: dict[int, NonfiniteSource] = {}
        others = {name: tensor for name, tensor in (held or {}).items() if _has_numbers(tensor)}
        self._names = {identify_storage(tensor): name for name, tensor in others.items()}
        self._names |= {
            identify_storage(leaf): BATCH + path for path, leaf in iterate_tensor_leaves(batch) if _has_numbers(leaf)
        }
        self._names |= {
            identify_storage(buffer): f"buffer {strip_compile_wrappers(name)}"
            for name, buffer in model.named_buffers()
            if _has_numbers(buffer)
        }
        self._names |= {
            identify_storage(weight): f"weight {strip_compile_wrappers(name)}"
            for name, weight in model.named_parameters()
        }
        # Recorded before the step: an input that is written in place shows its result afterwards.
        ours = [
            *(leaf for _, leaf in iterate_tensor_leaves(batch)),
            *model.buffers(),
            *model.parameters(),
            *others.values(),
        ]
        self._bad_before = {
            identify_storage(tensor) for tensor in ours if _has_numbers(tensor) and not is_all_finite(tensor)
        }

    @torch.no_grad()
    def __call__(self, operation: Operation) -> None:
        self.order += 1
        # Now, while the user's frame is on the stack. In backward there is none, so forward's line is kept by node.
        self._line = line = find_running_line()
        if not operation.backward and operation.node is not None:
            self._lines[operation.node] = line
            self._forward[operation.node] = str(_strip_overload(operation))
        packet = _strip_overload(operation)
        if packet in _LIFTS:
            self._literals(operation)
        # A view shares its storage, which is known already.
        schema = _find_schema(operation)
        if schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return
        written = _list_results(operation)
        spoiled = [] if packet in _UNSET else [t for t in written if not is_all_finite(t)]
        if spoiled:
            made = self._made(operation, spoiled, line)
            for tensor in spoiled:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._bad[reference.cdata] = reference, made
        for tensor in written:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._computed[reference.cdata] = reference

    def reaching(self, tensors: Iterable[Tensor]) -> NonfiniteSource | None:
        """Return the first origin of the non-finite values in these tensors; None if all are finite."""
        ends = [made for tensor in tensors if (made := self._of(tensor)) is not None]
        return _find_first_origin(ends) or _find_masked_reduction(ends)

    def reaching_backward(self) -> NonfiniteSource | None:
        """Return the same for the gradients of a sharded model, which depend on other ranks as well."""
        return _find_first_origin([made for _, made in self._bad.values() if made.backward])

    def _made(self, operation: Operation, spoiled: list[Tensor], line: str | None) -> NonfiniteSource:
        kinds = frozenset[str]().union(*map(find_nonfinite_kinds, spoiled))
        inputs = _list_local_tensors((operation.arguments, dict(operation.keywords)))
        parents = self._parents(operation, inputs)
        guilty = tuple(made for made in parents if not made.on_purpose)
        meant = frozenset[str]().union(*(made.kinds for made in parents if made.on_purpose))
        leaves = pytree.tree_leaves((operation.arguments, dict(operation.keywords)))
        asked = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)
        on_purpose = not guilty and NAN not in kinds and (kinds <= meant or asked)
        made = NonfiniteSource(
            self.order,
            str(_strip_overload(operation)),
            operation.module,
            operation.backward,
            line or self._lines.get(-1 if operation.node is None else operation.node),
            kinds,
            name_dtype(spoiled[0].dtype),
            guilty,
            on_purpose,
            OTHERS if _find_namespace(operation) in _SENT and not guilty else None,
            tuple(made for made in parents if made.on_purpose) if on_purpose else (),
            max((tensor.numel() for tensor in inputs), default=0) > sum(tensor.numel() for tensor in spoiled),
            # With a line, the user's own code runs: in forward, or in the backward of a custom Function.
            forward="" if line is not None or operation.node is None else self._forward.get(operation.node, ""),
        )
        if not made.is_origin:
            return made
        written = {identify_storage(tensor) for tensor in list_written_tensors(operation)}
        return replace(
            made,
            given=tuple(_describe_input(tensor, written=identify_storage(tensor) in written) for tensor in inputs),
            operands=_describe_operands(operation, written),
            in_fp32=_compute_fp32_maximum(operation),
            in_fp64=_compute_fp64_maximum(operation, inputs),
            selects_nothing=_selects_nothing(operation),
        )

    def _literals(self, operation: Operation) -> None:
        """Record tensors made of Python numbers: no operation computed them, and they did not exist before."""
        for tensor in _list_local_tensors(operation.result):
            if not is_all_finite(tensor):
                reference, kinds = StorageWeakRef(tensor.untyped_storage()), find_nonfinite_kinds(tensor)
                # One number is a constant in the code; several are data that was read during the step.
                name = LITERAL if tensor.numel() == 1 else CONSTANT
                self._bad[reference.cdata] = reference, self._came(tensor, kinds, name, kinds == {MINUS_INF})

    def _came(self, tensor: Tensor, kinds: Kinds, name: str, on_purpose: bool) -> NonfiniteSource:
        return NonfiniteSource(
            self.order, "", "", False, self._line, kinds, name_dtype(tensor.dtype), on_purpose=on_purpose, outside=name
        )

    def _parents(self, operation: Operation, inputs: list[Tensor]) -> list[NonfiniteSource]:
        """Return the non-finite inputs of an operation.

        An input that was written in place holds the result by now, so only its earlier record counts.
        """
        written = {identify_storage(tensor) for tensor in list_written_tensors(operation)}
        known = [
            t
            for t in inputs
            if (key := identify_storage(t)) not in written or key in self._bad or key in self._bad_before
        ]
        return [made for tensor in known if (made := self._of(tensor)) is not None]

    def _of(self, tensor: Tensor) -> NonfiniteSource | None:
        """Return what made this tensor non-finite; None if it is finite, or was never initialized."""
        if is_all_finite(tensor):
            return None
        key = identify_storage(tensor)
        if key in self._bad:
            return self._bad[key][1]
        # Computed, but never recorded as non-finite: `empty` made it, and its values mean nothing.
        return None if key in self._computed else self._origin_outside(tensor, key)

    def _origin_outside(self, tensor: Tensor, key: int) -> NonfiniteSource:
        if key not in self._outside:
            kinds, name = find_nonfinite_kinds(tensor), self._names.get(key, CONSTANT)
            # A constant of -inf is a mask. In a weight or in the batch it is not assumed to be one.
            on_purpose = kinds == {MINUS_INF} and not name.startswith((BATCH, "weight"))
            self._outside[key] = self._came(tensor, kinds, name, on_purpose)
        return self._outside[key]


def _find_first_origin(ends: list[NonfiniteSource]) -> NonfiniteSource | None:
    """Return the first origin of all that led to these."""
    # A batch may contain a mask of -inf, which is named only if there is no other origin.
    origins = [made for made in _collect_ancestors(ends, lambda made: made.parents) if made.is_origin]
    return min(origins, key=lambda made: (_is_perhaps_mask(made), made.order), default=None)


def _find_masked_reduction(ends: list[NonfiniteSource]) -> NonfiniteSource | None:
    """Return the first reduction that had only requested infinities to work on, where there is no origin."""
    reducing = [made for made in _collect_ancestors(ends, lambda made: made.meant_by) if made.reduces]
    return min(reducing or ends, key=lambda made: made.order, default=None)


def _collect_ancestors(
    ends: list[NonfiniteSource], led_by: Callable[[NonfiniteSource], tuple[NonfiniteSource, ...]]
) -> list[NonfiniteSource]:
    """Return these, and all that led to them."""
    found: dict[int, NonfiniteSource] = {}
    left = list(ends)
    while left:
        made = left.pop()
        if id(made) not in found:
            found[id(made)] = made
            left += led_by(made)
    return list(found.values())


def _is_perhaps_mask(made: NonfiniteSource) -> bool:
    return made.outside is not None and made.outside.startswith(BATCH) and made.kinds == {MINUS_INF}


def _describe_input(tensor: Tensor, *, written: bool = False) -> OperationInput:
    """Describe an input; if it was `written`, it holds the result by now, and its non-finite values were not given."""
    has_zero = bool((tensor == 0).any())
    has_negative = not tensor.is_complex() and bool((tensor < 0).any())
    shape, kinds = tuple(tensor.shape), frozenset[str]() if written else find_nonfinite_kinds(tensor)
    return OperationInput(name_dtype(tensor.dtype), shape, find_largest_finite(tensor), has_zero, has_negative, kinds)


def _describe_operands(operation: Operation, written: set[int]) -> tuple[OperationInput, ...]:
    found = []
    for argument in operation.arguments[:2]:
        is_number = isinstance(argument, (int, float))
        if is_number:
            argument = torch.tensor(float(argument))
        if not isinstance(argument, Tensor) or argument.layout is not torch.strided or argument.is_meta:
            break
        described = _describe_input(extract_local_tensor(argument), written=identify_storage(argument) in written)
        found.append(replace(described, is_number=is_number))
    return tuple(found)


def _strip_overload(operation: Operation) -> Any:
    """Return the operation without its overload; higher-order operators, such as torch.cond, have none."""
    return getattr(operation.function, "_overloadpacket", operation.function)


def _find_namespace(operation: Operation) -> str:
    return str(getattr(operation.function, "namespace", ""))


def _find_schema(operation: Operation) -> Any:
    return getattr(operation.function, "_schema", None)


def _selects_nothing(operation: Operation) -> bool:
    """Return whether a mean over labels is over none: all are ignored, or the others have zero weight."""
    if _strip_overload(operation) not in _CHOOSES or len(operation.arguments) < 5:
        return False
    target, weight, _, ignored = operation.arguments[1:5]
    counted = target[target != ignored]
    return not counted.numel() or (weight is not None and not bool(weight[counted].any()))


def _compute_fp64_maximum(operation: Operation, inputs: list[Tensor]) -> float | None:
    """Return the result's largest value in fp64, to tell an undefined result from one too large for fp32."""
    if _find_namespace(operation) != "aten" or _overwrites_inputs(operation):
        return None
    if sum(tensor.numel() for tensor in inputs) > _MOST_IN_FP64:
        return None
    try:
        arguments, keywords = pytree.tree_map(_convert_to_fp64, (operation.arguments, dict(operation.keywords)))
        wide = _list_local_tensors(operation.function(*arguments, **keywords))
    except Exception:  # no such kernel, no such format on this device
        return None
    return max(map(find_largest_finite, wide)) if wide and all(map(is_all_finite, wide)) else None


def _overwrites_inputs(operation: Operation) -> bool:
    return _strip_overload(operation) not in _NORMALIZES and bool(list_written_tensors(operation))


def _copy_statistics(operation: Operation) -> tuple[Any, ...]:
    """Return the arguments with copies of the running statistics: a second call must not update them twice."""
    if _strip_overload(operation) not in _NORMALIZES:
        return operation.arguments
    kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in operation.arguments[3:5]]
    return (*operation.arguments[:3], *kept, *operation.arguments[5:])


def _convert_to_fp64(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double()
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf


def _compute_fp32_maximum(operation: Operation) -> float | None:
    if _find_namespace(operation) != "aten":
        return None  # a second call of a collective would wait forever
    if _overwrites_inputs(operation):
        return None  # its input is overwritten
    try:
        wide = _list_local_tensors(run_in_fp32(operation.function, _copy_statistics(operation), operation.keywords))
    except (RuntimeError, NotImplementedError):
        return None
    return max(map(find_largest_finite, wide)) if wide and all(map(is_all_finite, wide)) else None


def _list_local_tensors(tree: Any) -> list[Tensor]:
    found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and _has_numbers(leaf)]
    return list(map(extract_local_tensor, found))


def _has_numbers(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided and not tensor.is_meta


def _list_results(operation: Operation) -> list[Tensor]:
    """Return the returned tensors, or the written ones if nothing is returned, as by foreach operations."""
    if operation.result is None:
        return list_written_tensors(operation)
    also = list_written_tensors(operation) if _strip_overload(operation) in _NORMALIZES else []
    return _list_local_tensors(operation.result) + also


def list_written_tensors(operation: Operation) -> list[Tensor]:
    """Return the tensors that an operation wrote into, as far as its schema tells."""
    if _strip_overload(operation) in _NORMALIZES:
        # The running statistics that a batch normalization updates in training.
        arguments = operation.arguments
        return _list_local_tensors(arguments[3:5]) if len(arguments) > 5 and arguments[5] else []
    schema = _find_schema(operation)
    taken = () if schema is None else schema.arguments
    if not any(a.alias_info is not None and a.alias_info.is_write for a in taken):
        return []
    given = {**dict(zip((a.name for a in taken), operation.arguments, strict=False)), **operation.keywords}
    return _list_local_tensors([given.get(a.name) for a in taken if a.alias_info is not None and a.alias_info.is_write])
