"""Fabric in fp16 with gradient clipping, on data that needs a lower scale than the first (fp16 on a CPU: README)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome
from zoo.real_lightning import fabric_with_fp16, quiet

STEPS = 20


def make_model() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def batch(number: int) -> Tensor:
    return 2 * torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


def run() -> Outcome:
    fabric, applied, ended = fabric_with_fp16(), 0, ""
    with quiet():
        model, optimizer = fabric.setup(*make_model())
        try:
            for number in range(STEPS):
                optimizer.zero_grad()
                fabric.backward(model(batch(number)).square().mean())
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                applied += 1
        except RuntimeError as error:
            ended = str(error).split(". ")[0]
    return Outcome(
        good=not ended,
        seen=f"{applied} of {STEPS} steps, then RuntimeError: {ended}",
        word="an overflow ends it",
    )
