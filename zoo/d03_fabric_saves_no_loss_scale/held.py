"""Fabric saves the stepper as it saves an optimizer: one object, with the loss scale in its state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import halfstep
from zoo.d03_fabric_saves_no_loss_scale.plain import STEPS, make_model
from zoo.outcome import Outcome
from zoo.real_lightning import fabric_in, quiet


def run() -> Outcome:
    fabric = fabric_in("32-true")
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "checkpoint.ckpt"
        state = start()
        train(state["stepper"])
        scale = state["stepper"].state_dict()["losses"]
        fabric.save(path, state)
        state = start()
        fabric.load(path, state)
        same = state["stepper"].state_dict()["losses"] == scale
        wasted = train(state["stepper"])
    return Outcome(
        good=wasted == 0 and same,
        seen=f"the loss scale after loading is that of the checkpoint: {same}; {wasted} of the first {STEPS} steps "
        "after loading skipped",
    )


def start() -> dict[str, object]:
    model, optimizer = make_model()
    return {"model": model, "stepper": halfstep.Stepper(model, optimizer, precision="fp16")}


def train(stepper: halfstep.Stepper) -> int:
    reports = [stepper.step(loss_fn, torch.randn(8, 16)) for _ in range(STEPS)]
    return sum(not report.applied for report in reports)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(30 * x).float().square().mean()
