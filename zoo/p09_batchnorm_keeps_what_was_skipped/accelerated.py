"""The same with accelerate, whose fp16 on a CPU is switched on by hand (see the README)."""

from __future__ import annotations

import torch

from zoo.outcome import Outcome
from zoo.p09_batchnorm_keeps_what_was_skipped.plain import judge, make_batches, make_model


def run() -> Outcome:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=128.0)
    net = make_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    for x in make_batches():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
    return judge(accelerator.unwrap_model(model, keep_fp32_wrapper=False), loss.item())
