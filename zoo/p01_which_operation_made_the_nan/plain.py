"""A residual block that overflows between two modules, looked for with hooks on every module, as most tools do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.tensor(40000.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.gain  # the culprit: no module of its own


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(), nn.LayerNorm(16), nn.Linear(16, 1))


def batch() -> Tensor:
    return 8 * torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def run() -> Outcome:
    net, blamed = model(), []

    def look(name: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            if not out.isfinite().all():
                blamed.append(name)

        return hook

    for name, module in net.named_modules():
        module.register_forward_hook(look(name))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(batch()).float().square().mean()
    return Outcome(
        good=bool(loss.isfinite()),
        seen=f"loss {loss.item()}; the first module with a bad output is {blamed[0]!r}, which holds several; "
        "neither the operation nor its line is known, nor whether precision is to blame",
    )
