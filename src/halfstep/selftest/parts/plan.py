"""A small plan: settings are measured, and the choice is one of them."""

from __future__ import annotations

import torch

from halfstep.measure.plan.page import Plan
from halfstep.measure.plan.plan import plan
from halfstep.selftest.part import PartContext, PartResult, require
from halfstep.selftest.small import build_convolutional_model, compute_classification_loss, create_image_batch

SECONDS = 12.0


def check(place: PartContext) -> PartResult:
    """Plan for a small model, all settings in this process."""
    host = torch.device("cpu")
    model, data = build_convolutional_model(host, width=32), create_image_batch(host, samples=16, size=32)
    found = plan(model, compute_classification_loss, data, seconds=SECONDS, device=place.described.place)
    require(not found.interrupted, "the plan was interrupted")
    _check_plan(found, [precision.name for precision in place.native()])
    choice, speed = str(found.choice.setting), found.choice.speed
    speedup = speed.speedup if speed else 1.0
    timed = sum(cell.speed is not None for cell in found.ladder)
    figures = {"choice": choice, "speedup": speedup, "timed": timed, "parity": found.parity.verdict}
    return PartResult(f"{choice}: {speedup:.2f}x fp32; {timed} settings timed", figures)


def _check_plan(found: Plan, native: list[str]) -> None:
    choice, speed = found.choice.setting, found.choice.speed
    require(choice in [cell.setting for cell in found.ladder], f"{choice} was chosen and is none of the settings")
    require(choice.precision in native, f"{choice} was chosen, and is not native here")
    require(found.parity.verdict != "fails", f"{choice} was chosen, and trains worse than fp32: {found.parity.why}")
    if choice != found.baseline:
        require(speed is not None and speed.speedup > 1.0, f"{choice} was chosen, and is not faster than fp32: {speed}")
