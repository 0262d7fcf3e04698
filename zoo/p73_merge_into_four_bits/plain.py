"""An adapter on a base in nf4, added to the weights and rounded to nf4 again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.outcome import Outcome

WIDTH, RANK, BLOCK = 256, 4, 64
NEGATIVE = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911)
POSITIVE = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
LEVELS = torch.tensor([*NEGATIVE, 0.0, *POSITIVE])


def to_nf4(weight: Tensor) -> Tensor:
    """Round to the sixteen levels of nf4, with a scale for each block."""
    blocks = weight.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scale).unsqueeze(-1).sub(LEVELS).abs().argmin(-1)
    return (LEVELS[nearest] * scale).reshape(weight.shape)


def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the base in nf4, the adapter's product, and inputs with the outputs that it was trained for."""
    draw = torch.Generator().manual_seed(0)
    base = to_nf4(torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5)
    first, second = torch.randn(WIDTH, RANK, generator=draw), torch.randn(RANK, WIDTH, generator=draw)
    adapter = 0.003 * first @ second / RANK**0.5
    inputs = torch.randn(64, WIDTH, generator=draw)
    return base, adapter, inputs, inputs @ (base + adapter).T


def kept(merged: Tensor) -> float:
    """Return the share of the adapter's gain that merged weights keep."""
    base, _, inputs, outputs = parts()
    worst, found = (float(F.mse_loss(inputs @ weight.T, outputs)) for weight in (base, merged))
    return 1.0 - found / worst


def run() -> Outcome:
    base, adapter, _, _ = parts()
    share = kept(to_nf4(base + adapter))
    return Outcome(
        good=share > 0.9, seen=f"merged into nf4, {share:.0%} of the adapter's gain is left", word="gain lost"
    )
