"""Data parallel fp16 with torch's scaler for several ranks, clipping, and a fused optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from zoo.outcome import Outcome
from zoo.two_ranks import run_on_two_ranks

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


class Ended(NamedTuple):
    """What one optimizer came to on one rank."""

    finite: bool
    loss_scale: float = 0.0
    error: str = ""


def run() -> Outcome:
    ranks = run_on_two_ranks(train_each)
    return Outcome(
        good=all(ended.finite and not ended.error for rank in ranks for ended in rank.values()),
        seen="; ".join(f"fused {name}: {describe([rank[name] for rank in ranks])}" for name in OPTIMIZERS),
    )


def train_each(rank: int) -> dict[str, Ended]:
    return {name: train(rank, make_optimizer) for name, make_optimizer in OPTIMIZERS.items()}


def train(rank: int, make_optimizer: Callable[..., torch.optim.Optimizer]) -> Ended:
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters())
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for x in make_batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            return Ended(is_finite(model), error=str(error))
        scaler.update()
    return Ended(is_finite(model), scaler.get_scale())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def make_batches(rank: int) -> list[Tensor]:
    """The second batch of rank 1 overflows; the averaged gradients are then infinite on both ranks."""
    generator = torch.Generator().manual_seed(rank)
    clean, second = (torch.randn(8, 16, generator=generator) for _ in range(2))
    return [clean, second * 1e4 if rank == 1 else second]


def is_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def describe(ranks: list[Ended]) -> str:
    first = ranks[0]
    if first.error:
        return f"RuntimeError in the first step: {first.error}"
    finite = sum(ended.finite for ended in ranks)
    return f"after an overflow, loss scale {first.loss_scale:.0f} of 1024, weights finite on {finite} of 2 ranks"
