"""The same: the fp16 base is reported by name, and in bf16 it trains."""

from __future__ import annotations

import warnings

import torch

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p71_base_cast_to_fp16_under_lora.plain import base
from zoo.small_llama import ROWS, next_token, trained, with_lora


def stepper_on(dtype: torch.dtype) -> halfstep.Stepper:
    model = with_lora(base(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return halfstep.Stepper(
            model, torch.optim.AdamW(trained(model), lr=1e-3), precision=resolve_precision_name("bf16")
        )


def run() -> Outcome:
    reported = "stored.base" in [finding.id for finding in stepper_on(torch.float16).findings]
    stepper = stepper_on(torch.bfloat16)
    reports = [stepper.step(next_token, ROWS) for _ in range(3)]
    finite = all(bool(p.isfinite().all()) for p in trained(stepper.model))
    return Outcome(
        good=reported and finite and all(report.applied for report in reports),
        seen=f"the fp16 base is reported: {reported}; in bf16 the loss is {reports[-1].loss:.2f}, all finite: {finite}",
    )
