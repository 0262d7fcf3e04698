"""Two documents packed into one window, with positions that start again and a mask of ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.outcome import Outcome
from zoo.small_llama import WORDS, small_llama

LENGTH = 8
POSITIONS = torch.arange(LENGTH).repeat(2)[None]


def windows() -> tuple[Tensor, Tensor]:
    """Return two windows with the same second document after different first ones."""
    draw = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(1, WORDS, (3, LENGTH), generator=draw)
    return torch.cat([first, second])[None], torch.cat([other, second])[None]


def influence(logits_of: Any) -> float:
    """Return how far the first document moves the logits of the second."""
    with torch.no_grad():
        one, two = (logits_of(window)[0, LENGTH:] for window in windows())
    return float((one - two).abs().max())


def run() -> Outcome:
    model = small_llama(torch.float32).eval()

    def logits_of(window: Tensor) -> Any:
        return model(input_ids=window, position_ids=POSITIONS, attention_mask=torch.ones_like(window)).logits

    moved = influence(logits_of)
    return Outcome(
        good=moved < 1e-5, seen=f"the first document moves logits of the second by {moved:.2g}", word="documents leak"
    )
