"""The slot model: slot attention over the frames of a clip, with either decoder, and the temporal contrast loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.models.slots.backbone import BackboneEncoder
from halfstep.tasks.models.slots.layers import (
    BroadcastDecoder,
    DiscreteAutoencoder,
    FeedForward,
    FrameEncoder,
    TokenDecoder,
    TransformerBlock,
)

FARTHEST = 1e30
"""A finite stand-in for logits that overflowed in 16 bits: as certain as infinity, but differences remain defined."""


class FirstSlots(nn.Module):
    """The learned initial slots of every clip.

    They are not drawn at random: evaluations stay comparable, and slots cannot be identified across clips by their
    initial noise, which temporal contrast would reward.
    """

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(slots, width))

    def forward(self, clips: int) -> Tensor:
        """Return clips × slots × width."""
        return self.slots.expand(clips, -1, -1)


class SlotAttention(nn.Module):
    """Iterative attention in which slots compete for positions and are updated from those they won."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.gate = Gate(width)
        self.mlp = FeedForward(width, 2 * width)

    def forward(self, keys: Tensor, values: Tensor, slots: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """Return the slots after `rounds` and their shares of every position in the last one (clips × slots × places).

        `keys` and `values` are clips × places × width.
        """
        slots, logits = self._round(keys, values, slots)
        for _ in range(rounds - 1):
            slots, logits = self._round(keys, values, slots)
        return slots, compute_slot_shares(logits)

    def _round(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        # Scale before the product: the product is what overflows in fp16.
        query = self.query(self.norm(slots)) * slots.shape[-1] ** -0.5
        logits = query @ keys.transpose(1, 2)
        update = compute_place_weights(logits) @ values
        return self.mlp(self.gate(update, slots)), logits


class Gate(nn.Module):
    """A GRU update of the slots.

    Slots stay in fp32 over all rounds and frames; torch's GRUCell returns them in 16 bits on some devices.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.new = nn.Linear(width, 3 * width)
        self.old = nn.Linear(width, 3 * width)

    def forward(self, update: Tensor, slots: Tensor) -> Tensor:
        """Return the slots, moved towards `update`."""
        return _apply_gate_update(self.new(update), self.old(slots), slots)


@island
def _apply_gate_update(new: Tensor, old: Tensor, slots: Tensor) -> Tensor:
    (new_reset, new_keep, new_self), (old_reset, old_keep, old_self) = new.chunk(3, -1), old.chunk(3, -1)
    candidate = (new_self + (new_reset + old_reset).sigmoid() * old_self).tanh()
    return candidate + (new_keep + old_keep).sigmoid() * (slots - candidate)


@island
def compute_slot_shares(logits: Tensor) -> Tensor:
    """Return how much of each position belongs to each slot; the shares of a position sum to one."""
    return _clamp_infinities(logits).softmax(-2)


@island
def compute_place_weights(logits: Tensor) -> Tensor:
    """Return the weight of each position for a slot: its share, normalized over all positions.

    A softmax over positions of the log shares computes this without an epsilon: the weights of a slot that won nothing
    still sum to one, where a plain normalization would divide by zero.
    """
    return _clamp_infinities(logits).log_softmax(-2).softmax(-1)


def _clamp_infinities(logits: Tensor) -> Tensor:
    """Clamp infinities to finite numbers; NaN stays NaN, so the step is skipped."""
    return logits.clamp(-FARTHEST, FARTHEST)


COLDEST = 0.1
COOLING = COLDEST ** (1 / 30_000)
"""The factor of the temperature per training batch; from 1 it reaches the minimum after 30,000 batches."""


class SlotOutput(NamedTuple):
    """The output of a slot model for a batch of clips."""

    slots: Tensor
    """Clips × frames × slots × width, in fp32."""
    shares: Tensor
    """The share of each slot in each position: clips × frames × slots × height × width, in any resolution."""
    reconstruction: Tensor
    """The mean squared error of the reconstructed frames."""
    tokens: Tensor
    """The cross-entropy of the frames' tokens; zero for a decoder without tokens."""


def build_slot_model(options: Any, channels: int, size: int, frames: int) -> SlotModel:
    """Return the model that a recipe names, for clips of `frames` frames of `size` × `size` pixels."""
    kinds = {"broadcast": BroadcastModel, "autoregressive": AutoregressiveModel}
    return kinds[options.decoder](options, channels, size, frames)


class SlotModel(nn.Module, ABC):
    """Encodes all frames at once and follows slots through them one by one."""

    def __init__(self, options: Any, channels: int, size: int, frames: int) -> None:
        super().__init__()
        width = options.width
        self.iterations = options.iterations
        self.encoder: FrameEncoder | BackboneEncoder
        if options.backbone == "none":
            self.encoder = FrameEncoder(channels, options.encoder_width, width, options.encoder_stride)
            self.places = size // options.encoder_stride
        else:
            self.encoder = BackboneEncoder(options.backbone, options.backbone_weights, width, size)
            self.places = self.encoder.backbone.places
        self.key_value = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False))
        self.first = FirstSlots(options.slots, width)
        self.attention = SlotAttention(width)
        # With clips of one frame the predictor would have unused parameters.
        layers = options.predictor_layers if frames > 1 else 0
        # The number of heads must divide the width; the recipe is checked for the decoder's width only.
        self.predictor = nn.Sequential(
            *(TransformerBlock(width, math.gcd(width, options.heads)) for _ in range(layers))
        )

    def forward(self, clips: Tensor) -> SlotOutput:
        """Return slots, shares and losses of clips × frames × channels × height × width, in -1..1."""
        frames = clips.flatten(0, 1)
        slots, shares = self._track_slots(self.key_value(self.encoder(frames)).unflatten(0, clips.shape[:2]))
        return self.decode(slots, shares, frames)

    @abstractmethod
    def decode(self, slots: Tensor, shares: Tensor, frames: Tensor) -> SlotOutput:
        """Decode the slots and return the losses; `frames` come without a dimension for clips."""

    def _track_slots(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots and shares of each frame; a frame's slots start from the prediction of the last frame's."""
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


class BroadcastModel(SlotModel):
    """A slot model with a spatial broadcast decoder; a slot owns the pixels where its share is largest."""

    def __init__(self, options: Any, channels: int, size: int, frames: int) -> None:
        super().__init__(options, channels, size, frames)
        self.decoder = BroadcastDecoder(options.width, channels, options.decoder_width, options.decoder_layers, size)

    def decode(self, slots: Tensor, shares: Tensor, frames: Tensor) -> SlotOutput:
        decoded, masks = self.decoder(slots.flatten(0, 1))
        reconstruction = compute_frame_error(decoded, frames)
        return SlotOutput(slots, masks.unflatten(0, slots.shape[:2]), reconstruction, torch.zeros_like(reconstruction))


class AutoregressiveModel(SlotModel):
    """A slot model whose slots predict the tokens of their frame; a slot owns the positions it attended to.

    A discrete autoencoder learns the tokens at the same time; neither loss has gradients in the other's parameters.
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

    def decode(self, slots: Tensor, shares: Tensor, frames: Tensor) -> SlotOutput:
        if self.training:
            self._cool()
        # A copy: activation checkpointing recomputes forward in backward, and must see the same temperature.
        tokens, decoded = self.autoencoder(frames, self.temperature.clone())
        tokens = tokens.flatten(1)
        logits = self.decoder(slots.flatten(0, 1), tokens)
        return SlotOutput(
            slots, shares, compute_frame_error(decoded, frames), compute_token_cross_entropy(logits, tokens)
        )

    def _cool(self) -> None:
        """Lower the temperature; the rollback of a skipped step restores it with the other buffers."""
        self.temperature.mul_(COOLING).clamp_(min=COLDEST)


@island
def compute_frame_error(predicted: Tensor, frames: Tensor) -> Tensor:
    """Return the mean squared error of frames."""
    return F.mse_loss(predicted, frames)


@island
def compute_token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy per token, in nats, of N × places × vocabulary."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


SHORTEST = 1e-3
"""The least norm in the normalization: it bounds the gradient of a shorter slot by its inverse."""


@island
def compute_temporal_contrast(slots: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of finding each slot among all slots of the next frames in all clips.

    `slots` is clips × frames × slots × width.
    """
    clips, frames, each, _ = slots.shape
    # A single frame has no next one to compare with.
    if frames < 2:
        return slots.new_zeros(())
    directions = F.normalize(slots, dim=-1, eps=SHORTEST).transpose(0, 1).flatten(1, 2)
    logits = directions[:-1] @ directions[1:].transpose(1, 2) / temperature
    same = torch.arange(clips * each, device=slots.device).expand(frames - 1, -1)
    return F.cross_entropy(logits.flatten(0, 1), same.flatten())
