"""Which operations' memory has been held against real runs, so that a ledger may say that it is verified."""

from __future__ import annotations

import torch

from halfstep.observe.recorder import OUTSIDE, Operation

_PRODUCTS = "mm addmm bmm baddbmm dot mv convolution convolution_backward"
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"
)
_NORMALISATIONS = (
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
_ONE_BY_ONE = (  # which torch does not tag as such
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
    " ".join((_PRODUCTS, _ATTENTION, _NORMALISATIONS, _POOLING, _LOSSES, _ONE_BY_ONE, _SUMS, _COPIES)).split()
)
_IMAGES = 4
"""Dimensions of images and of their kernels."""
_UPDATES = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_NOTHING = ("prim", "profiler")
"""Operations that compute nothing."""


def is_covered(operation: Operation) -> bool:
    """Whether the memory of such operations is known: all of it is in their results, or kernels.py counts it."""
    function = operation.function
    if function.namespace in _NOTHING or function.is_view or torch.Tag.pointwise in function.tags:
        return True
    name = name_of(operation)
    if name.startswith("convolution") and operation.arguments[1].dim() != _IMAGES:
        return False  # networks of volumes and of signals were 5 % and 3 % off
    return function.namespace == "aten" and (name.removesuffix("_") in _HELD or name.startswith(_UPDATES))


def name_of(operation: Operation) -> str:
    """As torch calls it, without the kinds of its arguments."""
    return str(operation.function.overloadpacket.__name__)


def not_covered(found: dict[str, str]) -> str:
    """A note of what was found, by name, with the first module that ran it."""
    named = ", ".join(
        name if module == OUTSIDE else f"{name} in {module or 'the model itself'}" for name, module in found.items()
    )
    return f"not verified: what these take inside themselves has not been held against a real run: {named}"
