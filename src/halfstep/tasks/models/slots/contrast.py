"""Temporal contrast: a slot is more like itself in the next frame than like any other slot there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.precision.island import island

SHORTEST = 1e-3
"""The length below which a slot has no direction; the gradient of a shorter one is bounded by its inverse."""


@island
def temporal_contrast(slots: Tensor, temperature: float) -> Tensor:
    """Of clips × frames × slots × width: which of all the slots of the next frames, in all clips, is the same one?"""
    clips, frames, each, _ = slots.shape
    if frames < 2:
        return slots.new_zeros(())
    directions = F.normalize(slots, dim=-1, eps=SHORTEST).transpose(0, 1).flatten(1, 2)
    likeness = directions[:-1] @ directions[1:].transpose(1, 2) / temperature
    same = torch.arange(clips * each, device=slots.device).expand(frames - 1, -1)
    return F.cross_entropy(likeness.flatten(0, 1), same.flatten())
