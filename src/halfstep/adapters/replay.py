"""Run a recorded step of a foreign loop again, with a model and a loss function that the caller builds."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from halfstep.errors import BadData
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.failed_steps.reading import (
    choose_recorded_precision,
    list_failed_steps,
    load_attempt,
    load_recorded_model,
    read_failed_step,
)
from halfstep.guard.verdict import Verdict
from halfstep.step.sync import LossFunction


def replay(folder: str | Path, model: nn.Module, loss_fn: LossFunction, *, attempt: int | None = None) -> Verdict:
    """Return the cause of a recorded failed step: the last one, or the one with this attempt number.

    `model` is built the same way as in the run, on the device to replay on; its weights and buffers are set to those of
    the failed step. `loss_fn(model, batch)` gets the same arguments as in the loop. Raises BadData if nothing was
    recorded, or only without tensors, and StateMismatch for a different model.
    """
    places = [place for place in list_failed_steps(Path(folder)) if attempt in (None, place.attempt)]
    record = read_failed_step(places[-1]) if places else None
    if record is None or record.step.without:
        why = "no failed step" if record is None else record.step.without
        raise BadData(f"{folder}: {why}", allowed="a folder given as record=", do="train until a step fails")
    load_recorded_model(record, model)
    device = next(model.parameters()).device
    precision = choose_recorded_precision(record.step.precision, device).precision
    precision.prepare(model.train(), device)
    inputs = load_attempt(record, 0, loss_fn, device)
    reason = record.step.report.reason or ""
    return diagnose_attempt(model, inputs, precision=precision, reason=reason, history=record.step.history)
