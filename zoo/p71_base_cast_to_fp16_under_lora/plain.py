"""A base that was trained in bf16, cast to fp16 to save memory, with LoRA on it."""

from __future__ import annotations

from typing import Any

import torch

from zoo.outcome import Outcome
from zoo.small_llama import ROWS, next_token, small_llama, trained, with_lora

LARGE = 4000.0
"""One feature is that much larger than the others, as in many models that were trained in bf16."""


def base(dtype: torch.dtype) -> Any:
    model = small_llama(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] *= LARGE**2
    return model.to(dtype)


def run() -> Outcome:
    model = with_lora(base(torch.float16))
    optimizer = torch.optim.AdamW(trained(model), lr=1e-3)
    loss = next_token(model, ROWS)
    loss.backward()
    optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in trained(model))
    return Outcome(good=finite, seen=f"loss {loss.item():.2f}, adapters finite: {finite}", word="NaN")
