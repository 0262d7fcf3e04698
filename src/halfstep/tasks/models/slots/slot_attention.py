"""Slot attention: slots compete for the places of a frame, and each becomes what it won."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.models.slots.transformer import FeedForward

FARTHEST = 1e30
"""Where a product has left the range of 16 bits it is infinite; this is as certain, and has a difference."""


class FirstSlots(nn.Module):
    """Where the slots of every clip begin: learned, one by one.

    Nothing is drawn, so that evaluations can be compared; and a slot cannot be told from those of other clips by the
    noise it began with, which temporal contrast would reward.
    """

    def __init__(self, slots: int, width: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(slots, width))

    def forward(self, clips: int) -> Tensor:
        """Clips × slots × width."""
        return self.slots.expand(clips, -1, -1)


class SlotAttention(nn.Module):
    """Rounds in which slots ask, places answer to one slot more than to others, and slots move to what answered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ask = nn.Linear(width, width, bias=False)
        self.gate = Gate(width)
        self.mix = FeedForward(width, 2 * width)

    def forward(self, keys: Tensor, values: Tensor, slots: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
        """The slots after so many rounds, and their shares of every place in the last: clips × slots × places.

        `keys` and `values` are clips × places × width.
        """
        slots, likeness = self._round(keys, values, slots)
        for _ in range(rounds - 1):
            slots, likeness = self._round(keys, values, slots)
        return slots, shares_of_slots(likeness)

    def _round(self, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        # Scaled before the product, which is the more likely of the two to leave the range of 16 bits.
        question = self.ask(self.norm(slots)) * slots.shape[-1] ** -0.5
        likeness = question @ keys.transpose(1, 2)
        won = weights_of_places(likeness) @ values
        return self.mix(self.gate(won, slots)), likeness


class Gate(nn.Module):
    """A GRU's step from the slots as they were.

    They stay in fp32, however many rounds and frames they live through; torch's own cell hands them on in 16 bits on
    some devices.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.new = nn.Linear(width, 3 * width)
        self.old = nn.Linear(width, 3 * width)

    def forward(self, update: Tensor, slots: Tensor) -> Tensor:
        return _gated(self.new(update), self.old(slots), slots)


@island
def _gated(new: Tensor, old: Tensor, slots: Tensor) -> Tensor:
    (new_reset, new_keep, new_self), (old_reset, old_keep, old_self) = new.chunk(3, -1), old.chunk(3, -1)
    candidate = (new_self + (new_reset + old_reset).sigmoid() * old_self).tanh()
    return candidate + (new_keep + old_keep).sigmoid() * (slots - candidate)


@island
def shares_of_slots(likeness: Tensor) -> Tensor:
    """How much of each place belongs to each slot; the slots' shares of a place are one in all."""
    return _bounded(likeness).softmax(-2)


@island
def weights_of_places(likeness: Tensor) -> Tensor:
    """How much each place counts for a slot: its share of the place, divided by its shares of all places.

    A softmax over places of the logarithms of the shares is just that, and needs no epsilon: the weights of a slot that
    won nothing still are one in all, where a sum that has become zero would have been divided by.
    """
    return _bounded(likeness).log_softmax(-2).softmax(-1)


def _bounded(likeness: Tensor) -> Tensor:
    """Infinities become numbers; what is not a number stays so, for the step to be refused."""
    return likeness.clamp(-FARTHEST, FARTHEST)
