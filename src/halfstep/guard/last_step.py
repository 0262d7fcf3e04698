"""Why a Stepper's last step was skipped, for those who ask by hand."""

from __future__ import annotations

from halfstep.errors import WrongUse
from halfstep.guard.replay import diagnose as replay
from halfstep.guard.replay.compiled import uses_compiled
from halfstep.guard.trouble import History
from halfstep.guard.verdict import Verdict
from halfstep.step.report import StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper

_NO_HISTORY = History()


def diagnose(
    stepper: Stepper, report: StepReport, *, again: LossFunction | None = None, history: History = _NO_HISTORY
) -> Verdict:
    """Run the step that `report` tells of again, in several ways, and say what made it fail.

    Nothing of the model is changed. `again` is the loss function to run it with, where the step's own one counts or
    draws something. Every process calls it, and all get the same verdict.
    """
    attempt = stepper.attempt
    if report.reason is None or attempt is None or report.attempt != stepper.counts.attempted:
        raise WrongUse(
            f"diagnose(stepper, report) with {report}",
            allowed="the report of this Stepper's last step, which was skipped",
            do="ask before the next step: its batch is gone afterwards",
        )
    if attempt.loss_fn is None:
        raise WrongUse(
            "diagnose() after a step made of forward() and backward(), which cannot be run again",
            allowed="a step from a loss function and a batch",
            do="stepper.step(loss_fn, batch)",
        )
    return replay.diagnose(
        stepper.model,
        attempt if again is None else attempt._replace(loss_fn=again),
        precision=stepper.precision,
        reason=report.reason,
        history=history,
        compiled=uses_compiled(stepper.model),
    )
