"""The page of a run: the verdict, incidents, samples, curves, and what its precision means."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from halfstep.measure.audit.model_tree import ModuleFlops, draw_model_tree
from halfstep.measure.memory_bars import MemoryUse, draw_memory_bars, select_drawable_parts
from halfstep.page import (
    Block,
    Box,
    Column,
    Details,
    Heading,
    Instruction,
    Items,
    Page,
    Pairs,
    Paragraph,
    Picture,
    Pictures,
    SideBySide,
    Span,
    Style,
    Table,
    Text,
    Tree,
    build_charts,
)
from halfstep.report.json_fields import coerce_mapping, coerce_number, coerce_rows, coerce_text, is_known_number
from halfstep.report.outlook import HIGH, LOW, Outlook, build_run_outlook, list_estimate_columns
from halfstep.report.run_charts import (
    build_headroom_chart,
    build_memory_chart,
    build_run_charts,
    build_speed_charts,
    list_nonfinite_curves,
)
from halfstep.report.run_facts import (
    Incident,
    RunFacts,
    build_figure_rows,
    build_precision_rows,
    build_provenance_rows,
    collect_incidents,
)
from halfstep.report.run_journal import find_curve_points
from halfstep.runs.listing import FINISHED, RUNNING, SILENT, STOPPED

MOST_MODULES = 12
"""Modules in a table of headroom, the tightest first."""
_TONES: dict[str, Style] = {FINISHED: "good", RUNNING: "good", STOPPED: "warn", SILENT: "warn"}
_CALM = ("warm up", "probation", "alarm", "bad samples")
_LEVELS: dict[str, Style] = {LOW: "good", HIGH: "bad"}


def build_run_page(run: RunFacts, pictures: Sequence[Picture] = (), left_out: Sequence[str] = ()) -> Page:
    """Return the page of one run, with these of its pictures, and why others were left out."""
    tone = _TONES.get(run.state.word, "bad")
    chips: list[tuple[str, Text]] = [("", Span(run.state.word, tone)), ("", run.chosen), *build_figure_rows(run)]
    found = collect_incidents(run)
    blocks: list[Block] = [Paragraph(run.verdict), Pairs(tuple(chips), chips=True)]
    blocks += _build_incident_blocks(run, found) if found or tone == "bad" else []
    # Samples come second; if there are none, at the end.
    samples = [*_build_sample_blocks(pictures, left_out)]
    has_samples = bool(pictures or left_out)
    blocks += samples if has_samples and found else []
    blocks += _build_curve_blocks(run)
    blocks += samples if has_samples and not found else []
    blocks += [Heading("Precision"), Pairs(tuple(build_precision_rows(run))), *build_run_details(run)]
    blocks += samples if not has_samples else []
    return Page(run.label, tuple(blocks), str(run.folder))


def build_run_details(run: RunFacts) -> Iterator[Block]:
    """Yield the facts other than curves and incidents."""
    yield Heading("Speed and memory while it ran")
    none = Paragraph((Span("Not measured: a run measures every ", "dim"), Span("run.log_every", "code"), " steps."))
    yield from build_charts(*build_speed_charts(run), build_memory_chart(run)) or (none,)
    yield from _build_memory_blocks(run)
    yield from _build_model_blocks(run)
    yield from _build_headroom_blocks(run)
    yield from build_outlook_blocks(build_run_outlook(run))
    yield Heading("Provenance")
    yield Pairs(tuple(build_provenance_rows(run)))
    yield Details("The whole recipe", (Pairs(tuple(run.recipe.items())),))


def build_compared_run_blocks(run: RunFacts, pictures: Sequence[Picture], left_out: Sequence[str]) -> tuple[Block, ...]:
    """Return a run of several that are compared: its curves are those of the comparison."""
    found = collect_incidents(run)
    return (
        Paragraph(run.verdict),
        *(_build_incident_blocks(run, found) if found or run.state.word not in _TONES else ()),
        *_build_sample_blocks(pictures, left_out),
        Heading("Precision"),
        Pairs(tuple(build_precision_rows(run))),
        *build_run_details(run),
    )


def _build_incident_blocks(run: RunFacts, found: Sequence[Incident]) -> Iterator[Block]:
    yield Heading("Incidents")
    # The last incident of a run that was given up says why; an error of another kind is said once, here.
    if run.state.word not in _TONES and run.why and not any(one.ended_run for one in found):
        yield Box("Why it ended", (Paragraph(run.why), *_build_fix_instruction(run.do)), "bad")
    yield from map(_build_incident_box, found)


def _build_incident_box(one: Incident) -> Box:
    place = f"Step {one.attempt}: " if one.attempt else ""
    blocks: list[Block] = [Paragraph(one.sentence)]
    blocks += [Pairs(tuple(one.culprit))] if one.culprit else []
    if one.remedies:
        blocks += [
            Heading("Suggested fixes", level=3),
            Items(tuple(f"{remedy}: {works}" for remedy, works in one.remedies)),
        ]
    blocks += [Heading("Evidence", level=3), Items(tuple(one.evidence))] if one.evidence else []
    blocks += [Heading("Action taken", level=3), Items(tuple(one.done)), *_build_fix_instruction(one.do)]
    blocks += [Instruction(one.replay, "replay it: ")] if one.replay else []
    title = f"{'Why it ended: ' if one.ended_run else ''}{place}{one.cause}"
    return Box(title, tuple(blocks), "warn" if one.cause in _CALM else "bad")


def _build_fix_instruction(command: str) -> tuple[Instruction, ...]:
    return (Instruction(command, "do: "),) if command else ()


def _build_sample_blocks(pictures: Sequence[Picture], left_out: Sequence[str]) -> Iterator[Block]:
    yield Heading("Samples")
    if pictures:
        yield Pictures(tuple(pictures))
    else:
        yield Paragraph(Span(f"No samples {'are shown here' if left_out else 'were drawn'}.", "dim"))
    for line in left_out:
        yield Paragraph(Span(f"Left out: {line}", "dim"))


def _build_curve_blocks(run: RunFacts) -> Iterator[Block]:
    yield Heading("Curves")
    charts = build_charts(*build_run_charts(run))
    if not charts:
        yield Paragraph(Span("No step was taken, so there is nothing to draw.", "dim"))
        return
    skipped = "A triangle is a skipped step; hover for its reason, and over a curve for its numbers."
    yield Paragraph(Span(skipped if run.recorded.skipped else "Hover over a curve for its numbers.", "dim"))
    yield from charts
    if lost := list_nonfinite_curves(run):
        yield Paragraph(Span(f"No step has a finite value of: {', '.join(lost)}.", "warn"))


def _suggest_examining(run: RunFacts) -> Instruction:
    return Instruction(f"halfstep report {shlex.quote(str(run.folder))} --examine", "add it: ")


def _build_memory_blocks(run: RunFacts) -> Iterator[Block]:
    yield Heading("Memory of an update")
    uses = _list_memory_uses(run)
    yield from build_charts(draw_memory_bars(uses, "Tensors at the peak of an update"))
    if not any(select_drawable_parts(use) for use in uses):
        yield Paragraph("No prediction was recorded.")
        yield _suggest_examining(run)
    savings = coerce_rows(coerce_mapping(coerce_mapping(run.examined.get("estimate")).get("verdict")).get("savings"))
    for row in savings:
        if row.get("why"):
            yield Paragraph(
                Span(f"{coerce_text(row.get('precision'), 20)}: {coerce_text(row.get('why'), 400)}.", "dim")
            )
    if not find_curve_points(run.recorded.speeds, "memory.device_peak_bytes").y:
        note = (
            "No figures of a device's allocator were recorded. On a CPU there is none: the figure is the memory of the "
            "whole process, most of it libraries."
        )
        yield Paragraph(Span(note, "dim"))


def _list_memory_uses(run: RunFacts) -> list[MemoryUse]:
    measured = max(find_curve_points(run.recorded.speeds, "memory.device_peak_bytes").y, default=None)
    columns = [
        (coerce_text(coerce_mapping(c.get("setting")).get("precision"), 20), c)
        for c in list_estimate_columns(run.examined)
    ]
    uses = [
        MemoryUse(
            name,
            {part: coerce_number(size) for part, size in coerce_mapping(column.get("at_peak")).items()},
            measured if name == run.chosen else None,
        )
        for name, column in columns
    ]
    if not any(use.name == run.chosen for use in uses):
        uses.append(MemoryUse(run.chosen, {}, measured))
    return uses


def _build_model_blocks(run: RunFacts) -> Iterator[Block]:
    yield Heading("The model by format")
    audit = coerce_mapping(run.examined.get("audit"))
    charts = build_charts(_build_module_tree(coerce_rows(audit.get("modules"))))
    if not charts:
        yield Paragraph("Which module computes in which format was not recorded.")
        yield _suggest_examining(run)
        return
    device = coerce_text(audit.get("device"), 200) or "an unnamed device"
    how = f"One step of the recipe's model on {device}, with random weights. Hover over a module for its shares."
    yield Paragraph(f"{coerce_text(audit.get('verdict'), 400)}.")
    yield from charts
    yield Paragraph(Span(how, "dim"))


def _build_module_tree(modules: Iterable[Mapping[str, Any]]) -> Tree:
    return draw_model_tree(
        ModuleFlops(
            coerce_text(row.get("module"), 300) or "?",
            {
                name: int(value)
                for name, n in coerce_mapping(row.get("flops")).items()
                if is_known_number(value := coerce_number(n))
            },
            coerce_text(row["island"], 300) if row.get("island") is not None else None,
        )
        for row in modules
    )


def _build_headroom_blocks(run: RunFacts) -> Iterator[Block]:
    yield Heading("Headroom")
    parts: list[tuple[Block, ...]] = []
    chart = build_charts(build_headroom_chart(run))
    if chart:
        how = "During training: the bits between the largest output of the tightest module and the end of its format."
        tightest = sorted(run.recorded.headroom.items(), key=lambda item: item[1].value)[:MOST_MODULES]
        lines = [(module, f"{point.value:.1f}", f"{point.attempt:,}") for module, point in tightest]
        columns = (Column("Module"), Column("Least bits left", "right"), Column("At step", "right"))
        parts += [(Paragraph(Span(how, "dim")), *chart), (Table(columns, tuple(lines)),)]
    audited = _list_audited_modules(coerce_mapping(run.examined.get("audit")))
    if audited:
        how = "In one step of the audit, the modules with the least."
        heads = (Column("Module"), Column("Bits left", "right"), Column("Computes in"), Column("Kind"))
        parts.append((Paragraph(Span(how, "dim")), Table(heads, tuple(audited))))
    if parts:
        yield SideBySide(tuple(parts))
    else:
        why = "Not recorded: the guard's monitors sample it, from the tenth step on, unless "
        yield Paragraph((Span(why, "dim"), Span("guard.mode=off", "code"), "."))


def _list_audited_modules(audit: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the modules with the least headroom: path, bits, formats and kind."""
    found = []
    for row in coerce_rows(audit.get("modules")):
        bits = coerce_number(coerce_mapping(row.get("forward")).get("headroom_bits"))
        if is_known_number(bits):
            found.append(
                (bits, coerce_text(row.get("module"), 200), ", ".join(coerce_mapping(row.get("computed"))), row)
            )
    lowest = sorted(found, key=lambda one: one[0])[:MOST_MODULES]
    return [(module, f"{bits:.1f}", formats, coerce_text(row.get("kind"), 80)) for bits, module, formats, row in lowest]


def build_outlook_blocks(found: Outlook) -> Iterator[Block]:
    """Yield what a precision means: for speed and memory, benefits, expectations and risks."""
    yield Heading("What this precision means")
    first: list[Block] = [Heading("For speed and memory", level=3), Pairs(tuple(found.impact))]
    if found.benefits:
        first += [Heading("Benefits to expect", level=3), Items(tuple(found.benefits))]
    nothing = Paragraph(Span("Nothing was measured yet.", "dim"))
    second = (
        Heading("What to expect while it trains", level=3),
        Pairs(tuple(found.expect)) if found.expect else nothing,
    )
    yield SideBySide((tuple(first), second))
    yield Heading("Risks", level=3)
    if found.risks:
        lines = tuple((one.what, Span(one.level, _LEVELS.get(one.level, "warn")), one.evidence) for one in found.risks)
        yield Table((Column("Risk"), Column("Level"), Column("Evidence")), lines)
    else:
        yield Paragraph(Span("No risk was recorded.", "dim"))
