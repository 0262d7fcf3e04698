"""Examine a device: its number formats and their speed, the build of torch, and the precision that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.doctor.located import build_located_box
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult, convert_to_json_data
from halfstep.page import Column, Heading, Page, Pairs, Paragraph, Span, Table, Text

if TYPE_CHECKING:
    from halfstep.doctor.wheel import TorchBuild
    from halfstep.finding import Finding
    from halfstep.precision.hardware import Device
    from halfstep.precision.probe import Measurements
    from halfstep.precision.select import Choice

_OPERATIONS = ("GEMM", "conv2d", "conv3d")


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
class DeviceReport(JsonResult, PageResult):
    """The abilities of a device, the build of torch, and the precision that fits."""

    device: Device
    formats: tuple[FormatReport, ...]
    measured: Measurements
    flags: dict[str, str]
    choice: Choice
    build: TorchBuild
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        from halfstep.precision.hardware import describe_device_facts

        here, choice = self.device, self.choice
        measured = {"seconds": round(self.measured.seconds, 3), "how": self.measured.how}
        asked = {"asked": choice.asked, "took": choice.took, "precision": choice.precision.name}
        return {
            "device": {"name": here.name, "kind": here.kind, "place": here.place, "facts": describe_device_facts(here)},
            "formats": convert_to_json_data(self.formats),
            "measured": {**measured, "cached": self.measured.cached},
            "flags": self.flags,
            "choice": {**asked, "summary": choice.precision.summary, "rungs": convert_to_json_data(choice.rungs)},
            "build": self.build.as_dict(),
            "findings": convert_to_json_data(self.findings),
        }

    def page(self) -> Page:
        """Return the page about it."""
        from halfstep.precision.hardware import describe_device_facts

        build = tuple((key, words) for key, words in self.build.as_dict().items() if key != "torch")
        precision = self.choice.precision
        asked = f"chosen by {self.choice.asked}" + (f" ({self.choice.took})" if self.choice.took else "")
        verdict = (Span(precision.name, "good", strong=True), f"  {asked}: {precision.summary}")
        rungs = ((rung.name, "chosen" if rung.accepted else "rejected", rung.reason) for rung in self.choice.rungs)
        return Page(
            f"halfstep on {self.device.name}",
            (
                Heading("Device"),
                Pairs((("name", self.device.name), *describe_device_facts(self.device).items())),
                Heading("Build", "what torch was built for"),
                Pairs(build),
                Heading("Formats", _describe_measurement(self.measured)),
                _build_format_table(self.formats),
                Heading("torch's precision flags", "overridden during a run and restored afterwards"),
                Pairs(tuple(self.flags.items())),
                Heading("Choice"),
                Paragraph(verdict, indent=True),
                Table((Column(), Column(), Column()), tuple(rungs), gap=True),
                *map(build_located_box, self.findings),
            ),
        )


def _describe_measurement(found: Measurements) -> str:
    if not any(found.speedups.values()):
        return "nothing to measure"
    source = "cached; --fresh measures again" if found.cached else f"measured in {found.seconds:.1f} s"
    how = f", {found.how}" if found.how else ""
    return f"speed relative to strict fp32, with backward{how}; {source}"


def _build_format_table(formats: tuple[FormatReport, ...]) -> Table:
    columns = [Column(title, wrap="never") for title in ("format", "native")]
    columns += [Column(title, "right", "never") for title in (*_OPERATIONS, "combined")]
    rows: list[tuple[Text, ...]] = []
    for row in formats:
        native = Span("yes", "good") if row.native else Span("no", "warn")
        ratios = (*map(row.speedups.get, _OPERATIONS), row.combined)
        rows.append((row.name, native, *(f"{ratio:.2f}x" if ratio else "-" for ratio in ratios), row.reason))
    return Table((*columns, Column("why", wrap="fold")), tuple(rows))


def examine_device(
    device: str | None, precision: str, *, strict: bool = False, fresh: bool = False, build: TorchBuild | None = None
) -> DeviceReport:
    """Return the device report; `build` stands for another torch and other GPUs than those present."""
    from halfstep.doctor.machine import check_machine, read_machine
    from halfstep.doctor.wheel import detect_torch_build
    from halfstep.precision import flags
    from halfstep.precision.hardware import FORMAT_NAMES, describe_device, find_format_support
    from halfstep.precision.probe import measure_speedups
    from halfstep.precision.select import choose_precision

    here, build = describe_device(device), build or detect_torch_build()
    measured = measure_speedups(here, fresh=fresh)
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
        for name, can in ((name, find_format_support(here, name)) for name in FORMAT_NAMES)
    )
    return DeviceReport(here, formats, measured, flags.read_fp32_flags(), choice, build, (*machine, *choice.findings))
