"""accelerate is asked for fp16 on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.real_accelerate import fresh_accelerator


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def run() -> Outcome:
    accelerator = fresh_accelerator("fp16")
    model = make_model()
    ran: set[torch.dtype] = set()
    model[0].register_forward_hook(lambda _module, _inputs, out: ran.add(out.dtype))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(8, 16)).square().mean())
    optimizer.step()
    says = accelerator.mixed_precision
    return Outcome(
        good=ran == {torch.float16},
        seen=f"asked for fp16, accelerate says {says}, the layer computed in {', '.join(map(str, ran))}",
        word="fp32, in silence",
    )
