"""Plain torch without hooks: the scaler unscales, checks and steps both optimizers after the backward pass."""

from __future__ import annotations

import torch

from zoo.outcome import Outcome
from zoo.p64_muon_momentum_takes_the_overflow.plain import judge, make_batches, make_model


def run() -> Outcome:
    model, hidden, others = make_model()
    muon, adamw = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in make_batches():
        muon.zero_grad()
        adamw.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(muon)
        scaler.step(adamw)
        scaler.update()
    return judge(model, [muon], scaler.get_scale())
