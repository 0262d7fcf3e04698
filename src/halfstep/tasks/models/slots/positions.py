"""Where each place of a frame lies, added to what is seen there."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """The distances of a place to the four borders, through one layer.

    To be an island of the model that holds it: in 16 bits, places of a large frame begin to share their coordinates.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(4, width)

    def forward(self, features: Tensor) -> Tensor:
        """Of N × channels × height × width."""
        high, wide = features.shape[-2:]
        down, across = (torch.linspace(0.0, 1.0, steps, device=features.device) for steps in (high, wide))
        down, across = down[:, None].expand(high, wide), across.expand(high, wide)
        places: Tensor = self.project(torch.stack([down, 1.0 - down, across, 1.0 - across], dim=-1))
        return features + places.permute(2, 0, 1)
