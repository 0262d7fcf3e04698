"""What fake tensors do not show of a run on a CPU: what kernels take inside themselves, and sums made in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import FP32, is_narrow
from halfstep.observe.recorder import Operation

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_SUM = torch.ops.aten.add.Tensor
_BLOCK = 16
"""Channels that oneDNN lays side by side; the last block of a tensor is filled up."""
_FEW = 4
"""So few channels of an image oneDNN reads as they are."""


_SMALL_KERNEL = 3
_MANY, _SMALL = 16, 20480
"""Images for which a kernel of one pixel is worth oneDNN's while on one thread, and elements that never are."""


def hidden_bytes(operation: Operation) -> int:
    """The most that an operation's kernel has at one moment beside its arguments and its results."""
    if operation.function is _FORWARD:
        arguments = _in_two_dimensions(operation.arguments, tensors=2)
        return _convolution(arguments, _wide(operation.result)) if _by_onednn(*arguments) else 0
    if operation.function is _BACKWARD:
        arguments = _in_two_dimensions(operation.arguments, tensors=3)
        return _convolution_backward(arguments) if _by_onednn(*arguments[1:]) else 0
    return 0


def sums_in_place(operation: Operation) -> bool:
    """Whether a real backward adds two gradients of one tensor into the memory of the first one.

    torch's engine does so wherever it holds the only reference, which a view is not; never with fake tensors.
    """
    if operation.function is not _SUM or not operation.backward:
        return False
    before, more = operation.arguments
    if not (isinstance(more, Tensor) and before.shape == more.shape and before.device.type == "cpu"):
        return False
    whole: bool = before.untyped_storage().nbytes() == before.nbytes
    return whole and not before._is_view()


def _in_two_dimensions(arguments: Sequence[Any], tensors: int) -> list[Any]:
    """torch runs a convolution over a line as one over an image of height 1. `tensors` come first, then a bias."""
    images, (bias, stride, padding, dilation, transposed, more, *rest) = arguments[:tensors], arguments[tensors:]
    if images[0].dim() != 3:
        return list(arguments)
    lines = [_wide(tensor) for tensor in images]
    return [*lines, bias, [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *more], *rest]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _by_onednn(image: Tensor, weight: Tensor, _bias: Any, stride: Any, _: Any, dilation: Any, *rest: Any) -> bool:
    """torch's own choice of a kernel: small work in fp32 it does by itself."""
    usable = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    if not usable or image.device.type != "cpu" or image.dim() < 4:
        return False
    if image.dtype is torch.bfloat16:
        return True
    # fp16 goes without it in backward; see precision.half_convolutions.
    return image.dtype is torch.float32 and _is_enough(image, weight, max(*stride, *dilation) > 1, groups=rest[2])


def _is_enough(image: Tensor, weight: Tensor, apart: bool, groups: int) -> bool:
    kernel = weight.shape[-2:]
    if not (apart or image.shape[0] >= _MANY or max(kernel) > 1 or torch.get_num_threads() > 1):
        return False
    return groups > 1 or min(kernel) > 3 or image.shape[0] > 1 or image.numel() > _SMALL


def _convolution(arguments: Sequence[Any], result: Tensor) -> int:
    """Everything is copied into blocks of channels, and the result back; images laid out by channels stay as they are.

    The weight is put into blocks in any layout.
    """
    image, weight, _, stride, _, _, transposed = arguments[:7]
    if _by_channels(image) or _by_channels(weight):
        return _laid_out_anew(image, weight) + _weight_in_blocks(weight)
    out = _in_blocks(result)
    again = result.nbytes if _copied_twice(weight, max(stride) > 1 and transposed) else 0
    blocks = _image_in_blocks(image) + _weight_in_blocks(weight)
    return _laid_out_anew(image, weight) + max(blocks + out - result.nbytes, out + again)


def _convolution_backward(arguments: Sequence[Any]) -> int:
    """First the image's gradient, then the weight's: the second one is made while the first is there already."""
    gradient, image, weight, _, stride, _, _, transposed = arguments[:8]
    groups, (for_image, for_weight, _) = arguments[9:11]
    laid_out = _by_channels(image) or _by_channels(weight)
    blocks = _weight_in_blocks(weight)
    results = (image.nbytes if for_image else 0) + (weight.nbytes if for_weight else 0)
    moments = [0]
    if for_image and not laid_out:
        out = _in_blocks(image)
        again = image.nbytes if _copied_twice(weight, max(stride) > 1 and not transposed) else 0
        moments += [_in_blocks(gradient) + blocks + out - results, out + image.nbytes + again - results]
    if for_weight:
        # Products of narrow numbers are summed in fp32; where images are laid out by channels a second copy is made.
        made = _groups_in_blocks(weight, groups) if laid_out else blocks
        sums = max(made, weight.nbytes) // weight.element_size() * FP32.bytes if is_narrow(weight.dtype) else 0
        copied = not (laid_out or _is_large_of_one_channel(weight))
        copies = _in_blocks(gradient) + _image_in_blocks(image) if copied else 0
        moments += [copies + made - weight.nbytes + sums, made + weight.nbytes if laid_out else made]
    return _laid_out_anew(gradient, image, weight) + int(max(moments))


def _laid_out_anew(*given: Tensor) -> int:
    """One tensor that is laid out by channels makes torch copy the others so; otherwise all are made contiguous."""
    layout = _channels_first(given[0]) if any(_by_channels(t) for t in given[-2:]) else torch.contiguous_format
    return sum(tensor.nbytes for tensor in given if not tensor.is_contiguous(memory_format=layout))


def _copied_twice(weight: Tensor, spread: bool) -> bool:
    """Kernels for narrow numbers, and for pixels that are spread apart, give another layout than they are asked for."""
    one_by_one = weight.shape[1] == 1  # a group for each channel
    return (is_narrow(weight.dtype) or spread) and not one_by_one


def _by_channels(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=_channels_first(tensor))


def _channels_first(tensor: Tensor) -> torch.memory_format:
    """The layout with a pixel's channels side by side."""
    return torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last


def _image_in_blocks(image: Tensor) -> int:
    return 0 if image.shape[1] <= _FEW and not is_narrow(image.dtype) else _in_blocks(image)


def _in_blocks(image: Tensor) -> int:
    channels = image.shape[1]
    return image.nbytes // max(channels, 1) * _filled(channels)


def _weight_in_blocks(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    if into <= _FEW:  # of an image, or one group for each channel
        return weight.nbytes
    return weight.nbytes // max(out * into, 1) * _filled(out) * _filled(into)


def _is_large_of_one_channel(weight: Tensor) -> bool:
    """Its gradient is made in another way than that of a small one, whose images are copied into blocks."""
    return weight.shape[1] == 1 and weight.shape[0] > 1 and max(weight.shape[2:]) > _SMALL_KERNEL


def _groups_in_blocks(weight: Tensor, groups: int) -> int:
    """A gradient of a weight for images laid out by channels: each group has blocks of its own, however few it fills.

    Only for small kernels of one channel oneDNN has a way without.
    """
    out, into = weight.shape[0] // groups, weight.shape[1]
    if groups == 1 or (out == into == 1 and not _is_large_of_one_channel(weight)):
        return _weight_in_blocks(weight)
    return weight.nbytes // max(out * into, 1) * _filled(out) * _filled(into)


def _filled(channels: int) -> int:
    return math.ceil(channels / _BLOCK) * _BLOCK
