"""Lay out a plan: its choice, the candidates that were measured, and what the choice means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep import numbers
from halfstep.page import (
    Block,
    Column,
    Heading,
    Interval,
    Intervals,
    Page,
    Pairs,
    Paragraph,
    Span,
    Style,
    Table,
    charts_of,
)
from halfstep.report.json_fields import fields, known, number, rows, setting, text
from halfstep.report.outlook import Outlook, outlook_of_plan, speed_said

HEADS = ["Candidate", "Speed", "Peak, predicted", "First update", "As fp32 trains", "Passed over because"]


@dataclass(frozen=True)
class PlanFacts:
    """A plan as `halfstep plan --json` printed it."""

    file: Path
    plain: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"plan for {text(self.plain.get('name'), 120)}"

    @property
    def choice(self) -> dict[str, Any]:
        return fields(self.plain.get("choice"))

    @property
    def verdict(self) -> str:
        """Return the choice in one sentence."""
        name = text(self.choice.get("name"), 80)
        device = text(fields(self.plain.get("device")).get("name"), 120)
        if not self.plain.get("stay"):
            return f"Take {name} on {device}: {speed_said(self.choice)}."
        why = text(fields(self.plain.get("reasons")).get("precision"), 400).removeprefix("stay in fp32: ")
        how = "" if name == "fp32" else f" ({name})"
        return f"Stay in fp32{how} on {device}: {why or 'nothing else was measured'}."

    @property
    def table(self) -> list[list[str]]:
        """Return a row for each candidate, the simplest first."""
        return [_row(cell) for cell in rows(self.plain.get("ladder"))]

    @property
    def drawing(self) -> Intervals:
        """Return the speed of each candidate with its interval, next to strict fp32's 1."""
        laid = []
        for cell in rows(self.plain.get("ladder")):
            speed = fields(cell.get("speed"))
            if speed and cell.get("setting") != self.plain.get("baseline"):
                low, at, high = (number(speed.get(key)) for key in ("low", "speedup", "high"))
                # A race gives the interval; whether it holds 1 is the verdict.
                tone: Style = "good" if low > 1 else "bad" if high < 1 else "warn"
                verdict = text(speed.get("verdict"), 40) or {"good": "faster", "bad": "slower"}.get(tone, "can't tell")
                laid.append(Interval(text(cell.get("name"), 80), f"{at:.2f}x", verdict, tone, low, at, high))
        legend = "dot: median, line: its 95 % interval"
        return Intervals("Speed", tuple(laid), "times as fast as strict fp32", 1.0, legend=legend)

    def page(self) -> Page:
        """Return the page of the plan."""
        from halfstep.report.run_page import outlook_blocks

        blocks: list[Block] = [Paragraph(self.verdict)]
        if self.plain.get("interrupted"):
            blocks.append(Paragraph(Span("Interrupted: this is the best of what had been measured.", "warn")))
        blocks += [Heading("Why"), Pairs(tuple(self.reasons)), Heading("Candidates")]
        blocks.append(Table(tuple(map(Column, HEADS)), tuple(map(tuple, self.table))))
        blocks += [*charts_of(self.drawing), *outlook_blocks(self.outlook)]
        blocks += [Heading("Settings of the plan"), Pairs(tuple(self.changes))]
        blocks += [Heading("Provenance"), Pairs(tuple(self.provenance))]
        return Page(self.label, tuple(blocks), str(self.file))

    @property
    def outlook(self) -> Outlook:
        return outlook_of_plan(self.plain)

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """Return why each part of the choice is as it is, and why the runner-up is not."""
        why = [(part.capitalize(), text(said, 500)) for part, said in fields(self.plain.get("reasons")).items()]
        second = text(fields(self.plain.get("runner_up")).get("name"), 80)
        return [*why, ("Runner-up", f"{second}: {text(self.plain.get('why_not'), 400)}")] if second else why

    @property
    def changes(self) -> list[tuple[str, str]]:
        """Return the settings of the recipe that the plan sets."""
        return [(key, setting(value)) for key, value in fields(self.plain.get("changes")).items()]

    @property
    def provenance(self) -> list[tuple[str, str]]:
        """Return the conditions of the measurement."""
        seconds = number(self.plain.get("seconds"))
        took = [("Took", numbers.duration(seconds))] if known(seconds) else []
        return [("File", str(self.file)), *condition_rows(fields(self.plain.get("conditions"))), *took]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can represent."""
        known_as = {"kind": "plan", "file": str(self.file), "verdict": self.verdict}
        return {**known_as, "outlook": self.outlook.as_dict(), "plan": dict(self.plain)}


def condition_rows(conditions: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the conditions of a measurement in words."""
    return [(key.capitalize(), _in_words(value)) for key, value in conditions.items()]


def _in_words(value: object) -> str:
    listed = ", ".join(f"{key} {inner}" for key, inner in fields(value).items())
    return listed or setting(value) or "none"


def _row(cell: Mapping[str, Any]) -> list[str]:
    peak, first = number(cell.get("peak")), number(cell.get("first_step"))
    parity = fields(cell.get("parity"))
    return [
        text(cell.get("name"), 80),
        speed_said({"speed": cell.get("speed")}).replace(" strict fp32", ""),
        numbers.size(peak) if known(peak) else "not predicted",
        numbers.duration(first) if known(first) else "not measured",
        text(parity.get("verdict"), 60) or "not measured",
        text(cell.get("cut"), 300) or "-",
    ]
