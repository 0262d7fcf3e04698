"""The autoencoder as an island: fp32 whichever method is called, the denoiser in fp16."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p17_fp32_module_inside_autocast.plain import LatentDiffusion, images, loss_fn


def run() -> Outcome:
    torch.manual_seed(0)
    model = halfstep.island(LatentDiffusion(), "vae")
    optimizer = torch.optim.AdamW(model.unet.parameters())
    loss_scale = halfstep.DynamicScale(init_scale=1024.0)
    stepper = halfstep.Stepper(model, optimizer, precision="fp16", loss_scale=loss_scale)
    reports = [stepper.step(loss_fn, images()) for _ in range(2)]
    observed = stepper.observed
    return Outcome(
        good=all(report.applied for report in reports) and observed is not None and observed.as_asked,
        seen=f"loss {reports[0].loss:.2f}, steps applied: {stepper.counts.applied} of 2; observed {observed}",
    )
