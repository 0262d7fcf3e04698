"""fp8 by name is refused; with the fallback of a recipe bf16 runs, and that is said."""

from __future__ import annotations

import halfstep
from halfstep.precision.hardware import Device
from zoo.outcome import Outcome

H100 = Device(kind="cuda", name="NVIDIA H100", capability=(9, 0))


def run() -> Outcome:
    choice = halfstep.choose_precision("fp8", device=H100, fallback=True)
    told = [finding.evidence for finding in choice.findings if finding.id == "precision.substituted"]
    try:
        halfstep.choose_precision("fp8", device=H100)
        refusal = ""
    except halfstep.HalfstepError as error:
        refusal = error.given
    return Outcome(
        good=choice.precision.name == "bf16" and len(told) == 1 and "fp8" in refusal,
        seen=f"{'; '.join(told)}; by name: {refusal}",
    )
