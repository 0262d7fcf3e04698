"""A tied head that is cast to fp32 alone, trained, and loaded again by the same config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.small_llama import ROWS, next_token, small_llama


def head_cast_alone() -> Any:
    """Return a bf16 model whose head alone is in fp32, "for stable logits", and trained."""
    model = small_llama(torch.bfloat16, tied=True).requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().float())
    return model


def run() -> Outcome:
    model = head_cast_alone()
    optimizer = torch.optim.AdamW([model.lm_head.weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token(model, ROWS)
        loss.backward()
        optimizer.step()
    again = small_llama(torch.float32, tied=True)
    again.load_state_dict(model.state_dict())
    off = (again.model.embed_tokens.weight - model.model.embed_tokens.weight.float()).abs().max().item()
    return Outcome(good=off < 0.01, seen=f"loaded again, the embedding is {off:.2f} off", word="embedding lost")
