"""Examine a device: its number formats and their speed, the build of torch, and the precision that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.json_data import JsonResult, json_data

if TYPE_CHECKING:
    from halfstep.doctor.wheel import Build
    from halfstep.finding import Finding
    from halfstep.precision.hardware import Device
    from halfstep.precision.probe import Measurements
    from halfstep.precision.select import Choice


@dataclass(frozen=True)
class FormatReport:
    """The speed of a device in one number format."""

    name: str
    native: bool
    reason: str
    speedups: Mapping[str, float]
    """By operation, relative to strict fp32; empty where nothing was measured."""
    combined: float | None
    not_measured: str


@dataclass(frozen=True)
class DeviceReport(JsonResult):
    """The abilities of a device, the build of torch, and the precision that fits."""

    device: Device
    formats: tuple[FormatReport, ...]
    measured: Measurements
    flags: dict[str, str]
    choice: Choice
    build: Build
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        from halfstep.precision.hardware import facts

        here, choice = self.device, self.choice
        measured = {"seconds": round(self.measured.seconds, 3), "how": self.measured.how}
        asked = {"asked": choice.asked, "took": choice.took, "precision": choice.precision.name}
        return {
            "device": {"name": here.name, "kind": here.kind, "place": here.place, "facts": facts(here)},
            "formats": json_data(self.formats),
            "measured": {**measured, "cached": self.measured.cached},
            "flags": self.flags,
            "choice": {
                **asked,
                "summary": choice.precision.summary,
                "rungs": [rung._asdict() for rung in choice.rungs],
            },
            "build": self.build.as_dict(),
            "findings": json_data(self.findings),
        }


def examine(
    device: str | None, precision: str, *, strict: bool = False, fresh: bool = False, build: Build | None = None
) -> DeviceReport:
    """Return the device report; `build` stands for another torch and other GPUs than those present."""
    from halfstep.doctor.machine import check_machine, read_machine
    from halfstep.doctor.wheel import read_build
    from halfstep.precision import flags
    from halfstep.precision.hardware import FORMAT_NAMES, ability, describe
    from halfstep.precision.probe import measure
    from halfstep.precision.select import choose_precision

    here, build = describe(device), build or read_build()
    measured = measure(here, fresh=fresh)
    choice = choose_precision(precision, device=here, fallback=not strict, measured=measured)
    # Notes are about libraries that are installed, whether or not a run uses them: `--known-bad` lists them.
    machine = [finding for finding in check_machine(read_machine(build), build) if finding.severity != "note"]
    formats = tuple(
        FormatReport(
            name,
            can.native,
            can.reason,
            speedups=measured.speedups.get(name, {}),
            combined=measured.combined(name),
            not_measured=measured.failures.get(name, ""),
        )
        for name, can in ((name, ability(here, name)) for name in FORMAT_NAMES)
    )
    return DeviceReport(here, formats, measured, flags.read_flags(), choice, build, (*machine, *choice.findings))
