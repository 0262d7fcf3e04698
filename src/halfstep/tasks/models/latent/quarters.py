"""How well noise is found where there is little of it, and where there is much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

PARTS = 4


class DenoisingByNoise(Metric):
    """The mean squared error in each quarter of the timesteps, `denoising_0` with the least noise.

    A quarter that no sample fell into is left out.
    """

    higher_is_better = False
    full_state_update = False
    errors_in: Tensor
    samples_in: Tensor

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.add_state("errors_in", torch.zeros(PARTS), dist_reduce_fx="sum")
        self.add_state("samples_in", torch.zeros(PARTS), dist_reduce_fx="sum")

    def update(self, errors: Tensor, at: Tensor) -> None:
        """The error of each sample, and its timestep."""
        quarter = (at * PARTS // self.timesteps).clamp(max=PARTS - 1)
        self.errors_in.index_add_(0, quarter, errors.to(self.errors_in.dtype))
        self.samples_in.index_add_(0, quarter, torch.ones_like(errors, dtype=self.samples_in.dtype))

    def compute(self) -> Any:
        means = self.errors_in / self.samples_in.clamp(min=1.0)
        there = self.samples_in.nonzero().flatten().tolist()
        return {f"denoising_{quarter}": means[quarter] for quarter in there}
