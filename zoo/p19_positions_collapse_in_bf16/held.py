"""The same model: one audited batch finds the positions that the format cannot tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p19_positions_collapse_in_bf16.plain import LENGTH, model


def run() -> Outcome:
    positions = torch.arange(LENGTH)
    spotted = [one.finding.evidence for one in halfstep.audit(model(), loss_fn, positions, precision="bf16").spotted]
    about = [evidence for evidence in spotted if "plain.py:" in evidence and f"up to {LENGTH - 1}" in evidence]
    return Outcome(good=bool(about), seen=f"audit: {about[0] if about else spotted}")


def loss_fn(net: nn.Module, positions: Tensor) -> Tensor:
    return net(positions).float().square().mean()
