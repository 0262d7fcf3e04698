"""What fake tensors do not show of a run on a CPU: what kernels take inside themselves, and sums made in place."""

from __future__ import annotations

import math
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


_MANY, _SMALL = 16, 20480
"""Images for which a kernel of one pixel is worth oneDNN's while on one thread, and elements that never are."""


def hidden_bytes(operation: Operation) -> int:
    """The most that an operation's kernel has at one moment beside its arguments and its results."""
    if operation.function is _FORWARD and _by_onednn(*operation.arguments):
        return _convolution(operation)
    if operation.function is _BACKWARD and _by_onednn(*operation.arguments[1:]):
        return _convolution_backward(operation)
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


def _convolution(operation: Operation) -> int:
    """Everything is copied into blocks of channels, and the result back; images laid out by channels stay as they are.

    The weight is put into blocks in any layout.
    """
    image, weight, _, stride, _, _, transposed = operation.arguments[:7]
    result: Tensor = operation.result
    if _by_channels(image) or _by_channels(weight):
        return _weight_in_blocks(weight)
    out = _in_blocks(result)
    again = result.nbytes if _copied_twice(weight, max(stride) > 1 and transposed) else 0
    return max(_image_in_blocks(image) + _weight_in_blocks(weight) + out - result.nbytes, out + again)


def _convolution_backward(operation: Operation) -> int:
    """First the image's gradient, then the weight's: the second one is made while the first is there already."""
    gradient, image, weight, _, stride, _, _, transposed = operation.arguments[:8]
    for_image, for_weight = operation.arguments[10][:2]
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
        sums = weight.numel() * FP32.bytes if is_narrow(weight.dtype) else 0
        copies = 0 if laid_out else _in_blocks(gradient) + _image_in_blocks(image)
        moments += [copies + blocks - weight.nbytes + sums, blocks + weight.nbytes if laid_out else blocks]
    return int(max(moments))


def _copied_twice(weight: Tensor, spread: bool) -> bool:
    """Kernels for narrow numbers, and for pixels that are spread apart, give another layout than they are asked for."""
    one_by_one = weight.shape[1] == 1  # a group for each channel
    return (is_narrow(weight.dtype) or spread) and not one_by_one


def _by_channels(tensor: Tensor) -> bool:
    layout = torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last
    return tensor.dim() in (4, 5) and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


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


def _filled(channels: int) -> int:
    return math.ceil(channels / _BLOCK) * _BLOCK
