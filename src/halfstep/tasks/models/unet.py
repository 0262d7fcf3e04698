"""The classic U-Net: two convolutions a level, down by pooling, up by transposed convolution, joined across."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """Any image size: a level of odd size is rounded up on the way down and cut back on the way up.

    `width` channels at the first level, twice as many at each of the `depth` levels below it.
    """

    def __init__(self, in_channels: int, out_channels: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(before, after) for before, after in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = _double(widths[-2], widths[-1])
        self.up = nn.ModuleList(Up(2 * across, across) for across in reversed(widths[:-1]))
        self.apply(_initialise)
        # Keeps torch's own beginning: classes that start out alike take long to part.
        self.head = nn.Conv2d(width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            # Rounding up keeps an image of one pixel alive down to the last level.
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.bottom(x)
        for block in self.up:
            x = block(x, kept.pop())
        out: Tensor = self.head(x)
        return out


class Up(nn.Module):
    """Twice the size, beside what the way down kept of that size, and two convolutions over both."""

    def __init__(self, channels: int, across: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(channels, across, 2, stride=2)
        self.mix = _double(2 * across, across)

    def forward(self, x: Tensor, across: Tensor) -> Tensor:
        # The way down rounded up, so this is at most one row and one column too large.
        x = self.grow(x)[..., : across.shape[-2], : across.shape[-1]]
        out: Tensor = self.mix(torch.cat([across, x], dim=1))
        return out


def _double(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
