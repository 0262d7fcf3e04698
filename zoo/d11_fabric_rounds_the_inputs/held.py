"""The same model and batch in bf16: autocast casts what a product is made of, and the batch stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.d11_fabric_rounds_the_inputs.plain import Denoiser, batch, judge
from zoo.outcome import Outcome

BF16 = resolve_precision_name("bf16")
"""The precision itself, not its name: that would become fp32 on a CPU that only emulates bf16."""


def run() -> Outcome:
    torch.manual_seed(0)
    net = Denoiser()
    stepper = halfstep.Stepper(net, torch.optim.SGD(net.parameters(), lr=0.1), precision=BF16)
    stepper.step(loss_fn, batch())
    return judge(net)


def loss_fn(net: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return net(*given).float().square().mean()
