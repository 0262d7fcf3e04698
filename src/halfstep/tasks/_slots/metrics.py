"""How well slots find the things in a clip: over all its frames at once, so that a slot must stay on its thing."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from halfstep.formats import widest
from halfstep.tasks._counts import counted

THINGS = 256
"""Numbers that a mask of 8 bits can have; 0 is the background."""
UNIT = 2**40
"""Scores are added as whole multiples of 1 / UNIT: to twelve digits, and in any order the same sum."""


class _OverClips(Metric):
    """The mean of a score over the clips that can be judged."""

    full_state_update = False

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        # Named after the class: torchmetrics lets two metrics share a state when its names and first values are equal.
        self._sum, self._count = f"{type(self).__name__}_sum", f"{type(self).__name__}_count"
        for name in (self._sum, self._count):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, said: Tensor, truth: Tensor) -> None:
        """Slot numbers and the numbers of things: clips × frames × height × width, or any clips × …"""
        counts = counted(truth, said, (THINGS, self.slots))
        scores = self._scores(counts.to(widest(counts.device)))
        judged = ~scores.isnan()
        self._add(self._sum, (torch.where(judged, scores, 0.0) * UNIT).round().long().sum())
        self._add(self._count, judged.sum())

    def compute(self) -> Tensor:
        """NaN where there was no clip with anything in it."""
        total, count = (getattr(self, name).cpu().double() for name in (self._sum, self._count))
        mean: Tensor = total / UNIT / count
        return mean

    def _add(self, name: str, more: Tensor) -> None:
        state: Tensor = getattr(self, name)
        setattr(self, name, state + more.to(state.device))

    def _scores(self, counts: Tensor) -> Tensor:
        """A score for each clip, NaN where there is none, from clips × things × slots."""
        raise NotImplementedError


class ForegroundAri(_OverClips):
    """The adjusted Rand index over pixels of things: 1 where they are divided as in truth, about 0 by chance.

    How the background is divided does not count. With one thing in a clip, one slot gives 1 and more give 0.
    """

    def _scores(self, counts: Tensor) -> Tensor:
        things = counts[:, 1:]
        together = _pairs(things).sum((1, 2))
        in_truth, in_slots = _pairs(things.sum(2)).sum(1), _pairs(things.sum(1)).sum(1)
        pixels = things.sum((1, 2))
        by_chance = in_truth * in_slots / _pairs(pixels).clamp(min=1.0)
        most = (in_truth + in_slots) / 2.0
        # Where nothing could be better or worse than chance, both are one group, or all pixels are alone: they agree.
        score = torch.where(most > by_chance, (together - by_chance) / (most - by_chance), 1.0)
        return torch.where(pixels > 0, score, torch.nan)


class BestOverlap(_OverClips):
    """For each thing, the overlap (IoU) with the slot that covers it best; the mean over a clip's things (mBO)."""

    def _scores(self, counts: Tensor) -> Tensor:
        both = counts[:, 1:]
        truth, slots = both.sum(2, keepdim=True), counts.sum(1, keepdim=True)
        best = (both / (truth + slots - both).clamp(min=1.0)).amax(2)
        # A thing that is hidden in every frame has no pixels, and is not there.
        there = truth[..., 0] > 0
        return torch.where(there, best, 0.0).sum(1) / there.sum(1)


def _pairs(count: Tensor) -> Tensor:
    return count * (count - 1.0) / 2.0
