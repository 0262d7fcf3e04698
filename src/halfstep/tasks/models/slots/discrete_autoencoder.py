"""A discrete autoencoder: a frame becomes tokens of a small vocabulary, and a frame again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.precision.island import island

SMALLEST = 1e-30
"""The logarithm of an exact zero would be a token that wins against every other."""


class DiscreteAutoencoder(nn.Module):
    """`stride` pixels, across, become one token.

    What it keeps in memory is a number for each token of the vocabulary at each place of each frame. The layers that
    make and read them run in the precision of the run, and only the draw between them is wider.
    """

    def __init__(self, channels: int, vocabulary: int, width: int, stride: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, stride, stride=stride),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, vocabulary, 1),
        )
        layers: list[nn.Module] = [nn.Conv2d(vocabulary, width, 1), nn.ReLU()]
        for _ in range(stride.bit_length() - 1):
            layers += [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.ReLU()]
        self.decoder = nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, frames: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of frames, N × height × width, and the frames that are read from them.

        In training tokens are drawn, softly, so that a gradient comes through; in evaluation the likeliest is taken.
        """
        likely = self.encoder(frames)
        if self.training:
            soft = drawn(likely, temperature)
            return soft.argmax(1), self.decoder(soft)
        tokens = likely.argmax(1, keepdim=True)
        return tokens.squeeze(1), self.decoder(torch.zeros_like(likely).scatter_(1, tokens, 1.0))


@island
def drawn(likely: Tensor, temperature: Tensor) -> Tensor:
    """A soft choice among the second dimension: likely ones more often, and harder as the temperature falls."""
    gumbel = -torch.empty_like(likely).exponential_().clamp_min(SMALLEST).log()
    return ((likely + gumbel) / temperature).softmax(1)
