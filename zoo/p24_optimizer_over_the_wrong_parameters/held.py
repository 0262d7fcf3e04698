"""The same optimizer: refused with the cause when the stepper is built."""

from __future__ import annotations

import halfstep
from zoo.outcome import Outcome
from zoo.p24_optimizer_over_the_wrong_parameters.plain import make_model


def run() -> Outcome:
    model, optimizer = make_model()
    try:
        halfstep.Stepper(model, optimizer, precision="fp16")
    except halfstep.HalfstepError as error:
        return Outcome(
            good="none of them of this model" in error.given and "after the model is final" in error.do,
            seen=f"before the first step: {error.given}; {error.do}",
        )
    return Outcome(good=False, seen="nothing was refused")
