"""diffusers' own EMAModel over a denoiser in bf16."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel
from torch import Tensor

from zoo.outcome import Outcome

DECAY = 0.999
STEPS = 30
MOVED = 1.25


def model() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )


def move(unet: UNet2DModel) -> None:
    """What training does to the weights, made short."""
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.mul_(MOVED)


def way(averages: Iterable[Tensor], first: Iterable[Tensor]) -> float:
    """How far the averages have come from the first weights towards the moved ones: 0 to 1."""
    pairs = [(average.double(), start.double()) for average, start in zip(averages, first, strict=True)]
    gone = sum(((average - start) * start).sum().item() for average, start in pairs)
    return float(gone / sum(start.square().sum().item() for _, start in pairs) / (MOVED - 1))


def run() -> Outcome:
    ways = {dtype: _way_in(dtype) for dtype in (torch.bfloat16, torch.float32)}
    in_bf16, in_fp32 = ways.values()
    return Outcome(
        good=abs(in_bf16 - in_fp32) < 0.1 * in_fp32,
        seen=f"{STEPS} updates, decay {DECAY}: {in_bf16:.1%} of the way in bf16, {in_fp32:.1%} in fp32",
    )


def _way_in(dtype: torch.dtype) -> float:
    unet = model().to(dtype)
    first = [parameter.detach().clone() for parameter in unet.parameters()]
    average = EMAModel(unet.parameters(), decay=DECAY, min_decay=DECAY)
    average.step(unet.parameters())  # its first one copies
    move(unet)
    for _ in range(STEPS):
        average.step(unet.parameters())
    return way(average.shadow_params, first)
