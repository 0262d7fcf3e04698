"""Linear layers that compute in fp8 or mxfp8, by torchao; imported only where one is converted."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, _to_mxfp8_then_scaled_mm
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from halfstep.errors import WrongUse

BLOCK = 32
"""The elements of an mxfp8 block, along every dimension that a product sums over."""
_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-rowwise-gw-hp": "rowwise_with_gw_hp"}


def _cast_as_autocast(input: Tensor) -> Tensor:
    """Return the input in the format of autocast, as a linear layer gets it: torchao only asks for CUDA's."""
    kind = input.device.type
    return input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input


class _DoubleBackwardGuard(torch.autograd.Function):
    """The identity; refuses gradients of gradients, which torchao computes as zeros or not at all."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise WrongUse(
                "create_graph=True, for gradients of gradients, with a layer in fp8",
                allowed="first derivatives of layers in fp8",
                do="leave these layers out by a policy: precision={'default': 'fp8', 'critic': 'bf16'}",
            )
        return gradients[0]


class Float8Layer(Float8Linear):
    """A linear layer in fp8."""

    def forward(self, input: Tensor) -> Tensor:
        given = _cast_as_autocast(input)
        if not given.numel():  # torchao has no scale for it; an expert may get no rows
            return nn.Linear.forward(self, input)
        # Autocast would round the emulation's own products.
        with torch.autocast(given.device.type, enabled=False):
            output: Tensor = super().forward(given)
        checked: Tensor = _DoubleBackwardGuard.apply(output)
        return checked


class Mxfp8Layer(MXFP8Linear):
    """A linear layer in mxfp8; rows are filled up to whole blocks, since the weight's gradient sums over them."""

    def forward(self, input: Tensor) -> Tensor:
        given = _cast_as_autocast(input)
        if not given.numel():
            return nn.Linear.forward(self, input)
        rows = given.reshape(-1, given.shape[-1])
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK)).contiguous()
        weight = self.weight.to(given.dtype).contiguous()
        with torch.autocast(given.device.type, enabled=False):
            output: Tensor = _to_mxfp8_then_scaled_mm(
                filled, weight, self.kernel_preference, self.scale_calculation_mode, False
            )[: len(rows)]
            output = output if self.bias is None else output + self.bias.to(output.dtype)
        checked: Tensor = _DoubleBackwardGuard.apply(output.reshape(*given.shape[:-1], output.shape[-1]))
        return checked


def build_float8_class(kind: str, *, emulate: bool) -> tuple[type[nn.Linear], dict[str, Any]]:
    """Return the class that computes a linear layer in `kind`, and the attributes that it needs."""
    with torch.device("meta"):
        if kind == "mxfp8":
            preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
            made: nn.Linear = Mxfp8Layer(BLOCK, BLOCK, kernel_preference=preference)
        else:
            config = Float8LinearConfig.from_recipe_name(_RECIPES[kind])
            # The weight's gradient sums over the rows of a batch, whose number may be odd.
            made = Float8Layer(1, 1, config=dataclasses.replace(config, emulate=emulate, pad_inner_dim=True))
    own = vars(nn.Linear(1, 1, device="meta"))
    return type(made), {name: value for name, value in vars(made).items() if name not in own}
