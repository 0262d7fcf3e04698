"""Spatial broadcast: each slot paints the whole frame, and says where its paint is on top."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.models.slots.loudness import as_loud
from halfstep.tasks.models.slots.positions import Positions

SMALLEST_GRID = 8
"""Places, across, that a slot is laid out on before it is enlarged."""


class BroadcastDecoder(nn.Module):
    """A slot laid out on a small grid with positions; layers double the grid until it is the frame."""

    def __init__(self, slot_width: int, channels: int, width: int, layers: int, size: int) -> None:
        super().__init__()
        doublings = _doublings(size, layers)
        self.grid = size >> doublings
        self.positions = Positions(slot_width)
        stack: list[nn.Module] = []
        for number in range(layers):
            before = width if number else slot_width
            if number < doublings:
                stack += [_even(as_loud(nn.ConvTranspose2d(before, width, 4, stride=2, padding=1))), nn.ReLU()]
            else:
                stack += [as_loud(nn.Conv2d(before, width, 5, padding=2)), nn.ReLU()]
        self.paint = nn.Sequential(*stack, as_loud(nn.Conv2d(width, channels + 1, 3, padding=1)))
        island(self, "positions")

    def forward(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Frames, and the share that each slot has of every pixel: N × slots × height × width."""
        laid_out = slots.flatten(0, 1)[..., None, None].expand(-1, -1, self.grid, self.grid)
        painted = self.paint(self.positions(laid_out))
        return blended(painted.unflatten(0, slots.shape[:2]))


@island
def blended(painted: Tensor) -> tuple[Tensor, Tensor]:
    """Of N × slots × (colours and opacity) × height × width: the frames that are seen, and who is seen where."""
    colours, opacity = painted[:, :, :-1], painted[:, :, -1:]
    shares = opacity.softmax(1)
    return (colours * shares).sum(1), shares.squeeze(2)


def _doublings(size: int, layers: int) -> int:
    found = 0
    while found < layers and size % 2 == 0 and size // 2 >= SMALLEST_GRID:
        size, found = size // 2, found + 1
    return found


def _even(layer: nn.ConvTranspose2d) -> nn.ConvTranspose2d:
    """Begins with kernels that are their own mirror image: four unlike ones would paint a grid over every frame."""
    with torch.no_grad():
        kernel = layer.weight
        mirrored = [kernel.flip(axes) for axes in ((), (-1,), (-2,), (-1, -2))]
        layer.weight.copy_(torch.stack(mirrored).sum(0) / 2.0)  # of four with one spread: the spread stays
    return layer
