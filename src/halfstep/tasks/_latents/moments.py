"""What an autoencoder says of a latent: its mean, and the logarithm of its variance."""

from __future__ import annotations

from torch import Tensor

LEAST, MOST = -30.0, 20.0
"""Logarithms of variances are held in between, as diffusers holds them."""


def bounded(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and the logarithm of the variance within its bounds; of one sample, or of a batch."""
    mean, spread = moments.chunk(2, dim=-3)
    return mean, spread.clamp(LEAST, MOST)
