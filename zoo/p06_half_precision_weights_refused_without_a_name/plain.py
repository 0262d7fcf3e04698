"""Fine-tuning with a block that was loaded in fp16."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 1).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.adapter(x))


def run() -> Outcome:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    message = "nothing was raised"
    try:
        scaler.unscale_(optimizer)
    except ValueError as error:
        message = f"ValueError: {error}"
    return Outcome(good="decoder" in message, seen=message)
