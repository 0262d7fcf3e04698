"""The result of a check of a project's folder, and its page: the verdict, the findings, and who wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfstep.doctor.code.mixed_precision import PrecisionCode
from halfstep.doctor.located import LocatedFinding, build_located_box
from halfstep.doctor.patch import ProjectPatch
from halfstep.doctor.precedence import Provenance
from halfstep.doctor.settings import FoundSetting, format_found_value
from halfstep.doctor.settings_page import PrecisionStatus
from halfstep.draw.notebook import PageResult
from halfstep.numbers import format_counted_noun
from halfstep.page import Block, Box, Code, Column, Heading, Items, Page, Paragraph, Span, Style, Table
from halfstep.printable import escape_to_one_line

SEVERAL = "several"
"""The precision of a project whose runs differ in it."""
_MOST_ROWS = 60
"""Settings that a page shows; --json has all of them."""
_MOST_PLACES = 10
"""Places of one finding that a page shows; --json has all of them."""
_START = {"accelerate": "accelerate launch", "fabric": "fabric run", "python": "python or torchrun"}
_ASIDE = frozenset({"distributed_type", "gpu_ids", "zero_optimization.stage", "deepspeed_config.zero_stage"})
"""Keys that say nothing of precision; --json has them."""
_SETTING_WIDTHS = {"where": 28, "setting": 30, "means": None}
_IN_EVERY_FILE = ("code.", "checkpoint.", "accelerate.", "lightning.", "deepspeed.")
"""Findings whose advice is the same wherever they stand."""


@dataclass(frozen=True)
class FileCounts:
    """The files of a project."""

    read: int
    with_settings: int
    more: bool
    """Whether there are more than were read."""


@dataclass(frozen=True)
class RunReport:
    """A run of a project, and the settings that decide its precision."""

    name: str
    launched: bool
    """Whether a launch line starts it."""
    start: str
    files: list[str]
    precision: str | None
    provenance: list[Provenance]


@dataclass(frozen=True)
class RuntimeValue:
    """A setting whose value the run computes, in the place that wins."""

    file: str
    line: int | None
    possible: list[str]
    """The precisions that it can have; empty if any is possible."""
    beats: list[str]
    """The files that ask for something else than a possible value."""
    looked_up: list[str]
    """The places from which the value seems to come."""

    @property
    def where(self) -> str:
        """The place as compilers print it."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class ProjectStatus(PrecisionStatus):
    """The status check over all runs of a project."""

    unresolved: int
    """Number of settings whose value is known only in the run."""
    reason: str
    """Why it is not aligned; empty if it is."""
    errors: int
    runs: int
    disputed: bool
    """Whether settings contradict each other."""
    decided: bool
    """Whether no file loses against a value that only the run knows."""
    at_run_time: list[RuntimeValue]
    """The settings that decide, and that the run computes."""
    in_code: list[PrecisionCode] = field(default_factory=list)
    """The code that decides the precision, where no setting does."""
    casts: list[PrecisionCode] = field(default_factory=list)
    """Casts to 16 bits of what may be any tensor, where neither a setting nor other code decides."""


@dataclass(frozen=True)
class ProjectReport(PageResult):
    """The check of a project's folder."""

    folder: Path
    files: FileCounts
    settings: list[FoundSetting]
    runs: list[RunReport]
    findings: list[LocatedFinding]
    status: ProjectStatus

    @property
    def ready(self) -> bool:
        """Return whether there is no error outside of tests, and no file that a value of the run's own may beat."""
        return self.status.aligned and self.status.decided

    @property
    def precision(self) -> str | None:
        """Return what all settings ask for; `several` where runs differ, None if nothing speaks of it."""
        return self.status.precision

    def page(self) -> Page:
        """Return the page about it."""
        return build_project_page(self)


def build_project_page(
    report: ProjectReport, patch: ProjectPatch | None = None, written: Path | None = None, settings: bool = False
) -> Page:
    """Return the page of a check, with the requested parts: a patch, a recipe, the settings."""
    blocks = [
        *_build_project_verdict(report),
        *_iterate_finding_boxes(report.findings),
        *_list_test_findings(report.findings),
    ]
    blocks += [block for run in report.runs for block in _build_winners_table(run)]
    if settings:
        rows = [row for row in report.settings if row.key not in _ASIDE]
        blocks += [Heading("Settings", "" if rows else "none of them sets a precision"), _tabulate_settings(rows)]
    if patch is not None:
        blocks += _build_patch_blocks(patch, report.status)
    if written is not None:
        blocks.append(Heading("Recipe", str(written)))
    return Page(f"precision in {report.folder}", tuple(blocks))


def _build_project_verdict(report: ProjectReport) -> tuple[Block, ...]:
    status, files = report.status, report.files
    why = f" ({status.reason})" if status.reason else ""
    more = ", and more that were not" if files.more else ""
    counted = (
        f"{report.folder}: {format_counted_noun(files.read, 'file')} checked{more}, {files.with_settings} with "
        "precision settings"
    )
    numbers = {"learning rate": status.learning_rate, "clipping": status.clipping}
    lines = [f"mixed precision: {describe_project_precision(status)}"]
    lines += [f"{name}: {words}" for name, words in numbers.items() if words != "not set"]
    return (
        Paragraph(Span(status.final + why, _choose_tone(status), strong=True)),
        Items((Span(counted, "dim"), *lines)),
    )


def _choose_tone(status: ProjectStatus) -> Style:
    if not status.aligned:
        return "bad"
    return "good" if status.decided else "warn"


def describe_project_precision(status: ProjectStatus) -> str:
    """Return the precision of a project in one line, with the place that decides where no setting does."""
    if status.disputed or status.precision == SEVERAL:
        return status.amp
    if status.at_run_time:
        return _describe_runtime_values(status)
    if status.precision is None:
        return _describe_code(status)
    if not status.aligned:
        return status.amp
    return "the device decides" if status.precision == "auto" else f"everything asks for {status.precision}"


def _describe_runtime_values(status: ProjectStatus) -> str:
    first, *others = sorted(status.at_run_time, key=lambda value: not value.beats)
    place = first.looked_up[0] if len(first.looked_up) == 1 else ""
    if status.precision is not None:
        found = place or format_counted_noun(len(first.looked_up), "place")
        return f"{status.precision} in {found}, which {first.where} looks up at run time"
    known = " in ".join(filter(None, [" or ".join(first.possible), place]))
    return f"decided at run time: {first.where}{f' ({known})' if known else ''}{_count_more_places(others)}"


def _describe_code(status: ProjectStatus) -> str:
    if status.in_code:
        first, *others = status.in_code
        return f"decided in the code: {first.file}:{first.line} {first.code}{_count_more_places(others)}"
    if status.casts:
        first, *others = status.casts
        place = f"{first.file}:{first.line} {first.code}{_count_more_places(others)}"
        return f"not set; the code casts to 16 bits: {place}"
    return "the deciding value is known only at run time" if status.unresolved else "not set anywhere"


def _count_more_places(others: Sequence[object]) -> str:
    return f", and {format_counted_noun(len(others), 'more place')}" if others else ""


def _is_same_run(one: LocatedFinding, other: LocatedFinding) -> bool:
    same_words = one.id.startswith(_IN_EVERY_FILE) or one.evidence == other.evidence
    return one.id == other.id and one.severity == other.severity and same_words


def _iterate_finding_boxes(findings: Sequence[LocatedFinding]) -> Iterator[Box]:
    """Yield each finding outside of tests once, with all of its places."""
    for finding in findings:
        places = [other for other in findings if _is_same_run(finding, other) and not other.in_tests]
        if finding.in_tests or places[0] is not finding:
            continue
        box = build_located_box(finding)
        if len(places) > 1:
            more = [f"and {len(places) - _MOST_PLACES} more: see --json"] if len(places) > _MOST_PLACES else []
            named = (other.where for other in places[:_MOST_PLACES])
            listed = (Paragraph(f"in {len(places)} places:"), Items((*named, *more), wrap=False))
            box = replace(box, blocks=(*box.blocks, *listed))
        yield box


def _list_test_findings(findings: Sequence[LocatedFinding]) -> Iterator[Block]:
    places: dict[str, list[str]] = {}
    for finding in findings:
        if finding.in_tests:
            places.setdefault(finding.id, []).append(finding.where)
    if places:
        yield Heading("In tests", "these decide nothing")
        more = {name: f" and {len(found) - 1} more" if len(found) > 1 else "" for name, found in places.items()}
        yield Items(tuple(f"{name}  {found[0]}{more[name]}" for name, found in places.items()), wrap=False)


def _tabulate_settings(rows: Sequence[FoundSetting]) -> Table:
    columns = tuple(Column(title, wrap="fold", widest=widest) for title, widest in _SETTING_WIDTHS.items())
    cells = [
        (_format_setting_place(row), f"{row.key} = {format_found_value(row.value)}", row.means)
        for row in rows[:_MOST_ROWS]
    ]
    if len(rows) > _MOST_ROWS:
        cells.append(("", "", f"and {len(rows) - _MOST_ROWS} more: see --json"))
    return Table(columns, tuple(cells))


def _build_winners_table(run: RunReport) -> Iterator[Block]:
    if not any(row.overrode or row.unread for row in run.provenance):
        return
    started = f"started by {_START[run.start]}"
    yield Heading("Who wins", f"{run.name}, {started}" if run.launched else f"no launch line; assumed {started}")
    columns = [Column(title, wrap="never") for title in ("tool", "runs in")]
    columns += [Column(title, wrap="fold") for title in ("because of", "over")]
    rows = []
    for row in run.provenance:
        losers = [*map(_describe_setting, row.overrode), *(f"{_describe_setting(s)}, not read" for s in row.unread)]
        because = "\n".join(map(_describe_setting, row.winners)) or "nothing: its default"
        runs_in = "\nor ".join(row.possible) or "not known"
        rows.append((row.tool, runs_in, because, "\n".join(losers) or "-"))
    yield Table(tuple(columns), tuple(rows))


def _describe_setting(setting: FoundSetting) -> str:
    return f"{setting.key} = {format_found_value(setting.value)} ({_format_setting_place(setting)})"


def _format_setting_place(setting: FoundSetting) -> str:
    return f"{setting.place}:{setting.line}" if setting.line else setting.place


def _build_patch_blocks(patch: ProjectPatch, status: ProjectStatus) -> Iterator[Block]:
    yield Heading("Patch", "" if patch.patch else "none: no finding has an edit")
    if patch.patch:
        yield Code(patch.patch, "diff")
    if patch.refused:
        words = "settings are left alone, because no edit ends in settings that agree; --fix NAME decides:"
        if not status.decided:
            words = "settings are left alone, because what they say is replaced at run time:"
        yield Paragraph(escape_to_one_line(f"{words}\n{patch.refused}"), indent=True)
    if patch.files_modified is not None:
        files = ", ".join(patch.files_modified) or "none"
        yield Paragraph(escape_to_one_line(f"Files modified: {files}"), indent=True)
    elif patch.patch:
        yield Paragraph("apply it with --fix --yes", indent=True)
