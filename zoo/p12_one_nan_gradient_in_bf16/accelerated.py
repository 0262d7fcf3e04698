"""The same with accelerate in bf16, which it does run on a CPU."""

from __future__ import annotations

import torch

from zoo.outcome import Outcome
from zoo.p12_one_nan_gradient_in_bf16.plain import Recommender, judge, loss_of
from zoo.real_accelerate import fresh_accelerator


def run() -> Outcome:
    accelerator = fresh_accelerator("bf16")
    torch.manual_seed(0)
    recommender = Recommender()
    model, optimizer = accelerator.prepare(recommender, torch.optim.AdamW(recommender.parameters(), lr=1e-2))
    loss = loss_of(*model(torch.arange(16)))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return judge(recommender, loss.item())
