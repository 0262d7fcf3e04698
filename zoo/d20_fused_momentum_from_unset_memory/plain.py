"""Fused SGD with momentum, whose very first step is skipped: nothing unusual in fp16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

RUNS = 20


def run() -> Outcome:
    destroyed = sum(not sane(train(seed)) for seed in range(RUNS))
    return Outcome(
        good=destroyed == 0,
        seen=f"one skipped step, then a clean one: weights NaN or huge in {destroyed} of {RUNS} runs",
    )


def train(seed: int) -> Tensor:
    model, optimizer, batch = start(seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x in (batch * 1000, batch):  # the first overflows
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.weight.detach()


def start(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(seed)
    # Memory that was used before: in a real program it holds old activations, here NaN to make them visible.
    used_before = [torch.full((10, 100), torch.nan) for _ in range(50)]
    del used_before
    model = nn.Linear(100, 10)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), torch.randn(8, 100)


def sane(weight: Tensor) -> bool:
    return bool(weight.isfinite().all()) and weight.abs().max().item() < 10
