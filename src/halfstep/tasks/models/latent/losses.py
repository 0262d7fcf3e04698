"""What the autoencoder and the denoiser are judged by, in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.island import island
from halfstep.tasks._latents.moments import bounded


@island
def reconstruction(said: Tensor, image: Tensor) -> Tensor:
    """The mean squared error of a pixel."""
    return F.mse_loss(said, image)


@island
def divergence(moments: Tensor, image: Tensor) -> Tensor:
    """How far latents are from a normal distribution: KL, summed over a latent and divided by its image's numbers.

    Both parts of an autoencoder's loss are then per number of the image, and the weight between them means the same
    for images of every size. It is the mean over the batch.
    """
    mean, spread = bounded(moments)
    return 0.5 * (mean.square() + spread.exp() - 1.0 - spread).sum() / image.numel()


@island
def squared_errors(said: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample."""
    return (said - target).square().flatten(1).mean(1)
