"""bf16 has no scaler, so nobody checks gradients; one row of an embedding has a NaN in its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, 8)
        self.score = nn.Linear(8, 1)
        nn.init.zeros_(self.users.weight[:1])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        users = self.users(ids)
        # The gradient of a square root at zero is not finite, and user 0 starts at zero.
        return self.score(users).float(), users.square().sum(-1).sqrt()


def loss_of(scores: Tensor, lengths: Tensor) -> Tensor:
    return (scores - 1).square().mean() + 0.01 * lengths.mean()


def run() -> Outcome:
    unclipped, clipped = train(clip=False), train(clip=True)
    return Outcome(good=clipped.good, seen=f"{clipped.seen}; without clipping: {unclipped.seen}", word=clipped.word)


def train(clip: bool) -> Outcome:
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(*model(torch.arange(16)))
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return judge(model, loss.item())


def judge(model: nn.Module, loss: float) -> Outcome:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    lost = weights.isnan().float().mean().item()
    return Outcome(good=lost == 0, seen=f"loss {loss:.2f}, then {lost:.0%} of the weights NaN", word="NaN weights")
