"""Print a replayed step: the verdict, the origin, the reruns, and one command to type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, pairs
from halfstep.numbers import number
from halfstep.observe.recorder import OUTSIDE
from halfstep.printable import printable
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.guard.verdict import Culprit, Verdict
    from halfstep.runs.replay import FailedStepList, ReplayReport


def show(report: ReplayReport) -> None:
    """Print the whole report."""
    console = screen()
    if report.interrupted:
        console.print(Text("interrupted: this is what was found until then", style="yellow"))
    _print_verdict(console, report)
    _print_step(console, report)
    verdict = report.verdict or report.recorded.verdict
    if verdict.culprit is not None:
        _print_culprit(console, verdict.culprit)
    _print_reruns(console, report)
    if verdict.evidence:
        heading(console, "What shows it")
        _listed(console, verdict.evidence)
    if report.notes:
        heading(console, "Not as it was", "so the step may come out differently here")
        _listed(console, report.notes, "yellow")
    if report.do:
        heading(console, "What to do")
        _indented(console, report.do)
    if report.command:
        console.print(
            Text(f"  $ {printable(report.command)}", style="bold"), soft_wrap=True
        )  # not wrapped, for copying


def _print_verdict(console: Console, report: ReplayReport) -> None:
    recorded, verdict = report.recorded, report.verdict
    if verdict is not None:
        console.print(_sentence(verdict))
        if not report.same_culprit:
            _indented(console, f"the run said: {recorded.verdict.sentence}", "dim")
        return
    if not report.interrupted:
        row = report.reruns[0]
        words = f"in {report.precision}, run again here, the step has a loss of {_figure(row.loss)}"
        console.print(Text("finite", style="bold green").append(f": {printable(words)}", style="not bold"))
    _indented(console, f"the run said: {recorded.verdict.sentence}")


def _sentence(verdict: Verdict) -> Text:
    cause, sentence = verdict.cause, printable(verdict.sentence)
    # The cause is printed before it, in color.
    rest = sentence.removeprefix(f"{cause}: ")
    style = "bold green" if cause == "warm_up" else "bold yellow"
    return Text(printable(cause).replace("_", " "), style=style).append(f": {rest}", style="not bold")


def _print_step(console: Console, report: ReplayReport) -> None:
    recorded = report.recorded
    heading(console, "The step", printable(report.run))
    scale = "" if recorded.loss_scale == 1.0 else f", loss scale {recorded.loss_scale:g}"
    islands = f", in fp32: {', '.join(recorded.islands)}" if recorded.islands else ""
    rows = {
        "attempt": f"{recorded.attempt:,}, after {recorded.step:,} applied",
        "skipped": str(recorded.reason).replace("_", " "),
        "ran in": f"{recorded.precision} on {recorded.device}{islands}",
        "loss": f"{_figure(recorded.loss)}, gradient norm {_figure(recorded.grad_norm)}{scale}",
    }
    console.print(pairs({key: printable(value) for key, value in rows.items()}))


def _print_culprit(console: Console, culprit: Culprit) -> None:
    module = culprit.module
    if culprit.outside:
        heading(console, "Who did it", "not finite before anything was computed from it")
        rows = {"came in": f"{culprit.outside}, with {' and '.join(culprit.kinds)} in it"}
    else:
        heading(console, "Who did it", "the first operation with finite inputs and a result that is not")
        rows = {
            "operation": culprit.operation + (", in backward" if culprit.backward else ""),
            "module": {"": "the model's own forward", OUTSIDE: "none: the loss"}.get(module, module),
            "line": culprit.line or "not known",
            "result": _result(culprit),
            "inputs": f"up to {number(culprit.largest_input)}",
        }
    console.print(pairs({key: printable(value) for key, value in rows.items()}))


def _result(culprit: Culprit) -> str:
    kinds, limit = " and ".join(culprit.kinds), number(culprit.limit)
    made = f"{kinds} in {culprit.format}, whose largest number is {limit}"
    return made if culprit.in_fp32 is None else f"{made}; computed in fp32, up to {number(culprit.in_fp32)}"


def _print_reruns(console: Console, report: ReplayReport) -> None:
    if not report.reruns:
        return
    heading(console, "Run again", f"here, on {printable(report.device)}")
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    table.add_column("way", overflow="fold")
    table.add_column("finite", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("gradient norm", justify="right", no_wrap=True)
    for row in report.reruns:
        if row.error:
            table.add_row(Text(printable(row.way)), Text(f"not run: {printable(row.error)}"), "-", "-")
            continue
        finite = Text("yes", style="green") if row.finite else Text("no", style="yellow")
        table.add_row(Text(printable(row.way)), finite, _figure(row.loss), _figure(row.grad_norm))
    console.print(Padding(table, (0, 0, 0, 1), expand=False))


def show_list(listing: FailedStepList) -> None:
    """Print the recorded failed steps, or that there are none."""
    console = screen()
    run = printable(listing.run)
    if not listing.failed_steps:
        console.print(Text(f"{run} has no failed step on record."))
        why = "A step is recorded when the guard has looked into it, so none of its steps needed that."
        if listing.guard == "off":
            why = "Its recipe says `guard: off`, and then nothing is recorded; `--guard watch` would."
        _indented(console, why, "dim")
        return
    for row in listing.failed_steps:
        words, recorded = Text(f"attempt {row.attempt:,}", style="bold"), row.recorded
        if recorded is None:
            console.print(words.append(f"  damaged: {printable(row.problem)}", style="not bold red"))
            continue
        told = f"  {str(recorded.reason).replace('_', ' ')} in {recorded.precision}"
        console.print(words.append(printable(told), style="not bold dim"))
        console.print(Padding(_sentence(recorded.verdict), (0, 0, 0, 2), expand=False))
        if recorded.without:
            _indented(console, f"cannot be run again: {recorded.without}", "yellow")
    whole = [row for row in listing.failed_steps if row.recorded is not None and not row.recorded.without]
    if whole:
        console.print(Text(f"  $ halfstep replay {run} --attempt {whole[-1].attempt}", style="bold"), soft_wrap=True)


def _indented(console: Console, words: str, style: str = "") -> None:
    console.print(Padding(Text(printable(words), style=style), (0, 0, 0, 2), expand=False))


def _listed(console: Console, lines: Sequence[str], style: str = "") -> None:
    """Print a list in which wrapped lines are indented below the first word."""
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("-", style=style), Text(printable(line), style=style))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _figure(value: float) -> str:
    """Return a number with enough digits to compare two losses."""
    return number(value) if value >= 1000 else f"{value:.4g}"
