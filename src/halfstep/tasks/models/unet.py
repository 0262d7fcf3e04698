"""The classic U-Net: two convolutions per level, max pooling down, transposed convolutions up, skip connections
across.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """A U-Net for images of any size: odd sizes are rounded up on the way down and cropped on the way up.

    It has `width` channels at the first level and twice as many at each of the `depth` levels below.
    """

    def __init__(self, in_channels: int, out_channels: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _build_double_convolution(before, after)
            for before, after in zip([in_channels, *widths[:-2]], widths[:-1], strict=True)
        )
        self.bottom = _build_double_convolution(widths[-2], widths[-1])
        self.up = nn.ModuleList(UpBlock(2 * across, across) for across in reversed(widths[:-1]))
        self.apply(_initialize_weights)
        # Created after `apply`, to keep torch's default initialization: logits that start out equal take long to
        # separate.
        self.head = nn.Conv2d(width, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits in the size of `x`."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            # ceil_mode keeps even a 1 × 1 image non-empty down to the last level.
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.bottom(x)
        for block in self.up:
            x = block(x, kept.pop())
        out: Tensor = self.head(x)
        return out


class UpBlock(nn.Module):
    """Upsample by two, concatenate the skip connection, and apply two convolutions."""

    def __init__(self, channels: int, across: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(channels, across, 2, stride=2)
        self.mix = _build_double_convolution(2 * across, across)

    def forward(self, x: Tensor, across: Tensor) -> Tensor:
        # Pooling rounded up, so this is at most one row and one column too large.
        # narrow() has a known output size; with a slice, torch.export would need the input size.
        x = self.grow(x).narrow(-2, 0, across.shape[-2]).narrow(-1, 0, across.shape[-1])
        out: Tensor = self.mix(torch.cat([across, x], dim=1))
        return out


def _build_double_convolution(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _initialize_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
