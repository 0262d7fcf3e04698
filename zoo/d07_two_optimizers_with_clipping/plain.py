"""accelerate with two optimizers and one call to clip (fp16 on a CPU: see the README)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome
from zoo.real_accelerate import accelerator_with_fp16

BATCH = torch.ones(2, 4)
APART = 0.1 * 0.5
"""How far each weight should move: the learning rate times its share of a gradient of norm 1."""
TOGETHER = APART / 2**0.5
"""The same where one norm is taken over both networks."""


def make_twins() -> tuple[nn.Linear, nn.Linear]:
    """Equal networks, so that their updates must be equal."""
    first, second = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    for twin in (first, second):
        nn.init.constant_(twin.weight, 0.5)
    return first, second


def run() -> Outcome:
    accelerator = accelerator_with_fp16(1024.0)
    twins = make_twins()
    sgds = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in twins]
    first, second, first_optimizer, second_optimizer = accelerator.prepare(*twins, *sgds)
    accelerator.backward(first(BATCH).square().mean() + second(BATCH).square().mean())
    accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
    first_optimizer.step()
    second_optimizer.step()
    return judge(twins[0].weight, twins[1].weight, right=TOGETHER)


def judge(first: Tensor, second: Tensor, *, right: float) -> Outcome:
    moved = [(0.5 - weight).abs().max().item() for weight in (first, second)]
    return Outcome(
        good=all(abs(distance / right - 1) < 1e-3 for distance in moved),
        seen=f"equal networks, updates {moved[0]:.5f} and {moved[1]:.5f}, "
        f"ratio {moved[0] / moved[1]:.0f}; right: {right:.5f}",
        word="second one unscaled twice",
    )
