"""LoRA on a bf16 base with `modules_to_save`: peft widens the adapters and leaves the saved layer in bf16."""

from __future__ import annotations

from typing import Any

import torch

from zoo.outcome import Outcome
from zoo.small_llama import ROWS, next_token, small_llama, with_lora

RATE, UPDATES = 1e-5, 20


def model_to_tune() -> Any:
    return with_lora(small_llama(torch.bfloat16), modules_to_save=["lm_head"])


def head_of(model: Any) -> Any:
    return model.base_model.model.lm_head.modules_to_save["default"].weight


def moved(before: Any, after: Any) -> float:
    return float((after != before).float().mean())


def run() -> Outcome:
    model = model_to_tune()
    head = head_of(model)
    before = head.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token(model, ROWS)
        loss.backward()
        optimizer.step()
    share = moved(before, head.detach())
    return Outcome(
        good=share > 0.9,
        seen=f"{share:.0%} of the head's weights moved in {UPDATES} updates",
        word="weights stand still",
    )
