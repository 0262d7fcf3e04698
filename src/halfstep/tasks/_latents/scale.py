"""The number that latents are multiplied by, so that their standard deviation is 1: measured, not assumed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from halfstep.errors import BadData
from halfstep.tasks._latents.everyone import from_everyone
from halfstep.tasks._latents.moments import bounded

SMALLEST = 1e-6
"""A standard deviation below this is none; what LEAST leaves of a variance is below it."""

FAR = 4.0
"""Times more or less than 1 that a standard deviation may be where data is not what a scale was published for."""
ENOUGH = 32
"""Samples, on each process, that show whether it is: encoding them may take long where nothing is kept."""


def measured_scale(moments: Iterable[Tensor]) -> float:
    """1 ÷ the standard deviation of the latents whose moments these are, over all processes; the same on each."""
    count, deviation = _spread(moments)
    if not SMALLEST < deviation < math.inf:
        raise BadData(
            f"the standard deviation of {count:,.0f} numbers of latents is {deviation:g}",
            allowed="latents that are finite, and not all alike",
            do="look at the autoencoder's reconstructions, and train it again with a smaller loss.kl",
        )
    return 1.0 / deviation


def doubts(scale: float, moments: Iterable[Tensor]) -> list[str]:
    """A line about a scale that came with an autoencoder and does not fit its latents.

    diffusers writes one into every folder: where nobody gave it, that of another autoencoder. Of latents that are not
    finite nothing is said: with no need to measure them a run begins, and its guard finds out where they come from.
    """
    deviation = scale * _spread(islice(moments, ENOUGH))[1]
    if not math.isfinite(deviation) or 1.0 / FAR <= deviation <= FAR:
        return []
    return [
        f"the autoencoder's own scaling_factor {scale:.4g} gives its latents a standard deviation of {deviation:.2g}, "
        "where denoisers want 1: take it out of its config.json, and it is measured"
    ]


def _spread(moments: Iterable[Tensor]) -> tuple[float, float]:
    """How many numbers, and their standard deviation, NaN where there is none; over all processes, in float64.

    The variance of latents drawn around a mean is that of the means and, on average, their own.
    """
    sums = from_everyone(lambda: _sums(moments))
    count, total, squares, own = (math.fsum(column) for column in zip(*sums, strict=True))
    variance = (squares / count - (total / count) ** 2 + own / count) if count else math.nan
    return count, math.sqrt(variance) if variance >= 0 else math.nan


def _sums(moments: Iterable[Tensor]) -> list[float]:
    """How many numbers; of their means the sum and the sum of squares; and the sum of their own variances."""
    sums = torch.zeros(4, dtype=torch.float64)
    for one in moments:
        mean, logarithm = bounded(one.detach().cpu().to(torch.float64))
        own = logarithm.exp()
        number = torch.tensor(mean.numel(), dtype=torch.float64)
        sums += torch.stack([number, mean.sum(), mean.square().sum(), own.sum()])
    found: list[float] = sums.tolist()
    return found
