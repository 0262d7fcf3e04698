"""Layers of the slot models: initialization, positions, attention and the frame encoder."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.precision.island import island

Layer = TypeVar("Layer", nn.Conv2d, nn.ConvTranspose2d)


@torch.no_grad()
def initialize_kaiming_normal(layer: Layer) -> Layer:
    """Initialize a layer next to a ReLU so that the signal keeps its variance (He), and return it.

    With torch's default each layer loses more than half of the signal: after four, positions dominate the image
    features, slots divide the frame into regions, and training does not recover.
    """
    # The fan-in of one output: the kernel of each input channel; for a strided transposed convolution, only a part of
    # it.
    moved = math.prod(layer.stride) if isinstance(layer, nn.ConvTranspose2d) else 1
    fan_in = layer.in_channels * math.prod(layer.kernel_size) / moved
    layer.weight.normal_(0.0, math.sqrt(2.0 / fan_in))
    if layer.bias is not None:
        layer.bias.zero_()
    return layer


class PositionEmbedding(nn.Module):
    """Adds a linear embedding of the distances to the four borders.

    The model that contains it makes it an island: in 16 bits, positions of a large frame start to coincide.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(4, width)

    def forward(self, features: Tensor) -> Tensor:
        """Add positions to N × channels × height × width."""
        high, wide = features.shape[-2:]
        down, across = (torch.linspace(0.0, 1.0, steps, device=features.device) for steps in (high, wide))
        down, across = down[:, None].expand(high, wide), across.expand(high, wide)
        places: Tensor = self.project(torch.stack([down, 1.0 - down, across, 1.0 - across], dim=-1))
        return features + places.permute(2, 0, 1)


class Attention(nn.Module):
    """Attention from `x` to `context`; with `causal`, only to positions that are not later."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return `x` plus its attention to `context`, or to itself where none is given."""
        normed = self.norm(x)
        query = self._split_heads(self.query(normed))
        key, value = self.key_value(normed if context is None else context).chunk(2, -1)
        attended = F.scaled_dot_product_attention(
            query, self._split_heads(key), self._split_heads(value), is_causal=self.causal
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + out

    def _split_heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """A residual two-layer MLP applied to each position."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out


class TransformerBlock(nn.Module):
    """A transformer block: self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mlp = FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x))
        return out


class DecoderBlock(nn.Module):
    """A transformer decoder block: causal self-attention, cross-attention to the slots, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attention = Attention(width, heads, causal=True)
        self.cross_attention = Attention(width, heads)
        self.mlp = FeedForward(width, 4 * width)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.cross_attention(self.self_attention(x), slots))
        return out


LAYERS = 4
"""Convolutions per frame; the first ones have stride 2."""


class FrameEncoder(nn.Module):
    """Convolutions, positions and an MLP; `stride` pixels per side become one position."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        halvings = stride.bit_length() - 1
        layers: list[nn.Module] = []
        for number in range(LAYERS):
            step = 2 if number < halvings else 1
            convolution = nn.Conv2d(width if number else channels, width, 5, stride=step, padding=2)
            layers += [initialize_kaiming_normal(convolution), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        self.positions = PositionEmbedding(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
        island(self, "positions")

    def forward(self, frames: Tensor) -> Tensor:
        """Return N × positions × out."""
        features = self.positions(self.convolutions(frames))
        out: Tensor = self.mlp(features.flatten(2).transpose(1, 2))
        return out


SMALLEST_GRID = 8
"""Positions per side on which a slot is laid out before upsampling."""


class BroadcastDecoder(nn.Module):
    """Broadcasts a slot to a small grid with positions and upsamples it to the frame."""

    def __init__(self, slot_width: int, channels: int, width: int, layers: int, size: int) -> None:
        super().__init__()
        doublings, self.grid = 0, size
        while doublings < layers and self.grid % 2 == 0 and self.grid // 2 >= SMALLEST_GRID:
            doublings, self.grid = doublings + 1, self.grid // 2
        self.positions = PositionEmbedding(slot_width)
        stack: list[nn.Module] = []
        for number in range(layers):
            before = width if number else slot_width
            if number < doublings:
                # A kernel of 4 with stride 2 covers every output pixel equally often; a kernel of 3 or 5 would not.
                stack += [
                    _symmetrize_kernels(
                        initialize_kaiming_normal(nn.ConvTranspose2d(before, width, 4, stride=2, padding=1))
                    ),
                    nn.ReLU(),
                ]
            else:
                stack += [initialize_kaiming_normal(nn.Conv2d(before, width, 5, padding=2)), nn.ReLU()]
        self.convolutions = nn.Sequential(
            *stack, initialize_kaiming_normal(nn.Conv2d(width, channels + 1, 3, padding=1))
        )
        island(self, "positions")

    def forward(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames, and the share of each slot in every pixel (N × slots × height × width)."""
        laid_out = slots.flatten(0, 1)[..., None, None].expand(-1, -1, self.grid, self.grid)
        decoded = self.convolutions(self.positions(laid_out))
        return blend_slots(decoded.unflatten(0, slots.shape[:2]))


@island
def blend_slots(decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Blend N × slots × (colors and opacity) × height × width: return the frames and the share of each slot."""
    colors, opacity = decoded[:, :, :-1], decoded[:, :, -1:]
    shares = opacity.softmax(1)
    return (colors * shares).sum(1), shares.squeeze(2)


def _symmetrize_kernels(layer: nn.ConvTranspose2d) -> nn.ConvTranspose2d:
    """Initialize symmetric kernels: asymmetric ones would leave a checkerboard pattern in every frame."""
    with torch.no_grad():
        kernel = layer.weight
        mirrored = [kernel.flip(axes) for axes in ((), (-1,), (-2,), (-1, -2))]
        layer.weight.copy_(
            torch.stack(mirrored).sum(0) / 2.0
        )  # half the sum of four independent kernels keeps their variance
    return layer


class TokenDecoder(nn.Module):
    """Predicts each of `places` tokens from the slots and the tokens before it."""

    def __init__(self, slot_width: int, vocabulary: int, places: int, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.project_slots = nn.Sequential(nn.LayerNorm(slot_width), nn.Linear(slot_width, width))
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.start_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embedding = nn.Parameter(torch.zeros(places, width))
        for embedding in (self.token_embedding.weight, self.start_token, self.position_embedding):
            # The usual standard deviation in transformers; torch's default for embeddings is 1.
            nn.init.normal_(embedding, std=0.02)
        self.layers = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """Return logits, N × places × vocabulary."""
        projected = self.project_slots(slots)
        # The last token is only predicted, never an input.
        start = self.start_token.expand(len(tokens), -1, -1)
        x = torch.cat([start, self.token_embedding(tokens[:, :-1])], dim=1) + self.position_embedding
        for layer in self.layers:
            x = layer(x, projected)
        out: Tensor = self.head(self.norm(x))
        return out


SMALLEST = 1e-30
"""A lower bound of the exponential draw: the log of an exact zero would be a token that always wins."""


class DiscreteAutoencoder(nn.Module):
    """An autoencoder in which `stride` pixels per side become one token.

    Its activations hold one number per vocabulary entry, position and frame. Encoder and decoder run in the precision
    of the run; only the draw between them is wider.
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
        """Return the tokens of frames (N × height × width) and the frames decoded from them.

        In training tokens are drawn softly (Gumbel-softmax), to pass gradients; in evaluation the most likely is taken.
        """
        logits = self.encoder(frames)
        if self.training:
            soft = sample_gumbel_softmax(logits, temperature)
            return soft.argmax(1), self.decoder(soft)
        tokens = logits.argmax(1, keepdim=True)
        return tokens.squeeze(1), self.decoder(torch.zeros_like(logits).scatter_(1, tokens, 1.0))


@island
def sample_gumbel_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return a Gumbel-softmax draw over dimension 1; it becomes harder as the temperature falls."""
    # The negative logarithm of an exponential draw is a Gumbel draw.
    gumbel = -torch.empty_like(logits).exponential_().clamp_min(SMALLEST).log()
    return ((logits + gumbel) / temperature).softmax(1)
