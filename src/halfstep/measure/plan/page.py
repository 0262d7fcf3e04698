"""A plan and its page: the choice, the reasons, everything that was measured, and what to type."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from halfstep import numbers
from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.measure.conditions import Conditions, describe_active_flags, describe_load_problem
from halfstep.measure.plan.choice import LadderCell, PlanCell, format_speed_interval
from halfstep.measure.plan.not_measured import NotMeasuredReason
from halfstep.measure.plan.probe import LossParity
from halfstep.measure.plan.search import BatchGrowth
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from halfstep.page import (
    Block,
    Column,
    Heading,
    Instruction,
    Interval,
    Intervals,
    Page,
    Pairs,
    Paragraph,
    Span,
    Style,
    Table,
    build_charts,
)
from halfstep.precision.hardware import Device, FormatSupport

RecipeValue = str | bool | int | float | None


def list_recipe_changes(choice: StepSetting, growth: BatchGrowth | None = None) -> dict[str, RecipeValue]:
    """Return the keys of a recipe and their values in the plan."""
    taken = growth.setting if growth else choice
    found: dict[str, RecipeValue] = {
        "precision": taken.precision,
        "train.channels_last": taken.channels_last,
        "train.compile": taken.compile,
        "train.batch_size": taken.batch,
        "train.microbatches": taken.microbatches,
    }
    if growth:
        found |= {"optimizer.lr": growth.learning_rate, "schedule.warmup_steps": growth.warmup_steps}
    return found


def format_python_lines(choice: StepSetting, growth: BatchGrowth | None = None) -> list[str]:
    """Return the same as Python code for the user's own loop."""
    taken = growth.setting if growth else choice
    lines = []
    if taken.channels_last:
        lines.append("model = model.to(memory_format=torch.channels_last)  # and images, before the model gets them")
    if taken.compile:
        lines.append("model.compile()")
    if growth:
        lines.append(f"optimizer.param_groups[0]['lr'] = {growth.learning_rate:g}  # {growth.rule}, after a warm-up")
    lines.append(f'stepper = halfstep.Stepper(model, optimizer, precision="{taken.precision}")')
    if taken.microbatches > 1:
        lines.append(f"for batch in halfstep.windows(loader, {taken.microbatches}):  # batches of {taken.batch}")
    else:
        lines.append(f"for batch in loader:  # batches of {taken.batch}")
    lines.append("    report = stepper.step(loss_fn, batch)")
    return lines


@dataclass(frozen=True)
class Plan(JsonResult, PageResult):
    """The chosen setting, and all measurements that led to it."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("name", "device", "formats", "now", "baseline", "choice", "stay", "verdict", "reasons", "parity", "ladder"),
        *("runner_up", "why_not", "growth", "growth_ended", "changes", "python", "conditions", "seconds"),
        "interrupted",
    )
    name: str
    device: Device
    formats: dict[str, FormatSupport]
    """The device's support of each precision."""
    now: StepSetting
    """The user's setting."""
    baseline: StepSetting
    """Strict fp32, the baseline of all speeds."""
    choice: PlanCell
    stay: bool
    """Whether the precision stays fp32, because nothing narrower was worthwhile here."""
    reasons: dict[str, str]
    """The reason for each part of the choice."""
    parity: LossParity
    """The parity of the choice."""
    ladder: tuple[LadderCell, ...]
    """All cells, simplest first."""
    runner_up: PlanCell | None
    why_not: str
    growth: BatchGrowth | None
    growth_ended: str
    """Why no larger batch was chosen; empty if `grow_batch` was off."""
    conditions: Conditions
    seconds: float
    interrupted: bool

    def page(self) -> Page:
        """Return the page about it, with the lines that apply it."""
        return Page(f"plan for {self.name}", (*build_plan_blocks(self), *_build_python_blocks(self)), self.device.name)

    @property
    def verdict(self) -> str:
        """Return the choice and its speed in one line."""
        return "  ".join(filter(None, (self.headline, self.speed_in_words)))

    @property
    def headline(self) -> str:
        """Return the choice without its speed."""
        text = str(self.choice.setting)
        if not self.stay:
            return text
        narrow = [cell for cell in self.ladder if cell.setting.precision != self.baseline.precision]
        # "Stay in fp32" is a verdict only where a narrower format was measured or excluded for a reason.
        unseen = (NotMeasuredReason.NO_TIME, NotMeasuredReason.INTERRUPTED)
        seen = any(cell.speed or cell.cut not in unseen for cell in narrow)
        return f"stay in {text}" if seen or not narrow else f"no verdict, so {text}: nothing narrower was measured"

    @property
    def speed_in_words(self) -> str:
        """Return the speed of the choice; empty if it is strict fp32 itself or was not measured."""
        speed = self.choice.speed
        if speed is None or self.choice.setting == self.baseline:
            return ""
        return f"{speed.speedup:.2f}x strict fp32 ({format_speed_interval(speed)})"

    @property
    def changes(self) -> dict[str, RecipeValue]:
        """Return the settings of a recipe."""
        return list_recipe_changes(self.choice.setting, self.growth)

    @property
    def python(self) -> list[str]:
        """Return lines of Python."""
        return format_python_lines(self.choice.setting, self.growth)


TONES: dict[str, Style] = {"faster": "good", "slower": "bad"}


def build_plan_blocks(plan: Plan) -> Iterator[Block]:
    """Yield the plan without what to type next."""
    yield from _build_plan_verdict(plan)
    yield Heading("Why")
    yield Pairs(tuple(_list_reasons(plan)))
    yield Heading("Measured", "speed relative to strict fp32, with the median's 95 % interval")
    yield _build_ladder_table(plan)
    yield from build_charts(draw_plan_speeds(plan))
    cut = _group_excluded(plan.ladder)
    if cut:
        yield Heading("Not chosen")
        yield Pairs(tuple(("; ".join(names), reason) for reason, names in cut.items()))
    yield Heading("Conditions")
    yield _build_condition_pairs(plan)


def draw_plan_speeds(plan: Plan) -> Intervals:
    """Return the speed of each candidate with its interval, next to strict fp32's 1."""
    rows = [
        Interval(cell.name, f"{speed.speedup:.2f}x", speed.verdict, TONES.get(speed.verdict, "warn"), speed.low,
                 speed.speedup, speed.high)
        for cell in plan.ladder
        if (speed := cell.speed) is not None and cell.setting != plan.baseline
    ]  # fmt: skip
    legend = "dot: median, line: its 95 % interval"
    return Intervals("Speed", tuple(rows), "times as fast as strict fp32", 1.0, legend=legend)


def _build_plan_verdict(plan: Plan) -> Iterator[Block]:
    speed = f"  {plan.speed_in_words}" if plan.speed_in_words else ""
    yield Paragraph((Span(plan.headline, "good", strong=True), speed))
    if plan.growth:
        yield Paragraph(Span(plan.growth.words, "warn"))
    now, then = vars(plan.now), vars(plan.choice.setting)
    changed = "; ".join(
        f"{key} {_format_value(now[key])} -> {_format_value(then[key])}" for key in then if now[key] != then[key]
    )
    yield Paragraph(f"{plan.name}: {changed or 'with its current settings'}")
    native = [name for name, found in plan.formats.items() if found.native]
    lacking = [name for name, found in plan.formats.items() if not found.native]
    formats = f"native formats: {', '.join(native)}" + (f"; not native: {', '.join(lacking)}" if lacking else "")
    yield Paragraph(Span(f"{plan.device.name}: {formats}", "dim"))
    if any(cell.cut == NotMeasuredReason.NO_TIME for cell in plan.ladder):
        # Three times the seconds, in whole minutes.
        more = 60 * math.ceil(plan.seconds / 20)
        short = f"not everything was measured in {plan.seconds:.0f} s; use --seconds {more} to measure more"
        yield Paragraph(Span(short, "warn"))
    disturbed = describe_load_problem(plan.conditions)
    if disturbed:
        yield Paragraph(Span(disturbed, "warn"))
    if plan.interrupted:
        yield Paragraph(Span("interrupted: this is the best of what had been measured", "warn"))


def _format_value(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _list_reasons(plan: Plan) -> Iterator[tuple[str, str]]:
    for part, reason in plan.reasons.items():
        yield part, f"stay in fp32: {reason}" if part == "precision" and plan.stay else reason
    proof = (
        "; a plan compares losses only as a smoke test: for a full comparison, run `halfstep bench`"
        if plan.choice.setting != plan.baseline
        else ""
    )
    yield "parity", f"{plan.parity.verdict}: {plan.parity.why}{proof}"
    if plan.runner_up:
        yield "runner-up", f"{plan.runner_up.name}: {plan.why_not}"
    if plan.growth_ended:
        growth, larger = plan.growth, "none"
        if growth:
            larger = (
                f"{growth.setting.batch} samples: {growth.speed.speedup:.2f}x by samples; learning rate "
                f"{growth.learning_rate:.3g} ({growth.rule}), {growth.warmup_steps} updates of warm-up, {growth.note}"
            )
        yield "larger batch", f"{larger}; {plan.growth_ended}"


def _build_ladder_table(plan: Plan) -> Table:
    titles = ("speed", "interval", "pairs", "update", "memory")
    figures = (Column(title, "right", "never") for title in titles)
    columns = (Column(), Column("setting", wrap="fold"), *figures, Column("parity", wrap="never"))
    rows = []
    for cell in plan.ladder:
        if cell.speed is not None:
            chosen = cell.setting == plan.choice.setting
            texts = (">" if chosen else " ", *_format_ladder_row(cell, cell.speed, plan))
            rows.append(tuple(Span(text, strong=chosen) for text in texts))
    return Table(columns, tuple(rows))


def _format_ladder_row(cell: LadderCell, speed: Speed, plan: Plan) -> list[str]:
    is_baseline = cell.setting == plan.baseline
    interval = f"{speed.low:.2f} to {speed.high:.2f}" if speed.pairs >= FEWEST_FOR_INTERVAL else "too few"
    return [
        "strict fp32" + cell.name.removeprefix("fp32") if is_baseline else cell.name,
        f"{speed.speedup:.2f}x",
        "-" if is_baseline else interval,
        str(speed.pairs),
        numbers.format_duration(speed.seconds),
        numbers.format_bytes(cell.peak) if cell.peak else "-",
        cell.parity.verdict if cell.parity and not is_baseline else "-",
    ]


def _group_excluded(ladder: Iterable[PlanCell]) -> dict[str, list[str]]:
    """Return the names of the settings that were excluded, by reason."""
    together: dict[str, list[str]] = {}
    for cell in ladder:
        if cell.cut:
            together.setdefault(cell.cut, []).append(cell.name)
    return together


def _build_condition_pairs(plan: Plan) -> Pairs:
    found = plan.conditions
    return Pairs(
        (
            ("torch", f"{found['torch']}, python {found['python']}, halfstep {found['halfstep']}"),
            ("device", f"{found['device']}{', ' + found['driver'] if found['driver'] else ''}"),
            ("threads", f"{found['threads']} on {found['cores']} cores, load {found['load']}"),
            ("flags", describe_active_flags(found)),
            ("method", f"{found['arms']}, interleaved; memory is predicted"),
            ("time", f"{plan.seconds:.0f} s"),
        )
    )


@dataclass(frozen=True)
class PlanCommand:
    """The command line of a plan, and the file of its recipe."""

    subject: str
    settings: tuple[str, ...]
    options: tuple[str, ...]
    file: str | None
    """Where the recipe is or would be written; None for a user's own code."""
    written: str | None = None

    def again(self) -> str:
        """Return the typed command with its options."""
        return shlex.join([self.subject, *self.settings, *self.options])


def build_next_blocks(plan: Plan, command: PlanCommand) -> Iterator[Block]:
    """Yield what to type next."""
    if plan.interrupted:
        yield from _build_command_blocks("interrupted: to measure the rest, type", f"halfstep plan {command.again()}")
    elif command.written:
        train = f"halfstep train {_quote_path(command.written)}"
        yield from _build_command_blocks(f"wrote {command.written}; to train with it, type", train)
    elif command.file:
        again = f"halfstep plan {command.again()} --yes --write {_quote_path(command.file)}"
        yield from _build_command_blocks("nothing was written; to write the recipe, type", again)
        if not command.settings:
            yield Paragraph("or train with the same settings at once:", wrap=False)
            settings = shlex.join(
                f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                for key, value in plan.changes.items()
            )
            yield Instruction(f"halfstep train {shlex.quote(command.subject)} {settings}", "  ")
    else:
        yield from _build_python_blocks(plan)


def _build_python_blocks(plan: Plan) -> Iterator[Block]:
    return _build_command_blocks("to apply it, in your own loop:", *plan.python)


def _build_command_blocks(lead: str, *lines: str) -> Iterator[Block]:
    yield Paragraph(lead, gap=True, wrap=False)
    for line in lines:
        yield Instruction(line, "  ")


def _quote_path(path: str) -> str:
    # A bare name would be taken for a shipped recipe.
    return shlex.quote(path if "/" in path else f"./{path}")
