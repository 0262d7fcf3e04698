"""Print a profile: the cause and the command to type, then where the time went and the evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented
from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.conditions import busy, in_words
from halfstep.measure.profile.facts import PARTS
from halfstep.measure.profile.next_command import layers
from halfstep.numbers import duration, several
from halfstep.printable import printable
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.measure.profile.facts import MisalignedLayer, ProfileFacts, StepTimes
    from halfstep.measure.profile.profile import Profile

_BAR = 30
_FINE = "already-fast"
_SHOWN = 6


def show(found: Profile) -> None:
    """Print the whole report."""
    console = screen()
    facts, cause = found.facts, found.cause
    if found.interrupted:
        console.print(Text("interrupted: this is what was measured until then", style="yellow"))
    style = "bold green" if cause.id == _FINE else "bold yellow"
    console.print(Text(cause.id, style=style).append(f": {printable(cause.sentence)}", style="not bold"))
    _indented(console, f"do: {cause.do}")
    console.print(Text(f"  $ {printable(cause.command)}", style="bold"), soft_wrap=True)  # not wrapped, for copying
    if cause.evidence:
        heading(console, "What shows it")
        _indented(console, cause.evidence)
    _print_speed(console, facts)
    _print_shares(console, facts)
    _print_layers(console, facts)
    _print_others(console, found)
    if found.conditions:
        heading(console, "Conditions")
        _indented(console, in_words(found.conditions), "dim")
        if warning := busy(found.conditions):
            _indented(console, warning, "yellow")


def _print_speed(console: Console, facts: ProfileFacts) -> None:
    race = facts.race
    if race is None:
        return
    heading(console, "Speed", "a step on a fixed batch")
    rows = {"strict fp32": duration(race.fp32)}
    if race.own_fp32 is not None:
        rows[f"fp32 as set here ({facts.fp32_means})"] = duration(race.own_fp32)
    if facts.asked != "fp32":
        rows[facts.asked] = f"{duration(race.asked)}, {_gain(race)}"
    feeding = facts.feeding
    if feeding is not None:
        rows["with data"] = f"{duration(feeding.step)}, of which {duration(feeding.wait)} waiting"
        if facts.with_data is not None:
            rows["speed-up with data"] = f"{facts.with_data:.2f}x"
    if facts.ceiling is not None:
        rows["ceiling"] = f"{facts.ceiling:.2f}x if matrix work took no time at all"
    console.print(_grid(rows))


def _gain(race: StepTimes) -> str:
    # Fewer pairs have no confidence interval.
    if race.pairs < FEWEST_FOR_INTERVAL:
        return f"not measured well enough: {several(race.pairs, 'pair')}"
    interval = f"{race.low:.2f}-{race.high:.2f}x over {several(race.pairs, 'pair')}"
    return f"{race.speedup:.2f}x of strict fp32 ({interval})"


def _print_shares(console: Console, facts: ProfileFacts) -> None:
    if not facts.shares:
        return
    heading(console, "Where a step's time goes", f"in {facts.asked}")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for part, words in PARTS.items():
        share = facts.shares.get(part, 0.0)
        if part == "narrow" and facts.format in ("bf16", "fp16"):
            words = f"matrix work in {facts.format}"
        table.add_row(words, f"{share:.0%}", Text("#" * round(share * _BAR), style="cyan"))
    console.print(indented(table))


def _print_layers(console: Console, facts: ProfileFacts) -> None:
    work = facts.work
    narrow = facts.format not in ("fp32", "tf32")
    if narrow and work and work.total:
        shares = {name: flops / work.total for name, flops in list(work.wide.items())[:_SHOWN]}
        shown = {name: share for name, share in shares.items() if share >= 0.01}
        if shown:
            heading(console, "Modules that still compute in fp32", "share of FLOPs")
            console.print(_grid({name: f"{share:.0%}" for name, share in shown.items()}))
    if facts.misaligned:
        heading(console, "Channels that are no multiple of 8", "forward and backward, as is and padded")
        console.print(_grid({layers(row.names, row.kind): _padding(row) for row in facts.misaligned}))


def _padding(row: MisalignedLayer) -> str:
    return (
        f"{row.channels} {duration(row.seconds)}, {row.padded} {duration(row.padded_seconds)}: "
        f"{row.low:.2f}-{row.high:.2f}x; {row.flops_share:.0%} of the FLOPs"
    )


def _print_others(console: Console, found: Profile) -> None:
    rows = {cause.id: cause.sentence for cause in found.others}
    rows |= {f"not measured: {name}": why for name, why in found.skipped.items()}
    if rows:
        heading(console, "Also")
        console.print(_grid(rows))


def _grid(rows: dict[str, str]) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=34, overflow="fold")
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(Text(printable(key), style="dim"), Text(printable(value)))
    return indented(table)


def _indented(console: Console, words: str, style: str = "") -> None:
    console.print(indented(Text(printable(words), style=style)))
