"""The result of an audit, and its page: the verdict, the findings, the modules and islands, and one command to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.measure.audit.model_tree import ModuleFlops, draw_model_tree
from halfstep.measure.audit.report import IslandVerdict, ModuleRow, RangeOfValues
from halfstep.numbers import format_counted_noun, format_percent
from halfstep.observe.flops import is_fp8
from halfstep.observe.lint.listener import PlacedFinding
from halfstep.page import (
    Block,
    Column,
    Heading,
    Instruction,
    Page,
    Paragraph,
    Span,
    Style,
    Table,
    Text,
    Tree,
    build_charts,
    build_finding_box,
)

_MOST_MODULES = 12
_MIXED = 0.995
_FEW_BITS = 1.0
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NEEDED: dict[bool | None, Span] = {
    True: Span("needed", "good"), False: Span("not needed", "warn"), None: Span("unknown", "dim"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Audit(JsonResult, PageResult):
    """Which format each part of a model is in, and the effect on its values."""

    subject: str
    precision: str
    format: str
    """The format expected for its matrix work."""
    device: str
    run: bool
    """Whether values were computed; otherwise formats follow a device's rules and no values are known."""
    flops: Mapping[str, int]
    """FLOPs by format, islands included."""
    share: float | None
    """Share of the work outside islands that is in that format; None if there is no such work."""
    island_share: float
    """Share of all work that is inside islands."""
    loss: float | None
    loss_scale: float | None
    rows: tuple[ModuleRow, ...]
    islands: tuple[IslandVerdict, ...]
    spotted: tuple[PlacedFinding, ...]
    notes: tuple[str, ...]
    interrupted: bool = False
    stopped: str | None = None
    json_keys = (
        *("subject", "verdict", "precision", "format", "device", "run", "share", "island_share", "flops", "loss"),
        *("loss_scale", "modules", "islands", "findings", "notes", "stopped", "interrupted"),
    )

    def page(self) -> Page:
        """Return the page about it."""
        return build_audit_page(self)

    @property
    def verdict(self) -> str:
        """Return one line: the share of the work in the expected format, and the number of findings."""
        if not self.rows and self.interrupted:
            return "interrupted before a step was seen"
        work = "all work is in islands" if self.island_share else "no matrix product or convolution was seen"
        in_fp8 = sum(work for name, work in self.flops.items() if is_fp8(name))
        if in_fp8:
            work = f"{format_percent(in_fp8 / sum(self.flops.values()))} of the work in fp8"
        if self.share is not None:
            outside = " outside islands" if self.island_share else ""
            enough = f"of the {'rest' if in_fp8 else 'work'}{outside} in {self.format}, as requested"
            others = (
                f"{format_percent(self.share)} {enough}"
                if self.share >= 0.9
                else f"only {format_percent(self.share)} {enough}"
            )
            work = f"{work}, {others}" if in_fp8 else others
        count = len(self.spotted)
        worst = sum(one.finding.severity == "error" for one in self.spotted)
        found = format_counted_noun(count, "finding") if count else "no problems found"
        errors = "errors" if worst > 1 else "an error"
        return f"{work}; {found}" + (f", {errors if worst == count else f'{worst} of them {errors}'}" if worst else "")

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """Return the rows, as JSON names them."""
        return self.rows

    @property
    def findings(self) -> tuple[PlacedFinding, ...]:
        """Return the findings with their places, as JSON names them."""
        return self.spotted


def build_audit_page(audit: Audit, *, every: bool = False, picture: Path | None = None, command: str = "") -> Page:
    """Return the page of an audit; `every` lists each module, `command` is what to type next."""
    blocks: list[Block] = []
    if audit.interrupted:
        blocks.append(Paragraph(Span("interrupted: results so far", "warn")))
    worst = {one.finding.severity for one in audit.spotted}
    tone: Style = "bad" if "error" in worst else "warn" if "warning" in worst or audit.interrupted else "good"
    blocks += [
        Paragraph((Span(audit.precision, tone, strong=True), f": {audit.verdict}")),
        Paragraph(Span(_describe_audited_step(audit), "dim")),
    ]
    if audit.stopped:
        blocks.append(Paragraph(Span(f"the step ended early: {audit.stopped}", "warn")))
    for one in audit.spotted:
        finding = one.finding
        blocks.append(build_finding_box(finding.id, finding.severity, finding.evidence, finding.fix))
    blocks += [*_build_module_blocks(audit, every), *build_charts(draw_format_tree(audit))]
    if audit.islands:
        columns = (Column(wrap="fold", widest=34), Column(wrap="never"), Column(wrap="fold"))
        rows = tuple((one.path or "(the model itself)", _NEEDED[one.needed], one.why) for one in audit.islands)
        blocks += [Heading("Islands", "the same step without each of them"), Table(columns, rows)]
    blocks += [Paragraph(Span(note, "dim"), gap=n == 0) for n, note in enumerate(audit.notes)]
    if picture is not None and audit.rows:
        blocks.append(Paragraph(f"picture: {picture}", wrap=False, gap=not audit.notes))
    if command:
        blocks.append(Instruction(command, gap=True))
    return Page(f"audit of {audit.subject}", tuple(blocks), audit.device)


def draw_format_tree(audit: Audit) -> Tree:
    """Return the model by format."""
    return draw_model_tree(ModuleFlops(row.module, row.flops, row.island) for row in audit.rows)


def _describe_audited_step(audit: Audit) -> str:
    words = [audit.subject, audit.device]
    total = sum(audit.flops.values())
    if total:
        shares = ", ".join(f"{name} {format_percent(count / total)}" for name, count in audit.flops.items())
        words.append(f"all work: {shares}")
    if audit.island_share:
        words.append(f"{format_percent(audit.island_share)} in islands")
    if audit.loss_scale:
        words.append(f"loss scale {audit.loss_scale:.0f}")
    return "; ".join(words)


@dataclass(frozen=True)
class ModuleGroup:
    """Modules whose paths differ only by a number and whose formats agree."""

    pattern: str
    rows: tuple[ModuleRow, ...]

    @property
    def share(self) -> float:
        return sum(row.share for row in self.rows)

    def headroom_bits(self, way: str) -> float | None:
        """Return the least headroom of a way, `forward` or `backward`."""
        bits = [found.headroom_bits for found in self._numbers(way) if found.headroom_bits is not None]
        return min(bits, default=None)

    def underflow(self, way: str) -> float | None:
        """Return the largest share that vanished; None if no values are known."""
        return max((found.underflow for found in self._numbers(way)), default=None)

    def _numbers(self, way: str) -> list[RangeOfValues]:
        return [found for row in self.rows if (found := getattr(row, way)) is not None]


def group_modules(rows: Sequence[ModuleRow]) -> list[ModuleGroup]:
    """Merge modules whose paths differ only by a number and whose formats agree."""
    groups: dict[tuple[str, ...], list[ModuleRow]] = {}
    for row in rows:
        computed = [f"{name} {share:.2f}" for name, share in row.computed.items()]
        key = (
            _NUMBER.sub("*", row.module),
            row.kind,
            _join_format_names(row.stored),
            _join_format_names(row.saved),
            *computed,
        )
        groups.setdefault(key, []).append(row)
    return [
        ModuleGroup(found[0].module if len(found) == 1 else pattern, tuple(found))
        for (pattern, *_), found in groups.items()
    ]


def _build_module_blocks(audit: Audit, every: bool) -> Iterator[Block]:
    groups = [ModuleGroup(row.module, (row,)) for row in audit.rows] if every else group_modules(audit.rows)
    named = {module for one in audit.spotted for module in one.modules}

    def order(group: ModuleGroup) -> tuple[bool, float]:
        own = {row.module for row in group.rows}
        return not (own & named or group.rows[0].island in own), -group.share

    groups = sorted(groups, key=order)
    if not groups:
        return
    shown = groups if every else groups[:_MOST_MODULES]
    count = sum(len(group.rows) for group in shown)
    aside = "" if count == len(audit.rows) else f"; {count} of {len(audit.rows)}, see --all"
    yield Heading("Modules", f"modules with findings and islands first, then by FLOPs{aside}")
    yield _build_module_table(shown, audit.format)


def _build_module_table(groups: Sequence[ModuleGroup], asked: str) -> Table:
    columns = [
        Column("module", wrap="fold"),
        *(Column(title, wrap="never") for title in ("stored", "computed", "kept")),
    ]
    columns.append(Column("work", "right", "never"))
    ways = ("forward", "backward") if any(row.forward for group in groups for row in group.rows) else ()
    if ways:
        columns += [Column("headroom", "right", "never"), Column("vanish", "right", "never")]
        columns += [
            Column(f"gradients\n{title}", "right", "never", terminal="wide") for title in ("headroom", "vanish")
        ]
    rows = []
    for group in groups:
        first = group.rows[0]
        cells: list[Text] = [
            _format_group_name(group),
            _join_format_names(first.stored),
            _format_computed_cell(first, asked),
            _join_format_names(first.saved),
        ]
        cells.append(format_percent(group.share) if group.share else "-")
        for way in ways:
            cells += [
                _format_headroom_bits(group.headroom_bits(way)),
                format_percent(lost) if (lost := group.underflow(way)) else "-",
            ]
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows))


def _format_group_name(group: ModuleGroup) -> Text:
    parts: list[str | Span] = [group.pattern]
    if len(group.rows) > 1:
        kind = f" {group.rows[0].kind}" if group.pattern.endswith("*") else ""
        parts.append(Span(f"{kind} x{len(group.rows)}", "dim"))
    if group.rows[0].island == group.pattern:
        parts.append(Span(" (island)", "note"))
    return tuple(parts)


def _format_computed_cell(row: ModuleRow, asked: str) -> Text:
    if not row.computed:
        return Span("-", "dim")
    name, share = next(iter(row.computed.items()))
    # Work in another format than requested, and in no island: probably unintended.
    is_stray = bool(row.flops) and name != asked and row.island is None
    style: Style = "warn" if is_stray else "note" if row.island is not None else ""
    return Span(name if share >= _MIXED else f"{name} {share:.0%}", style)


def _join_format_names(sizes: Mapping[str, int]) -> str:
    names = [name for name, _ in sorted(sizes.items(), key=lambda item: -item[1])]
    return "+".join(names[:2]) if names else "-"


def _format_headroom_bits(bits: float | None) -> Text:
    if bits is None:
        return Span("-", "dim")
    # Adding 0.0 turns -0.0 into 0.0.
    return Span(f"{bits + 0.0:.1f} bits", "bad" if bits < 0 else "warn" if bits < _FEW_BITS else "")
