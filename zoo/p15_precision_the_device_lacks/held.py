"""The same requests by name and with the fallback of a recipe; four GPUs by their description, and a wheel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.doctor.wheel import DriverGpu, TorchBuild, check_build
from halfstep.precision.hardware import Device
from zoo.outcome import Outcome

GPUS = {"A100": (8, 0), "Tesla T4": (7, 5), "Tesla P40": (6, 1), "Tesla K80": (3, 7)}
LADDER = {"A100": "bf16", "Tesla T4": "fp16", "Tesla P40": "fp32", "Tesla K80": "fp32"}
NEWER = TorchBuild(
    torch="2.5.1+cu121",
    cuda=(12, 1),
    architectures=("sm_80", "sm_90"),
    driver=(12, 8),
    boards=(DriverGpu("NVIDIA GeForce RTX 5090", (12, 0)),),
)


def run() -> Outcome:
    choices = {name: _chosen(name) for name in GPUS}
    took = {name: choice.precision.name for name, choice in choices.items()}
    here, refusal = _trains("bf16"), _refusal("tf32")
    (wheel,) = check_build(NEWER)
    reason = choices["Tesla T4"].findings[0].evidence
    return Outcome(
        good=took == LADDER
        and here == "bf16"
        and "CPUs have no tf32" in refusal
        and "--torch-backend cu128" in wheel.fix,
        seen=f"with a fallback bf16 becomes {took}; {reason}; bf16 by name trains in {here} on this CPU; {refusal}; "
        f"{wheel.evidence.split(':')[0]}: {wheel.fix}",
    )


def _chosen(name: str) -> halfstep.precision.select.Choice:
    device = Device(kind="cuda", name=name, capability=GPUS[name])
    return halfstep.choose_precision("bf16", device=device, fallback=True)


def _trains(precision: str) -> str:
    model = nn.Linear(4, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=precision)
    report = stepper.step(loss_fn, torch.ones(2, 4))
    return stepper.precision.name if report.applied else f"not: {report.reason}"


def _refusal(precision: str) -> str:
    try:
        _trains(precision)
    except halfstep.HalfstepError as error:
        return error.given
    return f"{precision} runs"


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
