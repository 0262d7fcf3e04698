"""Accumulation over windows of two, with the gradient norm logged at every micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome
from zoo.p10_unscaling_inside_an_accumulation_window.right import WINDOW, microbatches, right_weight, start


def run() -> Outcome:
    message = train(update_each_time=False)[1]
    # The message goes away when update() is called after every micro-batch. The damage stays.
    trained, _ = train(update_each_time=True)
    error = (trained - right_weight()).norm() / (start() - right_weight()).norm()
    return Outcome(
        good=error.item() < 0.01,
        seen=f"{message} With update() each time the weights miss {error.item():.0%} of their way",
    )


def train(update_each_time: bool) -> tuple[Tensor, str]:
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    try:
        for i, (x, y) in enumerate(microbatches()):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x).float(), y) / WINDOW
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if (i + 1) % WINDOW == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
            if update_each_time:
                scaler.update()
    except RuntimeError as error:
        return model.weight.detach(), f"RuntimeError: {error}"
    return model.weight.detach(), ""
