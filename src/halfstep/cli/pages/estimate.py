"""Print a memory estimate: whether it fits, where the memory goes, and the largest batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep import numbers
from halfstep.cli.pages.layout import heading, indented, number_table, pairs, ruled_table
from halfstep.measure.memory.fitting import BatchFit
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.memory.report import EstimateReport
from halfstep.measure.memory.verdict import DeviceEstimate, Saving, place_in_words
from halfstep.measure.survival_report import THE_MODEL_ITSELF, ModuleRange, Survival
from halfstep.printable import printable
from halfstep.terminal import screen

_MODULES = 5


def show(report: EstimateReport, command: str) -> None:
    """Print the whole report, the answer first, and the command to type next."""
    console = screen()
    for answer in report.verdict.answers:
        console.print(Text(printable(answer.text), style="bold green" if answer.fits else "bold yellow"))
    if report.interrupted:
        console.print(Text("interrupted: this is what was known by then", style="yellow"))
    for number, page in enumerate(report.devices):
        if number == 0:
            _print_columns(console, page.columns)
            _print_savings(console, report.verdict.savings)
        _print_device(console, page)
    _print_notes(console, report)
    console.print()
    console.print(Text("next: ", style="dim").append(printable(command), style="bold not dim"), soft_wrap=True)


def _print_columns(console: Console, columns: Sequence[Ledger]) -> None:
    """Print a table per batch size, for the first mode (kept or recomputed activations) that was estimated."""
    kept = [column for column in columns if column.setting.recompute == columns[0].setting.recompute]
    how = ", recomputing" if kept and kept[0].setting.recompute else ""
    for samples in dict.fromkeys(column.samples for column in kept):
        beside = [column for column in kept if column.samples == samples]
        moments = dict.fromkeys(column.moment for column in beside)
        moment = printable(*moments) if len(moments) == 1 else ""
        heading(console, f"At the peak, batch {samples}{how}", moment)
        console.print(_parts(beside, console))
        if any(column.by_format for column in beside):
            heading(console, "Kept for backward", "at the end of forward, by format and by module")
            console.print(_activations(beside, console))


def _parts(columns: Sequence[Ledger], console: Console) -> Padding:
    table = number_table(console, "", [column.setting.precision for column in columns])
    for part in columns[0].at_peak:
        if any(column.at_peak[part] for column in columns):
            table.add_row(part, *(numbers.size(column.at_peak[part]) for column in columns))
    table.add_section()
    table.add_row(Text("peak", style="bold"), *(Text(numbers.size(column.peak), style="bold") for column in columns))
    if len({column.moment for column in columns}) > 1:
        table.add_row("when", *(printable(column.moment) for column in columns))
    return indented(table, 1)


def _activations(columns: Sequence[Ledger], console: Console) -> Padding:
    table = number_table(console, "", [column.setting.precision for column in columns])
    by_format, by_module = [column.by_format for column in columns], [column.by_module for column in columns]
    for sizes, most in ((by_format, None), (by_module, _MODULES)):
        table.add_section()
        for name in _largest(sizes)[:most]:
            found = (column.get(name, 0) for column in sizes)
            table.add_row(printable(name or THE_MODEL_ITSELF), *(numbers.size(size) if size else "-" for size in found))
    return indented(table, 1)


def _largest(columns: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names that are non-zero in any column, largest first."""
    most: dict[str, int] = {}
    for column in columns:
        for name, size in column.items():
            most[name] = max(size, most.get(name, 0))
    return sorted((name for name, size in most.items() if size), key=lambda name: -most[name])


def _print_savings(console: Console, savings: Sequence[Saving]) -> None:
    shown = [row for row in savings if row.recompute == savings[0].recompute]
    for row in shown:
        change = f"{abs(row.saved):.0%} {'less' if row.saved >= 0 else 'more'} than fp32 at batch {row.batch}"
        why = f"; {printable(row.why)}" if row.why else ""
        console.print()
        console.print(indented(Text(f"{row.precision}: {change}{why}")))


def _print_device(console: Console, page: DeviceEstimate) -> None:
    usable = f"{numbers.size(page.device.usable)} of {numbers.size(page.device.memory)} for tensors"
    heading(console, f"How far on {place_in_words(page.device)}", usable)
    table = number_table(console, "precision", ["activations", "peak", "largest batch", "multiple of 8"])
    for row in page.largest:
        words = "recomputed" if row.recompute else "kept"
        table.add_row(row.precision, words, _peak(page, row), _reach(row), str(row.preferred or "-"))
    if table.row_count:
        console.print(indented(table, 1))
    for why in dict.fromkeys(row.why for row in page.not_searched):
        console.print(indented(Text(printable(why), style="yellow")))
    _print_abilities(console, page)
    for refused in page.refused:
        console.print(Padding(Text(printable(f"{refused.given}\ndo: {refused.do}"), style="red"), (0, 0, 0, 2)))


def _peak(page: DeviceEstimate, row: BatchFit) -> str:
    """Return the peak of the first batch that was asked for."""
    for column in page.columns:
        if (column.setting.precision, column.setting.recompute) == (row.precision, row.recompute):
            return numbers.size(column.peak)
    return "-"


def _reach(row: BatchFit) -> str:
    if not row.batch:
        return f"none: {numbers.size(row.missing)} over"
    if row.at_least:
        return f"no limit up to {row.batch}"
    return f"about {row.batch}" if row.about else f"{row.batch}"


def _print_abilities(console: Console, page: DeviceEstimate) -> None:
    for name, can in page.abilities.items():
        if can.native is False:
            instead = f"; {page.auto} is the one for it" if page.auto != name else ""
            text = f"{name}: not native on {page.device.device.name}: {can.reason}{instead}"
            console.print(indented(Text(text, style="yellow")))


def _print_notes(console: Console, report: EstimateReport) -> None:
    # Notes that were printed above are not repeated.
    said = {row.why for row in report.verdict.savings}
    columns = [column for page in report.devices for column in page.columns if not column.setting.recompute]
    notes = dict.fromkeys(note for column in columns for note in column.notes if note not in said)
    assumed = dict.fromkeys(
        f"assumed: {numbers.size(page.device.reserved)} are taken by the process itself, and "
        f"{page.device.margin:.0%} of the rest is left for gaps between tensors"
        for page in report.devices
    )
    if notes or assumed:
        heading(console, "Notes")
    for note in (*notes, *assumed):
        console.print(indented(Text(printable(note), style="dim")))


# -- survival page ----------------------------------------------------------------------------------------------------
# Print whether a model survives a format: verdicts, evidence, then what to type.


_MOST_MODULES = 10
_WORTH_A_LINE = 0.01


def show_survival(found: Sequence[Survival], subject: str = "CASE") -> None:
    """Print all results; the advice at the end is that of the first format that needs any."""
    console = screen()
    console.print()
    for survival in found:
        console.print(_verdict(survival))
    for survival in found:
        _print_evidence(console, survival)
    if not found:
        console.print("No format was tried to its end.")
    console.print()
    for note in dict.fromkeys(note for survival in found for note in survival.notes):
        console.print(Text(printable(note), style="dim"))
    _print_advice(console, found, subject)


def _verdict(survival: Survival) -> Text:
    # Yellow: it survives with a scale per tensor, as fp8 is used in practice.
    scaled = survival.scaled is not None and survival.scaled.survives
    colour = "green" if survival.survives else "yellow" if scaled else "red"
    words = survival.verdict.removeprefix(survival.format)
    return Text(survival.format, style=f"bold {colour}").append(printable(words), style="not bold")


def _print_evidence(console: Console, survival: Survival) -> None:
    heading(console, survival.format, _which_modules(survival.modules))
    console.print(_modules(survival.modules[:_MOST_MODULES], console))
    console.print()
    console.print(pairs(_step_facts(survival)))


def _which_modules(modules: Sequence[ModuleRange]) -> str:
    if len(modules) > _MOST_MODULES:
        return f"the {_MOST_MODULES} modules nearest to its end, of {len(modules)}"
    return "modules, those nearest to its end first"


def _modules(rows: Sequence[ModuleRange], console: Console) -> Table:
    table = ruled_table(console)
    table.add_column("module", overflow="fold")
    for title in ("largest", "headroom", "overflows", "vanish", "gradients\nvanish"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        overflows = Text(f"{row.overflows}", style="red") if row.overflows else Text("-")
        table.add_row(
            Text(printable(row.module)),
            f"{row.largest:.3g}",
            "-" if row.headroom_bits is None else f"{row.headroom_bits + 0.0:.1f} bits",
            overflows,
            _share(row.underflow_forward),
            _share(row.underflow_backward),
        )
    return table


def _step_facts(survival: Survival) -> dict[str, str]:
    facts = {"loss": f"{_number(survival.loss)}, in fp32 {_number(survival.loss_fp32)}"}
    if survival.format == "fp16":
        facts["loss scale"] = _scale(survival)
        facts["gradients vanish"] = (
            f"{_share(survival.gradient_underflow)}, without a loss scale "
            f"{_share(survival.gradient_underflow_unscaled)}"
        )
    else:
        facts["gradients vanish"] = _share(survival.gradient_underflow)
    facts["gradient error"] = _error(survival)
    if survival.scaled is not None:
        facts["with a scale for each tensor"] = f"gradient error {_error(survival.scaled)}"
    # A few zeros come from units that rounding switched off; these are not worth a line.
    for lost in [lost for lost in survival.lost if lost.share >= _WORTH_A_LINE][:3]:
        facts[printable(f"lost in {lost.parameter}")] = (
            f"{_share(lost.share)} of its gradients, up to {lost.largest:.2g}"
        )
    return facts


def _scale(survival: Survival) -> str:
    if survival.loss_scale is not None:
        return f"{survival.loss_scale:.0f}"
    return "none helps: the loss itself is not finite" if survival.loss is None else "gradients overflow at any"


def _error(survival: Survival) -> str:
    error = survival.gradient_error
    return "not finite" if error is None else f"{error:.2%} of their norm in fp32"


def _share(value: float | None) -> str:
    return numbers.share(value) if value else "-"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _print_advice(console: Console, found: Sequence[Survival], subject: str) -> None:
    advice = [line for survival in found if not survival.survives for line in survival.do]
    if not advice and found and all(survival.survives for survival in found):
        advice = [f"halfstep plan {subject}    measures which of them is the fastest here"]
    if not advice:
        return
    heading(console, "Do")
    for line in dict.fromkeys(advice):
        console.print(indented(Text(printable(line), style="bold")))
