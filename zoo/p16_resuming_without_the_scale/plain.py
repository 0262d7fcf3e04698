"""A checkpoint of model and optimizer, as most scripts write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def run() -> Outcome:
    first = Run()
    first.train(40)
    checkpoint = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}
    second = Run()
    second.model.load_state_dict(checkpoint["model"])
    second.optimizer.load_state_dict(checkpoint["optimizer"])
    wasted = second.train(40)
    return Outcome(
        good=wasted == 0,
        seen=f"scale {first.scaler.get_scale():g} when saved, {wasted} of the first 40 steps after resuming skipped",
    )


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(16, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.scaler = torch.amp.GradScaler("cpu")

    def train(self, steps: int) -> int:
        skipped = 0
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(self.model, torch.randn(8, 16))
            scale = self.scaler.get_scale()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped += self.scaler.get_scale() < scale
        return skipped


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(30 * x).float().square().mean()
