"""A broken shard of data: every loss is NaN for a while, then the data are clean again."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

CLEAN = torch.full((8, 4), 0.1)
BATCHES = [CLEAN * math.nan] * 200 + [CLEAN]


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scales: list[float] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in BATCHES:
            train_step(model, optimizer, scaler, batch)
            scales.append(scaler.get_scale())
    ruined = not model.weight.isfinite().all()
    return Outcome(
        good=not ruined,
        seen=f"scale {scales[-1]} after {scales.index(0.0) + 1} NaN batches; "
        f"weights {'NaN' if ruined else 'finite'} after the next clean one; {len(warned)} warnings",
        word="NaN weights",
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
