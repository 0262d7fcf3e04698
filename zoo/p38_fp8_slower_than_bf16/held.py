"""fp8 is never chosen by itself: `auto` takes bf16; by name it runs, and where it is emulated that is said."""

from __future__ import annotations

import halfstep
from halfstep.precision.hardware import Device
from zoo.outcome import Outcome

H100 = Device(kind="cuda", name="NVIDIA H100", capability=(9, 0))
CPU = Device(kind="cpu", name="a CPU")


def run() -> Outcome:
    auto, by_name = halfstep.choose_precision("auto", device=H100), halfstep.choose_precision("fp8", device=CPU)
    told = [finding.evidence for finding in by_name.findings if finding.id == "precision.slow"]
    return Outcome(
        good=auto.precision.name == "bf16" and len(told) == 1,
        seen=f"auto takes {auto.precision.name} on {H100.name}; by name: {'; '.join(told)}",
    )
