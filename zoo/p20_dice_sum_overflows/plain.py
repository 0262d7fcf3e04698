"""A segmentation model and the usual Dice loss, computed after the autocast block on fp16 logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

SIDE = 512


def dice_loss(logits: Tensor, mask: Tensor) -> Tensor:
    probability = logits.sigmoid()
    overlap = (probability * mask).sum()
    return 1 - 2 * overlap / (probability.sum() + mask.sum())


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    pixels = torch.rand(SIDE * SIDE, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(pixels)
    loss = dice_loss(logits, torch.ones_like(logits))
    narrow = logits.sigmoid().sum()
    wide = logits.float().sigmoid().sum()
    return Outcome(
        good=bool(loss.isfinite()),
        seen=f"sum over {SIDE} x {SIDE} pixels {narrow.item()} in fp16, whose largest number is "
        f"{torch.finfo(torch.float16).max:.0f}, {wide.item():.0f} in fp32; loss {loss.item()}",
    )
