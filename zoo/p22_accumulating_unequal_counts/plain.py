"""Gradient accumulation over micro-batches with different numbers of labeled tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

COUNTS = (3, 97)


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(10, 1)


def make_microbatches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(count, 10) for count in COUNTS]


def run() -> Outcome:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    microbatches = make_microbatches()
    for tokens in microbatches:
        loss = (model(tokens) - 1).square().mean() / len(microbatches)
        loss.backward()
    optimizer.step()
    return judge(model)


def judge(model: nn.Linear) -> Outcome:
    """Against one update from all tokens as a single batch."""
    right = make_model()
    start = right.weight.detach().clone()
    (right(torch.cat(make_microbatches())) - 1).square().mean().backward()
    torch.optim.SGD(right.parameters(), lr=0.1).step()
    error = ((model.weight - right.weight).norm() / (start - right.weight).norm()).item()
    return Outcome(
        good=error < 1e-4, seen=f"{COUNTS[0]} + {COUNTS[1]} tokens: update off by {error:.0%} from that of one batch"
    )
