"""Record every block of memory of a run: when it was allocated, when it was freed, and its use."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.formats import BF16, FP32, find_format, is_narrow
from halfstep.observe.recorder import OUTSIDE, Operation
from halfstep.precision.hardware import describe_device, find_format_support

# -- kernels ----------------------------------------------------------------------------------------------------------
# Model what fake tensors do not show of a CPU run: memory inside kernels, and gradients summed in place.


_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_PRODUCTS_IN_ONE = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_PRODUCTS_OF_MANY = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
_SUM = torch.ops.aten.add.Tensor
_BLOCK = 16
"""oneDNN's channel block; the last block of a tensor is padded."""
_FEW = 4
"""oneDNN reads images with up to this many channels without blocking."""


_COPIES_OF_SUMS = 4
"""Copies of a weight's gradient that a product of matrices makes."""
_WIDE_KERNEL, _WIDE_FIRST_KERNEL = 14, 16
"""Wider kernels have no kernel of oneDNN's own for their gradients; the second is for images in a narrow format."""
_SMALL_KERNEL = 3
_MANY, _SMALL = 16, 20480
"""torch's thresholds for oneDNN: the batch for 1×1 kernels on one thread, and the elements of a single image.
"""


def estimate_kernel_workspace(operation: Operation) -> int:
    """Return the peak workspace of the operation's kernel, without its arguments and results."""
    if operation.function is _FORWARD:
        arguments = _convert_to_two_dimensions(operation.arguments, tensors=2)
        return (
            _compute_convolution_workspace(arguments, _add_height_dimension(operation.result))
            if _uses_onednn(*arguments)
            else 0
        )
    if operation.function is _BACKWARD:
        arguments = _convert_to_two_dimensions(operation.arguments, tensors=3)
        return _compute_convolution_backward_workspace(arguments) if _uses_onednn(*arguments[1:]) else 0
    if operation.function in _PRODUCTS_IN_ONE:
        return _compute_sum_bytes(operation.result, operation.result.numel())
    if operation.function in _PRODUCTS_OF_MANY:
        return _compute_sum_bytes(operation.result, operation.result[0].numel() * torch.get_num_threads())
    if operation.function is _NORM_BACKWARD and operation.arguments[0].device.type == "cpu":
        return int(operation.arguments[1].nbytes) if operation.arguments[9][0] else 0
    return 0


@cache
def has_native_bf16() -> bool:
    """Return whether this CPU has instructions for bf16; otherwise kernels sum its products in fp32 copies."""
    return find_format_support(describe_device("cpu"), BF16.name).native


def _is_emulated(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and not has_native_bf16()


def _compute_sum_bytes(result: Tensor, elements: int) -> int:
    return elements * FP32.bytes if _is_emulated(result) else 0


def is_in_place_sum(operation: Operation) -> bool:
    """Return whether a real backward sums two gradients into the memory of the first.

    torch's engine does so where it holds the only reference to a tensor that is not a view, but never with fake
    tensors.
    """
    if operation.function is not _SUM or not operation.backward:
        return False
    before, more = operation.arguments
    if not (isinstance(more, Tensor) and before.shape == more.shape and before.device.type == "cpu"):
        return False
    whole: bool = before.untyped_storage().nbytes() == before.nbytes
    return whole and not before._is_view()


def _convert_to_two_dimensions(arguments: Sequence[Any], tensors: int) -> list[Any]:
    """Return the arguments of a 1-d convolution as torch runs it: 2-d, with height 1. `tensors` precede the bias."""
    images, (bias, stride, padding, dilation, transposed, more, *rest) = arguments[:tensors], arguments[tensors:]
    if images[0].dim() != 3:
        return list(arguments)
    lines = [_add_height_dimension(tensor) for tensor in images]
    return [*lines, bias, [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], *rest]


def _add_height_dimension(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _uses_onednn(image: Tensor, weight: Tensor, _bias: Any, stride: Any, _: Any, dilation: Any, *rest: Any) -> bool:
    """Return whether torch chooses oneDNN: small fp32 work uses its own kernels."""
    usable = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    if not usable or image.device.type != "cpu" or image.dim() < 4:
        return False
    if image.dtype is torch.bfloat16:
        return True
    # fp16 does not use it in backward; see precision.half_convolutions.
    return image.dtype is torch.float32 and _is_large_enough(image, weight, max(*stride, *dilation) > 1, groups=rest[2])


def _is_large_enough(image: Tensor, weight: Tensor, apart: bool, groups: int) -> bool:
    kernel = weight.shape[-2:]
    if not (apart or image.shape[0] >= _MANY or max(kernel) > 1 or torch.get_num_threads() > 1):
        return False
    return groups > 1 or min(kernel) > 3 or image.shape[0] > 1 or image.numel() > _SMALL


def _compute_convolution_workspace(arguments: Sequence[Any], result: Tensor) -> int:
    """Return the bytes of blocked copies of all operands and the result; channels_last images are used as they are.

    The weight is blocked in any layout.
    """
    image, weight, _, stride, _, dilation, transposed, _, groups = arguments[:9]
    if not transposed and _is_smaller_than_kernel(image, weight, dilation) and _has_odd_groups(weight, groups):
        return _compute_column_bytes(weight, result)
    if _is_channels_last(image) or _is_channels_last(weight):
        return _compute_layout_copies(image, weight) + _compute_blocked_weight(weight)
    out = _compute_blocked_bytes(result)
    again = result.nbytes if _is_copied_twice(weight, max(stride) > 1 and transposed) else 0
    blocks = _compute_blocked_image(image) + _compute_blocked_weight(weight)
    return _compute_layout_copies(image, weight) + max(blocks + out - result.nbytes, out + again)


def _compute_convolution_backward_workspace(arguments: Sequence[Any]) -> int:
    """Return the peak: the image's gradient comes first and is alive while the weight's is computed."""
    gradient, image, weight, _, stride, _, _, transposed = arguments[:8]
    groups, (for_image, for_weight, _) = arguments[9:11]
    laid_out = _is_channels_last(image) or _is_channels_last(weight)
    if not transposed and not laid_out and _uses_columns(image, weight, arguments[6], groups):
        return _compute_column_bytes(weight, gradient) + int(_COPIES_OF_SUMS * weight.numel() * FP32.bytes)
    blocks = _compute_blocked_weight(weight)
    results = (image.nbytes if for_image else 0) + (weight.nbytes if for_weight else 0)
    moments = [0]
    if for_image and not laid_out:
        out = _compute_blocked_bytes(image)
        again = image.nbytes if _is_copied_twice(weight, max(stride) > 1 and not transposed) else 0
        moments += [_compute_blocked_bytes(gradient) + blocks + out - results, out + image.nbytes + again - results]
    if for_weight:
        # Products of narrow numbers are summed in fp32; for channels_last images there is a second copy.
        made = _compute_blocked_groups(weight, groups) if laid_out else blocks
        sums = max(made, weight.nbytes) // weight.element_size() * FP32.bytes if is_narrow(weight.dtype) else 0
        copied = not (laid_out or _is_large_depthwise(weight))
        copies = _compute_blocked_bytes(gradient) + _compute_blocked_image(image) if copied else 0
        if _is_emulated(weight):
            copies = _compute_emulated_copies(gradient, image, weight) if copied else 0
        moments += [copies + made - weight.nbytes + sums, made + weight.nbytes if laid_out else made]
    return _compute_layout_copies(gradient, image, weight) + int(max(moments))


def _uses_columns(image: Tensor, weight: Tensor, dilation: Sequence[int], groups: int) -> bool:
    """Return whether the weight's gradient is a product of matrices, as for wide kernels and for smaller images."""
    if max(weight.shape[2:]) > (
        _WIDE_FIRST_KERNEL if is_narrow(image.dtype) and image.shape[1] <= _FEW else _WIDE_KERNEL
    ):
        return True
    spread = max(dilation) > 1 and image.shape[2] > 1
    known = image.dtype is torch.float32 or spread or _has_odd_groups(weight, groups)
    return known and _is_smaller_than_kernel(image, weight, dilation)


def _is_smaller_than_kernel(image: Tensor, weight: Tensor, dilation: Sequence[int]) -> bool:
    reach = [1 + (size - 1) * apart for size, apart in zip(weight.shape[2:], dilation, strict=True)]
    return any(side < wide for side, wide in zip(image.shape[2:], reach, strict=True))


def _has_odd_groups(weight: Tensor, groups: int) -> bool:
    """Return whether the channels of a group do not fill a block, for which oneDNN has no separate kernel."""
    each = weight.shape[0] // groups, weight.shape[1]
    return groups > 1 and max(each) > 1 and any(channels % _BLOCK for channels in each)


def _compute_column_bytes(weight: Tensor, result: Tensor) -> int:
    """Return the bytes of the columns that each thread makes of one slice of an image."""
    row = math.prod(weight.shape[1:]) * math.prod(result.shape[-2:])
    return int(row * weight.element_size() * torch.get_num_threads())


def _compute_emulated_copies(gradient: Tensor, image: Tensor, weight: Tensor) -> int:
    """Return the bytes of blocked copies, and of the samples that each thread transposes for bf16."""
    kernel = max(weight.shape[2:])
    first_layer = image.shape[1] <= _FEW and kernel > 1
    copies = _compute_blocked_bytes(gradient) + (0 if first_layer else _compute_blocked_bytes(image))
    if weight.shape[1] == 1 or (kernel == 1 and image.shape[2] > 1):
        return copies
    samples = max(image.shape[0], 1)
    return copies + copies // samples * min(samples, torch.get_num_threads())


def _compute_layout_copies(*given: Tensor) -> int:
    """Return the bytes of layout copies: torch makes all channels_last if one of them is, else contiguous."""
    layout = (
        _select_channels_last(given[0]) if any(_is_channels_last(t) for t in given[-2:]) else torch.contiguous_format
    )
    return sum(tensor.nbytes for tensor in given if not tensor.is_contiguous(memory_format=layout))


def _is_copied_twice(weight: Tensor, spread: bool) -> bool:
    """Return whether the result is copied again: kernels for narrow or strided data return another layout."""
    one_by_one = weight.shape[1] == 1  # depthwise
    return (is_narrow(weight.dtype) or spread) and not one_by_one and not _is_emulated(weight)


def _is_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=_select_channels_last(tensor))


def _select_channels_last(tensor: Tensor) -> torch.memory_format:
    """Return the channels_last layout for the tensor's number of dimensions."""
    return torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last


def _compute_blocked_image(image: Tensor) -> int:
    return (
        0
        if image.shape[1] <= _FEW and (not is_narrow(image.dtype) or _is_emulated(image))
        else _compute_blocked_bytes(image)
    )


def _compute_blocked_bytes(image: Tensor) -> int:
    channels = image.shape[1]
    return image.nbytes // max(channels, 1) * _round_up_channels(channels)


def _compute_blocked_weight(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    if into <= _FEW:  # the weight of an image's layer, or depthwise
        return weight.nbytes
    return weight.nbytes // max(out * into, 1) * _round_up_channels(out) * _round_up_channels(into)


def _is_large_depthwise(weight: Tensor) -> bool:
    """Return whether a depthwise kernel is large; its gradient needs no blocked images."""
    return weight.shape[1] == 1 and weight.shape[0] > 1 and max(weight.shape[2:]) > _SMALL_KERNEL


def _compute_blocked_groups(weight: Tensor, groups: int) -> int:
    """Return the bytes of a weight gradient for channels_last images: each group is padded to whole blocks.

    Only small depthwise kernels avoid that.
    """
    out, into = weight.shape[0] // groups, weight.shape[1]
    if groups == 1 or (out == into == 1 and not _is_large_depthwise(weight)):
        return _compute_blocked_weight(weight)
    return weight.nbytes // max(out * into, 1) * _round_up_channels(out) * _round_up_channels(into)


def _round_up_channels(channels: int) -> int:
    return math.ceil(channels / _BLOCK) * _BLOCK


# -- covered ----------------------------------------------------------------------------------------------------------
# List the operations whose memory was compared with real runs; a ledger of these alone may be `verified`.


_PRODUCTS = "mm addmm bmm baddbmm dot mv convolution convolution_backward"
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"
)
_NORMALIZATIONS = (
    "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward "
    "native_layer_norm native_layer_norm_backward"
)
_POOLING = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices "
    "max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward"
)
_LOSSES = (
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward "
    "binary_cross_entropy_with_logits"
)
_ONE_BY_ONE = (  # pointwise, but without torch's tag
    "hardsigmoid_backward hardswish hardswish_backward leaky_relu_backward hardtanh_backward elu_backward "
    "softplus_backward native_dropout native_dropout_backward bernoulli"
)
_SUMS = "sum mean amax amin any all"
_COPIES = (
    "_to_copy copy clone cat stack repeat embedding embedding_dense_backward select_backward slice_backward "
    "_unsafe_view unsafe_split as_strided transpose empty empty_like empty_strided new_empty new_empty_strided zeros "
    "zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero arange rand rand_like randn "
    "randn_like scalar_tensor lift_fresh constant_pad_nd detach _local_scalar_dense"
)
_HELD = frozenset(
    " ".join((_PRODUCTS, _ATTENTION, _NORMALIZATIONS, _POOLING, _LOSSES, _ONE_BY_ONE, _SUMS, _COPIES)).split()
)
_IMAGES = 4
"""Dimensions of images and their kernels."""
_UPDATES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_NOTHING = ("prim", "profiler")
"""Namespaces of operations that compute nothing."""


def is_covered(operation: Operation) -> bool:
    """Return whether an operation's memory is known: it is in its results, or `estimate_kernel_workspace` counts it."""
    function = operation.function
    if function.namespace in _NOTHING or function.is_view or torch.Tag.pointwise in function.tags:
        return True
    name = name_operation(operation)
    if name.startswith("convolution") and operation.arguments[1].dim() != _IMAGES:
        return False  # 3-d and 1-d networks were 5 % and 3 % off
    return function.namespace == "aten" and (name.removesuffix("_") in _HELD or name.startswith(_UPDATES))


def name_operation(operation: Operation) -> str:
    """Return torch's name of the operation, without the overload."""
    return str(operation.function.overloadpacket.__name__)


def describe_unverified_operations(found: dict[str, str]) -> str:
    """Return the note about unverified operations, each with the first module that ran it."""
    named = ", ".join(
        name if module == OUTSIDE else f"{name} in {module or 'the model itself'}" for name, module in found.items()
    )
    return f"not verified: the workspace of these was not compared with a real run: {named}"


# -- timeline ---------------------------------------------------------------------------------------------------------


FORWARD, BACKWARD, UPDATE = "the forward", "the backward", "the update"
NEVER = 2**62  # later than any operation
_CAST = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class MemoryBlock:
    """The memory of one tensor and its views."""

    bytes: int
    born: int
    """Number of the operation that allocated it; 0 if it existed before."""
    part: str = "temporary"
    format: str = ""
    module: str = OUTSIDE
    died: int = NEVER
    """Number of the last operation during which it existed."""


@dataclass(frozen=True)
class Moment:
    """The phase and module of one operation."""

    phase: str
    module: str

    def __str__(self) -> str:
        return self.phase if self.module == OUTSIDE else f"{self.phase} of {self.module or 'the model itself'}"


class Timeline:
    """A listener that records all memory in use without keeping any of it alive.

    As in a real run, an operation's results coexist with everything that is freed after it.
    """

    def __init__(self) -> None:
        self.blocks: list[MemoryBlock] = []
        self.moments: list[Moment] = [Moment("the beginning", OUTSIDE)]
        self.phase = FORWARD
        self.saved_for_backward: list[MemoryBlock] = []
        """Blocks that the last forward saved for backward."""
        self.not_covered: dict[str, str] = {}
        """Operations whose memory was never compared with a real run, and the first module that ran each."""
        self._alive: dict[int, MemoryBlock] = {}
        self._watched: dict[int, Any] = {}
        self._phase_began = 0
        self._recomputing: int | None = None
        """The operation before a forward that is repeated in backward."""

    @property
    def now(self) -> int:
        """Return the number of the last operation."""
        return len(self.moments) - 1

    def __call__(self, operation: Operation) -> None:
        if operation.function.namespace == "prim":  # prim.device on a fake tensor: computes nothing
            return
        self._follow_recomputing(operation)
        self.moments.append(Moment(self.phase, operation.module))
        part = "cast copies" if _is_narrow_cast(operation) else "temporary"
        # An in-place sum needs no extra memory while it runs: its result replaces the first operand afterwards.
        born = self.now + is_in_place_sum(operation)
        for tensor in _iterate_strided_tensors(operation.result):
            self._meet(tensor, part, operation.module, born)
        for tensor in _iterate_strided_tensors((operation.arguments, dict(operation.keywords))):
            # Not announced by `hold`, so it existed before: a table in the loss, or a second model.
            self._meet(tensor, "weights" if isinstance(tensor, nn.Parameter) else "buffers", operation.module, born=0)
        if not is_covered(operation):
            self.not_covered.setdefault(name_operation(operation), operation.module)
        hidden = estimate_kernel_workspace(operation)
        if hidden:
            self.blocks.append(MemoryBlock(hidden, self.now, module=operation.module, died=self.now))

    def hold(self, tensors: Iterable[Tensor], part: str) -> None:
        """Record that these tensors exist now and are used for `part`."""
        for tensor in _iterate_strided_tensors(list(tensors)):
            self._meet(tensor, part, OUTSIDE).part = part

    def begin(self, phase: str) -> None:
        """Start a phase. Blocks alive at the end of forward are saved for backward."""
        if self.phase == FORWARD:
            self._keep(since=self._phase_began)
            self.saved_for_backward = [block for block in self._alive.values() if block.part == "activations"]
        self.phase, self._phase_began = phase, self.now

    def _meet(self, tensor: Tensor, part: str, module: str, born: int | None = None) -> MemoryBlock:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._alive.get(key)
        if block is None:
            found = find_format(tensor.dtype)
            format_name = found.name if found else str(tensor.dtype).removeprefix("torch.")
            block = MemoryBlock(storage.nbytes(), self.now if born is None else born, part, format_name, module)
            self.blocks.append(block)
            self._alive[key] = block
            # A weak reference: a strong one would keep the storage alive and hide when it is freed.
            self._watched[key] = weakref.ref(storage, partial(self._forget_storage, key))
        block.bytes = max(block.bytes, storage.nbytes())  # it may have been resized
        return block

    def _forget_storage(self, key: int, _reference: object) -> None:
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


def _is_narrow_cast(operation: Operation) -> bool:
    """Return whether it casts a weight to a narrow format, or anything to fp8, of which layers make copies."""
    if operation.function is not _CAST or not is_narrow(operation.result.dtype):
        return False
    return isinstance(operation.arguments[0], nn.Parameter) or operation.result.dtype.itemsize == 1


def _iterate_strided_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the strided tensors; sparse ones consist of others."""
    for leaf in pytree.tree_leaves(tree):
        if hasattr(leaf, "__tensor_flatten__"):  # an optimizer's state in 8 bits: its codes, scales and table
            yield from _iterate_strided_tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf
