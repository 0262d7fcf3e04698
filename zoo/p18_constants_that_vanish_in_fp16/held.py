"""The same model: the constant is found before training, and the division is named when it happens."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p18_constants_that_vanish_in_fp16.plain import batch, loss_fn, model


def run() -> Outcome:
    net = model()
    spotted = [one.finding.evidence for one in halfstep.audit(net, loss_fn, batch(), precision="fp16").spotted]
    found = [evidence for evidence in spotted if "1e-08 is 0" in evidence]
    stepper = halfstep.Stepper(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16")
    report = stepper.step(loss_fn, batch())
    verdict = halfstep.diagnose(stepper, report)
    named = verdict.culprit is not None and verdict.culprit.operation == "aten.div"
    return Outcome(
        good=bool(found) and named and verdict.cause == "precision",
        seen=f"audit: {found[0] if found else 'nothing'}; when it happens: {verdict.sentence}",
    )
