"""A clip as slots, frame after frame, and what can be told from them: the whole model, with either decoder."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.models.slots.broadcast_decoder import BroadcastDecoder
from halfstep.tasks.models.slots.discrete_autoencoder import DiscreteAutoencoder
from halfstep.tasks.models.slots.frame_encoder import FrameEncoder
from halfstep.tasks.models.slots.slot_attention import FirstSlots, SlotAttention
from halfstep.tasks.models.slots.token_decoder import TokenDecoder
from halfstep.tasks.models.slots.transformer import Block

COLDEST = 0.1
COOLING = COLDEST ** (1 / 30_000)
"""What a training batch multiplies the temperature of drawn tokens by: from 1, it takes 30,000 to the coldest."""


class Seen(NamedTuple):
    """What a model makes of a batch of clips."""

    slots: Tensor
    """Clips × frames × slots × width, in fp32."""
    shares: Tensor
    """The share that each slot has of each place: clips × frames × slots × height × width, in any resolution."""
    reconstruction: Tensor
    """The mean squared error of the frames, told again."""
    tokens: Tensor
    """The cross-entropy of the frames' tokens, told from slots; zero for a decoder that has no tokens."""


def slot_model(options: Any, channels: int, size: int, frames: int) -> SlotModel:
    """The model that a recipe's section names, for clips of `frames` frames of `size` pixels, across and down."""
    kinds = {"broadcast": PaintingModel, "autoregressive": TellingModel}
    return kinds[options.decoder](options, channels, size, frames)


class SlotModel(nn.Module, ABC):
    """Looks at all frames at once, and follows slots through them one by one."""

    def __init__(self, options: Any, channels: int, size: int, frames: int) -> None:
        super().__init__()
        width = options.width
        self.iterations, self.places = options.iterations, size // options.encoder_stride
        self.encoder = FrameEncoder(channels, options.encoder_width, width, options.encoder_stride)
        self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False))
        self.first = FirstSlots(options.slots, width)
        self.attention = SlotAttention(width)
        # With clips of one frame it would never learn.
        layers = options.predictor_layers if frames > 1 else 0
        self.predictor = nn.Sequential(*(Block(width, math.gcd(width, options.heads)) for _ in range(layers)))

    def forward(self, clips: Tensor) -> Seen:
        """Of clips × frames × channels × height × width, in -1 to 1."""
        frames = clips.flatten(0, 1)
        slots, shares = self._followed(self.read(self.encoder(frames)).unflatten(0, clips.shape[:2]))
        return self.judged(slots, shares, frames)

    @abstractmethod
    def judged(self, slots: Tensor, shares: Tensor, frames: Tensor) -> Seen:
        """What slots tell of the frames they were found in, which come without a dimension for clips."""

    def _followed(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and their shares of places in each frame; those of a frame begin where the last one's are expected."""
        clips, frames = features.shape[:2]
        slots, found = self.first(clips), []
        for number in range(frames):
            if number:
                slots = self.predictor(slots)
            keys, values = features[:, number].chunk(2, -1)
            slots, shares = self.attention(keys, values, slots, self.iterations + (number == 0))
            found.append((slots, shares.unflatten(-1, (self.places, self.places))))
        every_slot, every_share = zip(*found, strict=True)
        return torch.stack(every_slot, 1), torch.stack(every_share, 1)


class PaintingModel(SlotModel):
    """Slots paint the pixels of their frame, and own those where their paint is on top."""

    def __init__(self, options: Any, channels: int, size: int, frames: int) -> None:
        super().__init__(options, channels, size, frames)
        self.decoder = BroadcastDecoder(options.width, channels, options.decoder_width, options.decoder_layers, size)

    def judged(self, slots: Tensor, shares: Tensor, frames: Tensor) -> Seen:
        painted, on_top = self.decoder(slots.flatten(0, 1))
        reconstruction = squared_error(painted, frames)
        return Seen(slots, on_top.unflatten(0, slots.shape[:2]), reconstruction, torch.zeros_like(reconstruction))


class TellingModel(SlotModel):
    """Slots tell the tokens of their frame, and own the places that they attended to.

    The tokens are those of a discrete autoencoder that learns beside; the slots have no part in its loss, nor it in
    theirs.
    """

    temperature: Tensor

    def __init__(self, options: Any, channels: int, size: int, frames: int) -> None:
        super().__init__(options, channels, size, frames)
        self.autoencoder = DiscreteAutoencoder(
            channels, options.vocabulary, options.decoder_width, options.token_stride
        )
        self.decoder = TokenDecoder(
            options.width,
            options.vocabulary,
            (size // options.token_stride) ** 2,
            width=options.decoder_width,
            layers=options.decoder_layers,
            heads=options.heads,
        )
        self.register_buffer("temperature", torch.ones(()))

    def judged(self, slots: Tensor, shares: Tensor, frames: Tensor) -> Seen:
        if self.training:
            self._cool()
        # A copy: what is computed again in backward must see the temperature of now.
        tokens, again = self.autoencoder(frames, self.temperature.clone())
        tokens = tokens.flatten(1)
        told = self.decoder(slots.flatten(0, 1), tokens)
        return Seen(slots, shares, squared_error(again, frames), surprise(told, tokens))

    def _cool(self) -> None:
        """Tokens become harder as training goes on; a step that is skipped takes this back with the other buffers."""
        self.temperature.mul_(COOLING).clamp_(min=COLDEST)


@island
def squared_error(said: Tensor, frames: Tensor) -> Tensor:
    return F.mse_loss(said, frames)


@island
def surprise(told: Tensor, tokens: Tensor) -> Tensor:
    """Of N × places × vocabulary: in nats a token."""
    return F.cross_entropy(told.flatten(0, 1), tokens.flatten())
