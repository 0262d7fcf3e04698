"""Failed steps on record and run again, and their pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.draw.notebook import PageResult
from halfstep.errors import choose_caller_wording
from halfstep.formats import FP32
from halfstep.guard.failed_steps.reading import suggest_replay
from halfstep.guard.verdict import Culprit, Verdict
from halfstep.json_data import JsonResult, convert_to_json_data
from halfstep.numbers import format_counted_noun, format_number
from halfstep.observe.recorder import OUTSIDE
from halfstep.page import Block, Column, Heading, Instruction, Items, Page, Pairs, Paragraph, Span, Table, Text


@dataclass(frozen=True)
class RecordedStep:
    """The record of a failed step."""

    attempt: int
    step: int
    """Steps applied before it."""
    reason: str | None
    loss: float
    grad_norm: float
    loss_scale: float
    precision: str
    islands: tuple[str, ...]
    device: object
    verdict: Verdict
    without: str
    """Why its tensors were not kept; empty if they were."""


@dataclass(frozen=True)
class ListedStep(JsonResult):
    """A failed step of a run: its record, or the problem with it."""

    path: Path
    attempt: int
    recorded: RecordedStep | None
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the fields of the record where there is one."""
        damaged = {"attempt": self.attempt, "problem": self.problem}
        return {"path": str(self.path), **(convert_to_json_data(self.recorded) if self.recorded else damaged)}


@dataclass(frozen=True)
class FailedStepList(PageResult):
    """The failed steps of a run that were recorded."""

    run: Path
    guard: str
    """The guard mode of the run's recipe."""
    failed_steps: tuple[ListedStep, ...]

    def page(self) -> Page:
        """Return the page of the recorded failed steps, or that there are none."""
        title = f"failed steps of {self.run}"
        if not self.failed_steps:
            why = "A step is recorded when the guard diagnoses it, and no step of this run needed that."
            if self.guard == "off":
                why = "Its recipe says `guard: off`, and then nothing is recorded; `--guard watch` would."
            none = Paragraph(f"{self.run} has no recorded failed step.")
            return Page(title, (none, Paragraph(Span(why, "dim"), indent=True)))
        blocks: list[Block] = []
        for row in self.failed_steps:
            name, recorded = Span(f"attempt {row.attempt:,}", strong=True), row.recorded
            if recorded is None:
                blocks.append(Paragraph((name, Span(f"  damaged: {row.problem}", "bad"))))
                continue
            told = f"  {str(recorded.reason).replace('_', ' ')} in {recorded.precision}"
            blocks += [
                Paragraph((name, Span(told, "dim"))),
                Paragraph(recorded.verdict.colored_sentence(), indent=True),
            ]
            if recorded.without:
                words = Span(f"cannot be run again: {recorded.without}", "warn")
                blocks.append(Paragraph(words, indent=True))
        whole = [row for row in self.failed_steps if row.recorded is not None and not row.recorded.without]
        if whole:
            blocks.append(
                Instruction(suggest_replay(self.run, whole[-1].attempt), lead=choose_caller_wording("  $ ", "  "))
            )
        return Page(title, tuple(blocks))


@dataclass(frozen=True)
class Rerun:
    """The step run once more, in one way."""

    way: str
    precision: str
    island: str | None
    """The module that was kept in fp32."""
    finite: bool
    loss: float
    grad_norm: float
    error: str
    """Why it could not be run; empty if it was."""


@dataclass(frozen=True)
class ReplayReport(PageResult):
    """A failed step, run again."""

    run: Path
    recorded: RecordedStep
    precision: str
    device: str
    verdict: Verdict | None = None
    """None if the step is finite here."""
    same_culprit: bool | None = None
    """Whether the origin is the recorded one."""
    reruns: tuple[Rerun, ...] = ()
    notes: tuple[str, ...] = ()
    """Reasons why the result may differ from the original step."""
    do: str = ""
    command: str = ""
    interrupted: bool = False
    """Whether Ctrl-C ended it, with the results so far."""

    def page(self) -> Page:
        """Return the page about it: the verdict, the origin, the reruns, and one command to type."""
        verdict = self.verdict or self.recorded.verdict
        blocks: list[Block] = []
        if self.interrupted:
            blocks.append(Paragraph(Span("interrupted: results so far", "warn")))
        blocks += [*_build_replay_verdict(self), *_build_step_blocks(self)]
        if verdict.culprit is not None:
            blocks += _build_culprit_blocks(verdict.culprit)
        if self.reruns:
            blocks += [Heading("Run again", f"here, on {self.device}"), _build_reruns_table(self.reruns)]
        if verdict.evidence:
            blocks += [Heading("Evidence"), Items(verdict.evidence, dashes=True)]
        if self.notes:
            notes = tuple(Span(note, "warn") for note in self.notes)
            heading = Heading("Differs from the run", "so the step may give a different result here")
            blocks += [heading, Items(notes, dashes=True)]
        if self.do:
            blocks += [Heading("What to do"), Paragraph(self.do, indent=True)]
        if self.command:
            blocks.append(Instruction(self.command))
        return Page(f"failed step {self.recorded.attempt:,} of {self.run}", tuple(blocks))


def _build_replay_verdict(report: ReplayReport) -> Iterator[Block]:
    said = f"the run said: {report.recorded.verdict.sentence}"
    if report.verdict is not None:
        yield Paragraph(report.verdict.colored_sentence())
        if not report.same_culprit:
            yield Paragraph(Span(said, "dim"), indent=True)
        return
    if not report.interrupted:
        loss = _format_loss_figure(report.reruns[0].loss)
        words = f": in {report.precision}, run again here, the step has a loss of {loss}"
        yield Paragraph((Span("finite", "good", strong=True), words))
    yield Paragraph(said, indent=True)


def _build_step_blocks(report: ReplayReport) -> tuple[Block, ...]:
    recorded = report.recorded
    scale = "" if recorded.loss_scale == 1.0 else f", loss scale {recorded.loss_scale:g}"
    islands = f", in fp32: {', '.join(recorded.islands)}" if recorded.islands else ""
    rows = (
        ("attempt", f"{recorded.attempt:,} (after {format_counted_noun(recorded.step, 'applied step')})"),
        ("skipped", str(recorded.reason).replace("_", " ")),
        ("ran in", f"{recorded.precision} on {recorded.device}{islands}"),
        (
            "loss",
            f"{_format_loss_figure(recorded.loss)}, gradient norm {_format_loss_figure(recorded.grad_norm)}{scale}",
        ),
    )
    return Heading("Failed step", str(report.run)), Pairs(rows)


def _build_culprit_blocks(culprit: Culprit) -> Iterator[Block]:
    kinds = " and ".join(culprit.kinds)
    if culprit.outside:
        yield Heading("Origin", "not finite before anything was computed from it")
        yield Pairs((("came in", f"{culprit.outside}, with {kinds} in it"),))
        return
    module = {"": "the model's own forward", OUTSIDE: "none: the loss"}.get(culprit.module, culprit.module)
    made = f"{kinds} in {culprit.format} (its largest number is {format_number(culprit.limit)})"
    # An operation in fp32 that is not finite in a buffer may have a finite output.
    if culprit.in_fp32 is not None and culprit.limit < FP32.largest:
        made += f"; computed in fp32, up to {format_number(culprit.in_fp32)}"
    yield Heading("Origin", "the first operation with finite inputs and a non-finite result")
    yield Pairs(
        (
            (
                "operation",
                culprit.operation
                + (f", in backward{f' of {culprit.forward}' if culprit.forward else ''}" if culprit.backward else ""),
            ),
            ("module", module),
            ("line", culprit.line or "unknown"),
            ("result", made),
            ("inputs", f"up to {format_number(culprit.largest_input)}"),
        )
    )


def _build_reruns_table(reruns: Sequence[Rerun]) -> Table:
    columns = (
        Column("run", wrap="fold"),
        Column("finite", wrap="never"),
        Column("loss", "right", "never"),
        Column("gradient norm", "right", "never"),
    )
    rows: list[tuple[Text, ...]] = []
    for row in reruns:
        if row.error:
            rows.append((row.way, f"not run: {row.error}", "-", "-"))
        else:
            finite = Span("yes", "good") if row.finite else Span("no", "warn")
            rows.append((row.way, finite, _format_loss_figure(row.loss), _format_loss_figure(row.grad_norm)))
    return Table(columns, tuple(rows), indent=1)


def _format_loss_figure(value: float) -> str:
    """Return a number with enough digits to compare two losses."""
    return format_number(value) if value >= 1000 else f"{value:.4g}"
