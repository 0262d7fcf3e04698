"""Run a recorded step of a foreign loop again, with a model and a loss function that the caller builds."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from halfstep.errors import BadData
from halfstep.guard.diagnosis.diagnose import diagnose
from halfstep.guard.verdict import Verdict
from halfstep.step.sync import LossFunction
from halfstep.train.failed_steps.reading import load_attempt, load_model, read, recorded_in, recorded_precision


def replay(folder: str | Path, model: nn.Module, loss_fn: LossFunction, *, attempt: int | None = None) -> Verdict:
    """Return what made a recorded step fail: the last one, or the one of this attempt.

    `model` is built as it was in the run, on the device to replay on; its weights and buffers become those of the
    failed step. `loss_fn(model, batch)` gets what the loop's own step got. Raises BadData where nothing is recorded,
    or only without tensors, and StateMismatch for another model.
    """
    places = [place for place in recorded_in(Path(folder)) if attempt in (None, place.attempt)]
    record = read(places[-1]) if places else None
    if record is None or record.step.without:
        why = "no failed step" if record is None else record.step.without
        raise BadData(f"{folder}: {why}", allowed="a folder given as record=", do="train until a step fails")
    load_model(record, model)
    device = next(model.parameters()).device
    precision = recorded_precision(record.step.precision, device).precision
    precision.prepare(model.train(), device)
    inputs = load_attempt(record, 0, loss_fn, device)
    reason = record.step.report.reason or ""
    return diagnose(model, inputs, precision=precision, reason=reason, history=record.step.history)
