"""`auto` goes by measurements, backward included, and passes a format over whose convolutions are slow."""

from __future__ import annotations

import halfstep
from halfstep.precision.hardware import Device
from halfstep.precision.probe import Measurements
from zoo.outcome import Outcome

A100 = Device(kind="cuda", name="NVIDIA A100", capability=(8, 0))
USUAL = {"GEMM": 4.0, "conv2d": 3.0, "conv3d": 3.0}
REGRESSED = USUAL | {"conv3d": 0.06}
"""A build in which conv3d fell back to a slow kernel, as that of torch 2.9 did in bf16."""


def run() -> Outcome:
    slow, usual = _chosen(REGRESSED), _chosen(USUAL)
    named = halfstep.choose_precision("fp16", device="cpu").findings
    told = [finding.evidence for finding in named if finding.id == "precision.slow"]
    return Outcome(
        good=(slow, usual) == ("fp32", "bf16") and len(told) == 1 and "convolution" in told[0],
        seen=f"an A100 computes in {usual}, and in {slow} where its conv3d is measured as slow; fp16 by name here: "
        f"{told[0] if told else 'nothing is said'}",
    )


def _chosen(speedups: dict[str, float]) -> str:
    measured = Measurements({"fp32": dict.fromkeys(USUAL, 1.0), "bf16": speedups}, failures={}, seconds=1.0)
    return halfstep.choose_precision("auto", device=A100, measured=measured).precision.name
