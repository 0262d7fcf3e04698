"""Perplexity of each batch, averaged: by batches and not by tokens, and of exponentials."""

from __future__ import annotations

import math

from zoo.outcome import Outcome

BATCHES = ((2.0, 900), (3.0, 900), (6.0, 20))
"""Mean loss and tokens of each batch; the last one is short and hard."""


def right() -> float:
    total, tokens = (sum(values) for values in zip(*((loss * many, many) for loss, many in BATCHES), strict=True))
    return math.exp(total / tokens)


def run() -> Outcome:
    averaged = sum(math.exp(loss) for loss, _ in BATCHES) / len(BATCHES)
    return Outcome(
        good=abs(averaged / right() - 1) < 1e-3,
        seen=f"perplexity {averaged:.1f} in place of {right():.1f}",
        word="wrong figure",
    )
