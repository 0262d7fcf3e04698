"""How far two maps of classes overlap, as a loss to train with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.island import island


@island
def overlap_loss(logits: Tensor, target: Tensor, ignored: int, dice: float) -> Tensor:
    """Cross-entropy, with a share of `dice` of the Dice loss; pixels that are `ignored` count in neither.

    One logit a pixel means two classes. With nothing to learn from, the loss is 0 and so are its gradients.
    """
    target = target.long()
    valid = target != ignored
    classes = logits.shape[1]
    # An ignored pixel must still be a class that exists, or it cannot be looked up.
    target = torch.where(valid, target, 0)
    if classes == 1:
        there = target.unsqueeze(1) == 1
        error = F.binary_cross_entropy_with_logits(logits, there.to(logits.dtype), reduction="none").squeeze(1)
        chances = logits.sigmoid()
    else:
        there = target.unsqueeze(1) == torch.arange(classes, device=target.device).view(1, -1, 1, 1)
        error = F.cross_entropy(logits, target, reduction="none")
        chances = logits.softmax(1)
    entropy = torch.where(valid, error, 0.0).sum() / valid.sum().clamp(min=1)
    keep = valid.unsqueeze(1)
    return (1.0 - dice) * entropy + dice * _dice(torch.where(keep, chances, 0.0), there & keep)


def _dice(chances: Tensor, there: Tensor) -> Tensor:
    """1 - Dice over the whole batch, averaged over the classes that are in it; the others are cross-entropy's."""
    pixels = (0, 2, 3)
    truth = there.sum(pixels)
    both = torch.where(there, chances, 0.0).sum(pixels)
    # A class that is there has at least one pixel, so the sum below is at least 1 wherever it counts.
    score = 2.0 * both / (chances.sum(pixels) + truth).clamp(min=1.0)
    return torch.where(truth > 0, 1.0 - score, 0.0).sum() / (truth > 0).sum().clamp(min=1)
