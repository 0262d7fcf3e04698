"""Layers of bitsandbytes on fake tensors: the bytes that they store, and a product that dequantizes for each use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_INT8, _FOUR_BITS = "Int8Params", "Params4bit"


def iterate_quantized_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose weight is one of bitsandbytes."""
    for module in model.modules():
        if type(dict(module.named_parameters(recurse=False)).get("weight")).__name__ in (_INT8, _FOUR_BITS):
            yield module


class FakeQuantizedLayer(nn.Module):
    """A layer with a quantized weight and its scales, without numbers."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any, mode: FakeTensorMode) -> None:
        super().__init__()
        weight = layer.weight
        self.four_bits = type(weight).__name__ == _FOUR_BITS
        self.size = torch.Size([layer.out_features, layer.in_features])
        self.computes = layer.compute_dtype if self.four_bits else None
        scales = weight.quant_state.absmax if self.four_bits else weight.SCB
        if scales is None:  # moved there by the first product
            scales = layer.state.SCB
        parts = {"weight": weight.data, "scales": scales, "bias": layer.bias}
        for name, tensor in parts.items():
            fake = None if tensor is None else nn.Parameter(mode.from_tensor(tensor.detach()), requires_grad=False)
            self.register_parameter(name, fake)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        given = x.dtype
        found: Tensor = _DequantizedProduct.apply(x.to(self.computes or given), self)
        return found.to(given)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as it is computed with."""
        return self.weight.new_empty(self.size, dtype=dtype)


class _DequantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FakeQuantizedLayer) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        ctx.kept = None if layer.four_bits else x  # by the int8 product, although nothing needs it
        return F.linear(x, layer.dequantized(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradients[0].to(ctx.dtype), ctx.layer.dequantized(ctx.dtype)), None
