"""The same batches under a guardian, saved and loaded in the middle: the bad update is refused, and the run goes on."""

from __future__ import annotations

from torch import nn

import halfstep
from zoo.d06_spike_detection_that_cannot_resume.plain import BAD, BATCHES, SAVED, batch, error_of, loss_fn, make_model
from zoo.outcome import Outcome


def run() -> Outcome:
    model, guardian = start()
    reports = [guardian.step(loss_fn, batch(number)) for number in range(SAVED)]
    saved = model.state_dict(), guardian.stepper.state_dict(), guardian.state_dict()
    model, guardian = start()
    for one, state in zip((model, guardian.stepper, guardian), saved, strict=True):
        one.load_state_dict(state)
    reports += [guardian.step(loss_fn, batch(number)) for number in range(SAVED, BATCHES)]
    refused = {number: report.reason for number, report in enumerate(reports) if not report.applied}
    error = error_of(model)
    return Outcome(
        good=refused == {BAD: "guard:spike"} and error < 0.3,
        seen=f"{BATCHES} batches, saved and loaded after {SAVED}; refused: {refused}; "
        f"the weights are off by {error:.3f}",
    )


def start() -> tuple[nn.Linear, halfstep.Guardian]:
    model, optimizer = make_model()
    stepper = halfstep.Stepper(model, optimizer, precision="fp32")
    limits = halfstep.Limits(spikes="refuse")
    return model, halfstep.Guardian(stepper, limits=limits, tell=lambda told: None)
