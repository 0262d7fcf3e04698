"""Every linear layer is converted to fp8, the head too, and the logits are a few percent off."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

LARGEST = 448.0
"""The largest number of e4m3."""
NEAR = 0.01
"""The distance of the head's logits, from those of the same inputs in fp32, that bf16 keeps by far."""


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64), "head": nn.Linear(64, 256)})


def in_fp8(tensor: Tensor) -> Tensor:
    scale = LARGEST / tensor.abs().amax()
    return (tensor * scale).to(torch.float8_e4m3fn).float() / scale


@torch.no_grad()
def logits_off(net: nn.ModuleDict, converted: Collection[str]) -> float:
    """Return how far the logits are from exact ones of the same inputs, by their norm."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for path in ("up", "down", "head"):
        layer, exact = net[path], net[path](x)
        narrow = in_fp8 if path in converted else lambda tensor: tensor.bfloat16().float()
        x, given = nn.functional.linear(narrow(x), narrow(layer.weight), layer.bias), exact
    return float((x - given).norm() / given.norm())


def run() -> Outcome:
    net = model()
    converted = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
    off = logits_off(net, converted)
    seen = f"converted: {', '.join(converted)}; the logits are {off:.1%} off"
    return Outcome(good=off < NEAR, seen=seen, word="head in fp8")
