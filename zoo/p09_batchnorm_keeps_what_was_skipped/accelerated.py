"""The same with accelerate, whose fp16 on a CPU is switched on by hand (see the README)."""

from __future__ import annotations

import torch

from zoo.outcome import Outcome
from zoo.p09_batchnorm_keeps_what_was_skipped.plain import judge, make_batches, make_model
from zoo.real_accelerate import accelerator_with_fp16


def run() -> Outcome:
    accelerator = accelerator_with_fp16(128.0)
    net = make_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    for x in make_batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    return judge(accelerator.unwrap_model(model, keep_fp32_wrapper=False), loss.item())
