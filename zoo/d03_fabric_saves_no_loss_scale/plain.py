"""Fabric saves and loads model and optimizer, as its documentation does (fp16 on a CPU: see the README)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.real_lightning import fabric_with_fp16, quiet

STEPS = 40


def make_model() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)


class Run:
    def __init__(self) -> None:
        self.fabric = fabric_with_fp16()
        self.scaler = self.fabric._precision.scaler
        self.model, self.optimizer = self.fabric.setup(*make_model())

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> int:
        """Take the steps, and return how many of them were skipped."""
        skipped = 0
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            scale = self.scaler.get_scale()
            self.fabric.backward(self.model(30 * torch.randn(8, 16)).square().mean())
            self.optimizer.step()
            skipped += self.scaler.get_scale() < scale
        return skipped


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "checkpoint.ckpt"
        first = Run()
        first.train()
        first.fabric.save(path, first.state)
        saved = torch.load(path, weights_only=True)
        second = Run()
        second.fabric.load(path, second.state)
        wasted = second.train()
    return Outcome(
        good=wasted == 0,
        seen=f"scale {first.scaler.get_scale():g} when saved; the file has {' and '.join(saved)}; "
        f"{wasted} of the first {STEPS} steps after loading skipped",
        word="scale lost",
    )
