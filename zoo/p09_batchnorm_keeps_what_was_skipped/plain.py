"""A classifier with BatchNorm and one batch that overflows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def make_batches() -> list[Tensor]:
    """The third is beyond what fp16 can hold."""
    return [torch.randn(32, 8) * (1e6 if i == 2 else 1) for i in range(6)]


def run() -> Outcome:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for x in make_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return judge(model, loss.item())


def judge(model: nn.Sequential, last_training_loss: float) -> Outcome:
    weights_finite = all(p.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        validation_loss = model.eval()(torch.randn(32, 8)).square().mean()
    return Outcome(
        good=weights_finite and bool(validation_loss.isfinite()),
        seen=f"last training loss {last_training_loss:.2f}, weights finite: {weights_finite}, "
        f"validation loss {validation_loss.item():.2f}",
        word="NaN in validation",
    )
