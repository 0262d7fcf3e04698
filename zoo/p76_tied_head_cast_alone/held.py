"""The same: the two matrices are reported by name before the first step."""

from __future__ import annotations

import warnings

import torch

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p76_tied_head_cast_alone.plain import head_cast_alone


def run() -> Outcome:
    model = head_cast_alone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW([model.lm_head.weight], lr=0.1)
        stepper = halfstep.Stepper(model, optimizer, precision=resolve_precision_name("bf16"))
    found = [finding for finding in stepper.findings if finding.id == "stored.head"]
    return Outcome(good=len(found) == 1, seen=found[0].evidence if found else "nothing was reported")
