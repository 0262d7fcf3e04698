"""The result of a check of settings, and its page: sources, settings, findings, and the verdict last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from halfstep.doctor.located import Edit, build_located_box
from halfstep.doctor.settings import FoundSetting, format_found_value
from halfstep.draw.notebook import PageResult
from halfstep.finding import Finding
from halfstep.page import Block, Column, Heading, Items, Page, Pairs, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line

_KEY_WIDTH = 32
"""The width of the longest variable, which should not be wrapped."""


class Resolution(NamedTuple):
    """One resolution of a conflict: what to write where, and the precision that results."""

    precision: str
    where: str
    write: str

    def __str__(self) -> str:
        # On its own line, so that it can be copied.
        return f"to run in {self.precision}, write in {self.where}:\n    {self.write}"


@dataclass(frozen=True)
class Conflict:
    """Two settings that cannot both be obeyed."""

    json_keys: ClassVar = ("settings", "ways")

    one: FoundSetting
    other: FoundSetting
    ways: tuple[Resolution, Resolution]

    @property
    def finding(self) -> Finding:
        """Return the conflict as a finding with both resolutions."""
        evidence = "\n".join(f"{s}  ({s.where}): {s.means}" for s in (self.one, self.other))
        fix = "\nor: ".join(map(str, self.ways))
        name = "deepspeed.format_mismatch" if self.is_deepspeed else "settings.precision_mismatch"
        return Finding(name, "error", f"{evidence}{_describe_conflict(self)}", fix)

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed's file asks for another format than accelerate does, which accelerate refuses."""
        kinds = {self.one.kind, self.other.kind}
        return "deepspeed" in kinds and "accelerate" in {self.one.owner, self.other.owner}

    @property
    def settings(self) -> tuple[FoundSetting, FoundSetting]:
        """Return both settings."""
        return self.one, self.other


def _describe_conflict(conflict: Conflict) -> str:
    """Return what happens if the conflict stays."""
    if conflict.is_deepspeed:
        return "\naccelerate refuses to run where DeepSpeed's file enables a different format than accelerate's"
    kinds = {conflict.one.kind, conflict.other.kind}
    if kinds == {"accelerate", "environment"}:
        return "\naccelerate launch replaces the variable with the file's value; plain python never reads the file"
    if kinds == {"accelerate", "recipe"}:
        return (
            "\naccelerate follows its own file, and the script follows its own: a precision mismatch, with no message"
        )
    return "\nprecision mismatch: which of the two applies depends on the code that reads them"


@dataclass(frozen=True)
class PrecisionStatus:
    """The status check of the radio-map guide, in words."""

    aligned: bool
    precision: str | None
    """The precision that all settings agree on; None if none speaks of it, or they contradict each other."""
    amp: str
    fp16: str
    learning_rate: str
    clipping: str
    nan_handling: str
    final: str


@dataclass(frozen=True)
class NamedSource:
    """A file or the environment, as a source of settings."""

    kind: str
    place: str


@dataclass(frozen=True)
class SettingsReport(PageResult):
    """The settings of a recipe, of accelerate, of DeepSpeed and of the environment, compared."""

    sources: list[NamedSource]
    settings: list[FoundSetting]
    conflicts: list[Conflict]
    findings: list[Finding]
    status: PrecisionStatus

    def page(self) -> Page:
        """Return the page about it."""
        return build_settings_page(self)


def build_settings_page(report: SettingsReport, changed: Sequence[Edit] | None = None) -> Page:
    """Return the page of a check with the lines that --fix changed, if it was given; the verdict is last."""
    blocks: list[Block] = [Heading("Sources"), Pairs(tuple((one.kind, one.place) for one in report.sources))]
    blocks.append(Heading("Settings", "" if report.settings else "none of them sets a precision"))
    if report.settings:
        blocks.append(_build_settings_table(report.settings))
    blocks += map(build_located_box, report.findings)
    if changed is not None:
        blocks += _build_change_blocks(changed)
    files = ", ".join(one.place for one in report.sources if one.kind != "environment")
    return Page(f"precision settings of {files}", (*blocks, *_build_status_blocks(report.status)))


def _build_settings_table(rows: Sequence[FoundSetting]) -> Table:
    widest = max(len(row.key) for row in rows)
    key = Column("key", wrap="never" if widest <= _KEY_WIDTH else "fold")
    columns = (Column("source", wrap="never"), key, Column("value", wrap="fold"), Column("means", wrap="fold"))
    sources = (f"{row.kind}:{row.line}" if row.line else row.kind for row in rows)
    return Table(
        columns,
        tuple(
            (source, row.key, format_found_value(row.value), row.means)
            for source, row in zip(sources, rows, strict=True)
        ),
    )


def _build_change_blocks(changes: Sequence[Edit]) -> list[Block]:
    blocks: list[Block] = [Heading("Changes applied", "" if changes else "none: nothing contradicts")]
    for change in changes:
        lines = f"{format_found_value(change.file)}, line {change.line}\n- {change.before}\n+ {change.after}"
        blocks.append(Paragraph(escape_to_one_line(lines), indent=True))
    files = dict.fromkeys(change.file for change in changes)
    if files:
        blocks.append(Paragraph(escape_to_one_line(f"Files modified: {', '.join(files)}"), indent=True))
    return blocks


def _build_status_blocks(status: PrecisionStatus) -> tuple[Block, ...]:
    """Return the status check of the radio-map guide: one verdict, and what it rests on."""
    known = {None: "nothing sets a precision", "auto": "the device decides"}
    what = known.get(status.precision, f"everything asks for {status.precision}")
    verdict = Span("❌ Configuration is not aligned: precision mismatch", "bad")
    if status.aligned:
        verdict = Span(f"✅ Configuration is properly aligned: {what}", "good")
    lines = {
        "AMP": status.amp,
        "FP16": status.fp16,
        "Learning Rate": status.learning_rate,
        "Gradient Clipping": status.clipping,
        "NaN Handling": status.nan_handling,
        "Final Status": status.final,
    }
    return (
        Paragraph(Span("=== Configuration Status Check ===", strong=True), gap=True),
        Paragraph(verdict),
        Items(tuple(f"{name}: {words}" for name, words in lines.items()), indent=3),
    )
