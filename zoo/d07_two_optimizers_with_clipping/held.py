"""Two named optimizers, each clipped at its own true norm, in one step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.d07_two_optimizers_with_clipping.plain import APART, BATCH, judge, make_twins
from zoo.outcome import Outcome


def run() -> Outcome:
    twins = nn.ModuleDict(dict(zip(("first", "second"), make_twins(), strict=True)))
    optimizers = {name: torch.optim.SGD(twin.parameters(), lr=0.1) for name, twin in twins.items()}
    scales = {name: halfstep.DynamicScale(init_scale=1024.0) for name in optimizers}
    stepper = halfstep.Stepper(twins, optimizers, precision="fp16", clip_norm=1.0, loss_scale=scales)
    stepper.step(losses, BATCH)
    return judge(twins["first"].weight, twins["second"].weight, right=APART)


def losses(twins: nn.ModuleDict, x: Tensor) -> dict[str, Tensor]:
    return {name: twin(x).float().square().mean() for name, twin in twins.items()}
