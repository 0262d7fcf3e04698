"""The doctor compares the script's settings with the launcher's, and the line it offers settles them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from halfstep.doctor.checkup import SettingsReport, check_settings
from zoo.outcome import Outcome
from zoo.p03b_launcher_and_script_disagree.plain import LAUNCHER, SCRIPT


def run() -> Outcome:
    checked = _checked(SCRIPT)
    told = [finding.id for finding in checked.findings if finding.severity == "error"]
    offers = [way.write for conflict in checked.conflicts for way in conflict.ways if way.precision == "bf16"]
    settled = _checked(SCRIPT | yaml.safe_load("\n".join(offers) or "{}"))
    return Outcome(
        good=told == ["settings.precision_mismatch"] and len(offers) == 1 and settled.status.precision == "bf16",
        seen=f"{told}: mixed precision is {checked.status.amp}; with the line that it offers, {offers}, it is "
        f"{settled.status.amp}",
    )


def _checked(script: dict[str, bool]) -> SettingsReport:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training_arguments.yaml"
        file.write_text(yaml.safe_dump(script))
        return check_settings(str(file), variables=LAUNCHER)
