"""Losses that are not finite by themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def large_squares(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    error = out + 400
    return error.square().mean().float()  # large squares


def empty_mean(model: nn.Module, batch: Batch) -> Tensor:
    error = (model(batch[0]) - batch[1]).square()
    nobody = torch.zeros(len(error), dtype=torch.bool)
    return error.mean() + error[nobody].mean()  # empty mean


def count_of_nothing(model: nn.Module, batch: Batch) -> Tensor:
    error = (model(batch[0]) - batch[1]).square()
    nobody = torch.zeros_like(error)
    return (error * nobody).sum() / nobody.sum()  # count of nothing


def log_of_chance(model: nn.Module, batch: Batch) -> Tensor:
    """A class that a model gives no chance at all: 0 exactly in every format."""
    out = model(batch[0])
    chance = (out * 0 - torch.tensor([0.0, 0.0, 0.0, 1e4])).float().softmax(-1)
    return out.float().mean() - chance.log().mean()  # log of chance


def hidden_target(model: nn.Module, batch: Batch) -> Tensor:
    """The right class is one that a mask forbids."""
    forbidden = torch.tensor([False, True, False, False])
    logits = model(batch[0]).masked_fill(forbidden, -torch.inf)
    return F.cross_entropy(logits, torch.ones(len(logits), dtype=torch.int64))  # hidden target


def all_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """A row of which a mask leaves nothing."""
    scores = model(batch[0]).float()
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    hidden[2] = True
    return scores.masked_fill(hidden, -torch.inf).logsumexp(-1).mean()  # all hidden


def spread_of_a_sample(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0])[:1].float().std(0, correction=1).mean()  # spread of a sample
