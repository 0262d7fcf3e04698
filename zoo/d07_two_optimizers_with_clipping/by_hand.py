"""Plain torch, in the order of its documentation: unscale both, clip, step both, update once."""

from __future__ import annotations

import torch
from torch import nn

from zoo.d07_two_optimizers_with_clipping.plain import BATCH, TOGETHER, judge, make_twins
from zoo.outcome import Outcome


def run() -> Outcome:
    first, second = make_twins()
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = first(BATCH), second(BATCH)
    loss = sum(output.float().square().mean() for output in outputs)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return judge(first.weight, second.weight, right=TOGETHER)
