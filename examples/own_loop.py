"""A training loop of your own, with each update made by halfstep.

    python own_loop.py [precision]

Two moons, a small network, micro-batches, clipping, a schedule and an average; and one batch with a NaN in it, which
plain PyTorch would have written into every weight.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep

Batch = tuple[Tensor, Tensor]


def two_moons(count: int) -> Batch:
    angle = torch.rand(count) * torch.pi
    side = torch.randint(0, 2, (count,))
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(side[:, None] == 0, upper, lower)
    return points + 0.1 * torch.randn_like(points), side


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A sum and a count, so that micro-batches of any size weigh what they should."""
    points, side = batch
    return halfstep.Counted(F.cross_entropy(model(points), side, reduction="sum"), len(side))


def main(precision: str = "auto") -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    ema = halfstep.Ema(model, decay=0.95)
    stepper = halfstep.Stepper(model, optimizer, precision=precision, clip_norm=1.0, schedule=schedule, ema=ema)

    loader = [two_moons(64) for _ in range(200)]
    loader[101][0][7, 1] = float("nan")
    for window in halfstep.windows(loader, 2):
        report = stepper.step(loss_fn, window)
        if not report.applied or report.step % 25 == 0:
            print(report)

    points, side = two_moons(1000)
    model.eval()
    with ema.in_place(), torch.no_grad():
        accuracy = (model(points).argmax(1) == side).float().mean().item()
    print(f"ran in {stepper.observed}")
    print(f"{stepper.counts.applied} updates applied, skipped: {dict(stepper.counts.skipped)}; accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
