"""The same model and batch: the skipped step is run again, and the culprit is named."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p01_which_operation_made_the_nan.plain import batch, model


def run() -> Outcome:
    net = model()
    stepper = halfstep.Stepper(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16")
    report = stepper.step(loss_fn, batch())
    verdict = halfstep.diagnose(stepper, report)
    culprit = verdict.culprit
    named = culprit is not None and (culprit.operation, culprit.module) == ("aten.mul", "1")
    in_line = culprit is not None and "plain.py:" in (culprit.line or "")
    return Outcome(good=verdict.cause == "precision" and named and in_line, seen=verdict.sentence)


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).float().square().mean()
