"""The doctor reads the configuration and the environment before anything runs, and names both sides."""

from __future__ import annotations

import tempfile
from pathlib import Path

from halfstep.doctor.checkup import check_settings
from zoo.d09_variable_against_code_in_accelerate.plain import CONFIGURATION, VARIABLE
from zoo.outcome import Outcome


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.yaml"
        file.write_text(CONFIGURATION)
        checked = check_settings(str(file), variables=VARIABLE)
        file.write_text(CONFIGURATION.replace("bf16", "fp16"))
        mended = check_settings(str(file), variables=VARIABLE)
    sides = [f"{found.kind} {found.value}" for one in checked.conflicts for found in (one.one, one.other)]
    return Outcome(
        good=sorted(sides) == ["environment fp16", "recipe bf16"] and mended.status.aligned,
        seen=f"{checked.status.final}: {checked.status.amp}; with one of them changed: {mended.status.amp}",
    )
