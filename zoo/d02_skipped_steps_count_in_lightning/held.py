"""The same model, batches and schedule: applied steps are counted, and skipped ones end nothing."""

from __future__ import annotations

import torch

import halfstep
from zoo.d02_skipped_steps_count_in_lightning.plain import SCALE, UPDATES, batches, judge, loss_fn, model_and_schedule
from zoo.outcome import Outcome


def run() -> Outcome:
    model, optimizer, schedule = model_and_schedule()
    scale = halfstep.DynamicScale(init_scale=SCALE)
    stepper = halfstep.Stepper(model, optimizer, precision="fp16", schedule=schedule, loss_scale=scale)
    changes = 0
    for batch in batches():
        before = model.weight.detach().clone()
        stepper.step(loss_fn, batch)
        changes += not torch.equal(before, model.weight)
        if stepper.counts.applied == UPDATES:
            break
    return judge(changes, counted=stepper.counts.applied, rate=optimizer.param_groups[0]["lr"])
