"""The page of a run: the verdict, incidents, samples, curves, and what its precision means."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from halfstep.measure.audit.model_tree import ModuleFlops, model_tree
from halfstep.measure.memory_bars import MemoryUse, drawable_parts, memory_bars
from halfstep.page import (
    Block,
    Box,
    Column,
    Command,
    Details,
    Heading,
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
    charts_of,
)
from halfstep.report.json_fields import fields, known, number, rows, text
from halfstep.report.outlook import HIGH, LOW, Outlook, estimate_columns, outlook_of_run
from halfstep.report.run_charts import curves_of, headroom_of, memory_of, not_finite, speed_of
from halfstep.report.run_facts import Incident, RunFacts, figure_rows, incidents, precision_rows, provenance
from halfstep.report.run_journal import curve_points
from halfstep.runs.listing import FINISHED, RUNNING, SILENT, STOPPED

MOST_MODULES = 12
"""Modules in a table of headroom, the tightest first."""
_TONES: dict[str, Style] = {FINISHED: "good", RUNNING: "good", STOPPED: "warn", SILENT: "warn"}
_CALM = ("warm up", "probation", "alarm", "bad samples")
_LEVELS: dict[str, Style] = {LOW: "good", HIGH: "bad"}


def run_page(run: RunFacts, pictures: Sequence[Picture] = (), left_out: Sequence[str] = ()) -> Page:
    """Return the page of one run, with these of its pictures, and why others were left out."""
    tone = _TONES.get(run.state.word, "bad")
    chips: list[tuple[str, Text]] = [("", Span(run.state.word, tone)), ("", run.chosen), *figure_rows(run)]
    found = incidents(run)
    blocks: list[Block] = [Paragraph(run.verdict), Pairs(tuple(chips), chips=True)]
    blocks += _incidents(run, found) if found or tone == "bad" else []
    # Samples come second; if there are none, at the end.
    samples = [*_samples(pictures, left_out)]
    has_samples = bool(pictures or left_out)
    blocks += samples if has_samples and found else []
    blocks += _curves(run)
    blocks += samples if has_samples and not found else []
    blocks += [Heading("Precision"), Pairs(tuple(precision_rows(run))), *run_details(run)]
    blocks += samples if not has_samples else []
    return Page(run.label, tuple(blocks), str(run.folder))


def run_details(run: RunFacts) -> Iterator[Block]:
    """Yield the facts other than curves and incidents."""
    yield Heading("Speed and memory while it ran")
    none = Paragraph((Span("Not measured: a run measures every ", "dim"), Span("run.log_every", "code"), " steps."))
    yield from charts_of(*speed_of(run), memory_of(run)) or (none,)
    yield from _memory(run)
    yield from _model(run)
    yield from _headroom(run)
    yield from outlook_blocks(outlook_of_run(run))
    yield Heading("Provenance")
    yield Pairs(tuple(provenance(run)))
    yield Details("The whole recipe", (Pairs(tuple(run.recipe.items())),))


def compared_run_blocks(run: RunFacts, pictures: Sequence[Picture], left_out: Sequence[str]) -> tuple[Block, ...]:
    """Return a run of several that are compared: its curves are those of the comparison."""
    found = incidents(run)
    return (
        Paragraph(run.verdict),
        *(_incidents(run, found) if found or run.state.word not in _TONES else ()),
        *_samples(pictures, left_out),
        Heading("Precision"),
        Pairs(tuple(precision_rows(run))),
        *run_details(run),
    )


def _incidents(run: RunFacts, found: Sequence[Incident]) -> Iterator[Block]:
    yield Heading("Incidents")
    # The last incident of a run that was given up says why; an error of another kind is said once, here.
    if run.state.word not in _TONES and run.why and not any(one.ended_run for one in found):
        yield Box("Why it ended", (Paragraph(run.why), *_do(run.do)), "bad")
    yield from map(_incident, found)


def _incident(one: Incident) -> Box:
    place = f"Step {one.attempt}: " if one.attempt else ""
    blocks: list[Block] = [Paragraph(one.sentence)]
    blocks += [Pairs(tuple(one.culprit))] if one.culprit else []
    if one.remedies:
        blocks += [
            Heading("Suggested fixes", level=3),
            Items(tuple(f"{remedy}: {works}" for remedy, works in one.remedies)),
        ]
    blocks += [Heading("Evidence", level=3), Items(tuple(one.evidence))] if one.evidence else []
    blocks += [Heading("Action taken", level=3), Items(tuple(one.done)), *_do(one.do)]
    blocks += [Command(one.replay, "replay it: ")] if one.replay else []
    title = f"{'Why it ended: ' if one.ended_run else ''}{place}{one.cause}"
    return Box(title, tuple(blocks), "warn" if one.cause in _CALM else "bad")


def _do(command: str) -> tuple[Command, ...]:
    return (Command(command, "do: "),) if command else ()


def _samples(pictures: Sequence[Picture], left_out: Sequence[str]) -> Iterator[Block]:
    yield Heading("Samples")
    if pictures:
        yield Pictures(tuple(pictures))
    else:
        yield Paragraph(Span(f"No samples {'are shown here' if left_out else 'were drawn'}.", "dim"))
    for line in left_out:
        yield Paragraph(Span(f"Left out: {line}", "dim"))


def _curves(run: RunFacts) -> Iterator[Block]:
    yield Heading("Curves")
    charts = charts_of(*curves_of(run))
    if not charts:
        yield Paragraph(Span("No step was taken, so there is nothing to draw.", "dim"))
        return
    skipped = "A triangle is a skipped step; hover for its reason, and over a curve for its numbers."
    yield Paragraph(Span(skipped if run.recorded.skipped else "Hover over a curve for its numbers.", "dim"))
    yield from charts
    if lost := not_finite(run):
        yield Paragraph(Span(f"No step has a finite value of: {', '.join(lost)}.", "warn"))


def _examine(run: RunFacts) -> Command:
    return Command(f"halfstep report {shlex.quote(str(run.folder))} --examine", "add it: ")


def _memory(run: RunFacts) -> Iterator[Block]:
    yield Heading("Memory of an update")
    uses = _memory_uses(run)
    yield from charts_of(memory_bars(uses, "Tensors at the peak of an update"))
    if not any(drawable_parts(use) for use in uses):
        yield Paragraph("No prediction was recorded.")
        yield _examine(run)
    savings = rows(fields(fields(run.examined.get("estimate")).get("verdict")).get("savings"))
    for row in savings:
        if row.get("why"):
            yield Paragraph(Span(f"{text(row.get('precision'), 20)}: {text(row.get('why'), 400)}.", "dim"))
    if not curve_points(run.recorded.speeds, "memory.device_peak_bytes").y:
        note = (
            "No figures of a device's allocator were recorded. On a CPU there is none: the figure is the memory of the "
            "whole process, most of it libraries."
        )
        yield Paragraph(Span(note, "dim"))


def _memory_uses(run: RunFacts) -> list[MemoryUse]:
    measured = max(curve_points(run.recorded.speeds, "memory.device_peak_bytes").y, default=None)
    columns = [(text(fields(c.get("setting")).get("precision"), 20), c) for c in estimate_columns(run.examined)]
    uses = [
        MemoryUse(
            name,
            {part: number(size) for part, size in fields(column.get("at_peak")).items()},
            measured if name == run.chosen else None,
        )
        for name, column in columns
    ]
    if not any(use.name == run.chosen for use in uses):
        uses.append(MemoryUse(run.chosen, {}, measured))
    return uses


def _model(run: RunFacts) -> Iterator[Block]:
    yield Heading("The model by format")
    audit = fields(run.examined.get("audit"))
    charts = charts_of(_module_tree(rows(audit.get("modules"))))
    if not charts:
        yield Paragraph("Which module computes in which format was not recorded.")
        yield _examine(run)
        return
    device = text(audit.get("device"), 200) or "an unnamed device"
    how = f"One step of the recipe's model on {device}, with random weights. Hover over a module for its shares."
    yield Paragraph(f"{text(audit.get('verdict'), 400)}.")
    yield from charts
    yield Paragraph(Span(how, "dim"))


def _module_tree(modules: Iterable[Mapping[str, Any]]) -> Tree:
    return model_tree(
        ModuleFlops(
            text(row.get("module"), 300) or "?",
            {name: int(value) for name, n in fields(row.get("flops")).items() if known(value := number(n))},
            text(row["island"], 300) if row.get("island") is not None else None,
        )
        for row in modules
    )


def _headroom(run: RunFacts) -> Iterator[Block]:
    yield Heading("Headroom")
    parts: list[tuple[Block, ...]] = []
    chart = charts_of(headroom_of(run))
    if chart:
        how = "During training: the bits between the largest output of the tightest module and the end of its format."
        tightest = sorted(run.recorded.headroom.items(), key=lambda item: item[1].value)[:MOST_MODULES]
        lines = [(module, f"{point.value:.1f}", f"{point.attempt:,}") for module, point in tightest]
        columns = (Column("Module"), Column("Least bits left", "right"), Column("At step", "right"))
        parts += [(Paragraph(Span(how, "dim")), *chart), (Table(columns, tuple(lines)),)]
    audited = _list_audited_modules(fields(run.examined.get("audit")))
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
    for row in rows(audit.get("modules")):
        bits = number(fields(row.get("forward")).get("headroom_bits"))
        if known(bits):
            found.append((bits, text(row.get("module"), 200), ", ".join(fields(row.get("computed"))), row))
    lowest = sorted(found, key=lambda one: one[0])[:MOST_MODULES]
    return [(module, f"{bits:.1f}", formats, text(row.get("kind"), 80)) for bits, module, formats, row in lowest]


def outlook_blocks(found: Outlook) -> Iterator[Block]:
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
