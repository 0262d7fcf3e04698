"""Floating point work of matrix products and convolutions, and the format it was done in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from halfstep.formats import FP32, format_of, name_of
from halfstep.observe.recorder import Operation
from halfstep.precision.flags import computes_tf32


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_on_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


# torch counts the attention kernels of CUDA, and leaves out those of the CPU.
_FORMULAS = {
    **flop_counter.flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_on_cpu_backward,
}


def flops(operation: Operation) -> int:
    """Multiplications and additions of real numbers in matrix products, convolutions and attention; else 0."""
    formula = _FORMULAS.get(operation.function._overloadpacket)
    if formula is None or not operation.arguments[1].is_floating_point():
        return 0
    keywords = {name: value for name, value in operation.keywords.items() if name != "out"}
    return int(formula(*operation.arguments, **keywords, out_val=operation.result))


def computed_in(operation: Operation) -> str:
    """The name of the format that an operation with `flops` multiplied in."""
    # The second argument is an operand in every one of them; the first may be a bias.
    operand: Tensor = operation.arguments[1]
    if format_of(operand.dtype) is FP32 and computes_tf32(operand.device):
        return "tf32"
    return name_of(operand.dtype)
