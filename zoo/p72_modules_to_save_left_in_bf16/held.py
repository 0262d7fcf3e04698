"""The same: refused by name, and with the line that the message gives, every weight of the head moves."""

from __future__ import annotations

import torch

import halfstep
from halfstep.errors import WrongUse
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p72_modules_to_save_left_in_bf16.plain import RATE, UPDATES, head_of, model_to_tune, moved
from zoo.small_llama import ROWS, next_token, trained


def run() -> Outcome:
    model = model_to_tune()
    try:
        halfstep.Stepper(model, torch.optim.AdamW(trained(model)), precision=resolve_precision_name("bf16"))
        return Outcome(good=False, seen="a head in bf16 was accepted")
    except WrongUse as error:
        refused = "lm_head.modules_to_save" in error.given
    for p in model.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    head = head_of(model)
    before = head.detach().clone()
    optimizer = torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.0)
    stepper = halfstep.Stepper(model, optimizer, precision=resolve_precision_name("bf16"))
    for _ in range(UPDATES):
        stepper.step(next_token, ROWS)
    share = moved(before, head.detach())
    return Outcome(good=refused and share > 0.9, seen=f"refused by name, then {share:.0%} of the head's weights moved")
