"""Print a plan: the choice, the reasons, then everything that was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, pairs, ruled_table
from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.conditions import busy, flags_in_words
from halfstep.measure.plan.choice import Cell, LadderCell
from halfstep.measure.plan.not_measured import NotMeasured
from halfstep.measure.plan.plan import Plan
from halfstep.measure.plan.search import Growth
from halfstep.measure.timing import Speed
from halfstep.numbers import duration, size
from halfstep.printable import printable
from halfstep.terminal import screen


@dataclass(frozen=True)
class PlanCommand:
    """A plan as it was typed, and the file of its recipe."""

    subject: str
    settings: tuple[str, ...]
    options: tuple[str, ...]
    file: str | None
    """Where the recipe is or would be written; None for a user's own code."""
    written: str | None = None

    def again(self) -> str:
        """Return the typed command with its options."""
        return shlex.join([self.subject, *self.settings, *self.options])


def show(plan: Plan) -> None:
    """Print the plan without the next command."""
    console = screen()
    _print_verdict(console, plan)
    heading(console, "Why")
    console.print(pairs({part: printable(words) for part, words in _why(plan).items()}))
    heading(console, "Measured", "times as fast as strict fp32, with the median's 95 % interval")
    console.print(indented(_ladder(plan, console), 1))
    cut = _cut(plan.ladder)
    if cut:
        heading(console, "Passed over")
        console.print(pairs(cut))
    heading(console, "Under")
    console.print(pairs(_conditions(plan)))


def show_next(plan: Plan, command: PlanCommand) -> None:
    """Print the next command."""
    console = screen()
    console.print()
    if plan.interrupted:
        _print_line(console, "interrupted: to measure the rest, type")
        _print_line(console, f"  halfstep plan {command.again()}")
    elif command.written:
        _print_line(console, f"wrote {command.written}; to train with it, type")
        _print_line(console, f"  halfstep train {_quoted(command.written)}")
    elif command.file:
        _print_line(console, "nothing was written; to write the recipe, type")
        _print_line(console, f"  halfstep plan {command.again()} --yes --write {_quoted(command.file)}")
        if not command.settings:
            _print_line(console, "or train with the same settings at once:")
            _print_line(console, f"  halfstep train {shlex.quote(command.subject)} {_settings(plan)}")
    else:
        _print_line(console, "to apply it, in your own loop:")
        for line in plan.python:
            _print_line(console, f"  {line}")


def _print_verdict(console: Console, plan: Plan) -> None:
    speed = f"  {plan.speed_in_words}" if plan.speed_in_words else ""
    console.print(Text(printable(plan.headline), style="bold green").append(speed, style="not bold"))
    if plan.growth:
        console.print(Text(plan.growth.words, style="yellow"))
    console.print(Text(printable(f"{plan.name}: {_changed(plan) or 'as it is now'}")))
    console.print(Text(printable(f"{plan.device.name}: {_formats(plan)}"), style="dim"))
    if any(cell.cut == NotMeasured.NO_TIME for cell in plan.ladder):
        # Three times the seconds, in whole minutes.
        more = 60 * math.ceil(plan.seconds / 20)
        console.print(
            Text(f"not everything was measured in {plan.seconds:.0f} s: --seconds {more} sees more", style="yellow")
        )
    disturbed = busy(plan.conditions)
    if disturbed:
        console.print(Text(disturbed, style="yellow"))
    if plan.interrupted:
        console.print(Text("interrupted: this is the best of what had been measured", style="yellow"))


def _changed(plan: Plan) -> str:
    now, then = vars(plan.now), vars(plan.choice.setting)
    return "; ".join(f"{key} {_shown(now[key])} -> {_shown(then[key])}" for key in then if now[key] != then[key])


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _formats(plan: Plan) -> str:
    native = [name for name, found in plan.formats.items() if found.native]
    lacking = [name for name, found in plan.formats.items() if not found.native]
    return f"computes in {', '.join(native)}" + (f"; not in {', '.join(lacking)}" if lacking else "")


def _why(plan: Plan) -> dict[str, str]:
    proof = "; a smoke test: `halfstep bench` proves it" if plan.choice.setting != plan.baseline else ""
    found = {**plan.reasons, "parity": f"{plan.parity.verdict}: {plan.parity.why}{proof}"}
    if plan.runner_up:
        found["runner-up"] = f"{plan.runner_up.name}: {plan.why_not}"
    if plan.growth_ended:
        found["larger batch"] = f"{_growth(plan.growth) if plan.growth else 'none'}; {plan.growth_ended}"
    return found


def _growth(growth: Growth) -> str:
    return (
        f"{growth.setting.batch} samples: {growth.speed.speedup:.2f}x by samples; learning rate "
        f"{growth.learning_rate:.3g} ({growth.rule}), {growth.warmup_steps} updates of warm-up, "
        f"{growth.note}"
    )


def _ladder(plan: Plan, console: Console) -> Table:
    table = ruled_table(console, pad_edge=False)
    table.add_column("")
    table.add_column("setting", overflow="fold")
    for title in ("speed", "interval", "pairs", "update", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("parity", no_wrap=True)
    for cell in plan.ladder:
        if cell.speed is not None:
            chosen = cell.setting == plan.choice.setting
            table.add_row(">" if chosen else " ", *_row(cell, cell.speed, plan), style="bold" if chosen else "")
    return table


def _row(cell: LadderCell, speed: Speed, plan: Plan) -> list[str]:
    is_baseline = cell.setting == plan.baseline
    return [
        "strict fp32" + cell.name.removeprefix("fp32") if is_baseline else cell.name,
        f"{speed.speedup:.2f}x",
        "-" if is_baseline else _range(speed),
        str(speed.pairs),
        duration(speed.seconds),
        size(cell.peak) if cell.peak else "-",
        cell.parity.verdict if cell.parity and not is_baseline else "-",
    ]


def _range(speed: Speed) -> str:
    return f"{speed.low:.2f} to {speed.high:.2f}" if speed.pairs >= FEWEST_FOR_INTERVAL else "too few"


def _cut(ladder: Sequence[Cell]) -> dict[str, str]:
    """Return why configurations were excluded, grouped by reason."""
    together: dict[str, list[str]] = {}
    for cell in ladder:
        if cell.cut:
            together.setdefault(cell.cut, []).append(cell.name)
    return {"; ".join(names): printable(reason) for reason, names in together.items()}


def _conditions(plan: Plan) -> dict[str, str]:
    found = plan.conditions
    return {
        "torch": f"{found['torch']}, python {found['python']}, halfstep {found['halfstep']}",
        "device": f"{found['device']}{', ' + found['driver'] if found['driver'] else ''}",
        "threads": f"{found['threads']} on {found['cores']} cores, load {found['load']}",
        "flags": flags_in_words(found),
        "arms": f"{found['arms']}, in turns; memory is predicted",
        "time": f"{plan.seconds:.0f} s",
    }


def _quoted(path: str) -> str:
    # A bare name would be taken for a shipped recipe.
    return shlex.quote(path if "/" in path else f"./{path}")


def _settings(plan: Plan) -> str:
    return shlex.join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in plan.changes.items()
    )


def _print_line(console: Console, line: str) -> None:
    """Print a line without wrapping, for copying."""
    console.print(Text(printable(line)), soft_wrap=True)
