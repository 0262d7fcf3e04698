"""The result of a bench, its page and its files."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfstep.draw.markdown import render_markdown, write_markdown
from halfstep.draw.notebook import PageResult
from halfstep.errors import FolderTaken
from halfstep.files import read_json, write_json
from halfstep.json_data import JsonResult, convert_to_json_data, convert_to_strict_json
from halfstep.measure.bench import report
from halfstep.measure.bench.comparison import BenchMetric, BenchRow, compute_baseline_margin
from halfstep.measure.conditions import Conditions, describe_load_problem
from halfstep.measure.memory_bars import MemoryUse, draw_memory_bars
from halfstep.measure.parity import Margin
from halfstep.numbers import format_counted_noun
from halfstep.page import (
    Bars,
    Block,
    Column,
    Curve,
    Curves,
    Heading,
    Instruction,
    Interval,
    Intervals,
    Page,
    Paragraph,
    Span,
    Style,
    Table,
    build_charts,
)

_WHOLE = ("Config", "Batch", "Precision")
"""Columns whose words are not wrapped."""
TONES: dict[str, Style] = {
    "same": "good", "faster": "good", "worse": "bad", "slower": "bad", "can't tell": "warn",
}  # fmt: skip


@dataclass(frozen=True)
class Bench(JsonResult, PageResult):
    """Candidates compared with strict fp32, which is the first row."""

    name: str
    metric: BenchMetric
    seeds: tuple[int, ...]
    rows: tuple[BenchRow, ...]
    settings: tuple[str, ...] = ()
    """Settings of the recipe that all candidates share."""
    conditions: Conditions = field(default_factory=Conditions)
    price_per_hour: float | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    """Deviations from the plan that cost no figure."""
    raced: bool = False
    """Whether speed is from a race of all candidates instead of their runs."""

    @property
    def baseline(self) -> BenchRow:
        """Return the row of strict fp32."""
        return self.rows[0]

    @property
    def has_configs(self) -> bool:
        """Return whether candidates differ in more than their precision and have their own names."""
        return any(row.name != row.config.precision for row in self.rows)

    @property
    def best(self) -> BenchRow | None:
        """Return the fastest candidate that is proven faster and as good; None if there is none."""
        proven = [row for row in self.rows[1:] if row.is_proven]
        return max(proven, key=lambda row: row.gain.times if row.gain else 0.0, default=None)

    @property
    def margin(self) -> Margin | None:
        """Return the margin on the metric, one for every candidate; None if fp32 has no finite metric."""
        return compute_baseline_margin(self.baseline.runs, self.metric) if self.baseline.finite else None

    @property
    def asides(self) -> tuple[str, ...]:
        """Return remarks on all verdicts: the margin, other work on the machine, and deviations."""
        # Without a candidate to compare, a margin means nothing.
        margin = [report.describe_margin(self.margin, self.metric)] if self.margin and len(self.rows) > 1 else []
        in_fp8 = [report.describe_fp8_result(row, self.rows, self.metric) for row in self.rows if row.converted]
        return (*margin, *in_fp8, *filter(None, [describe_load_problem(self.conditions)]), *self.notes)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Return a sentence for each candidate, one for a failed baseline, and the best of named candidates."""
        first = [f"{self.baseline.name}: failed: {self.baseline.failed}"] if self.baseline.failed else []
        best = [report.describe_best_candidate(self.best, self.metric)] if self.best and self.has_configs else []
        return (
            *first,
            *(report.describe_candidate_result(row, self.metric, len(self.seeds)) for row in self.rows[1:]),
            *best,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that strict JSON can represent."""
        rows = [
            {"name": row.name, **asdict(row.config), "failed": row.failed, **row.figures(),
             "cost": row.cost(self.price_per_hour), "runs": row.runs}
            for row in self.rows
        ]  # fmt: skip
        plain = {
            "name": self.name, "settings": self.settings, "metric": self.metric, "baseline": self.baseline.name,
            "seeds": self.seeds, "verdicts": self.verdicts, "margin": self.margin, "notes": self.notes,
            "raced": self.raced, "rows": rows, "price_per_hour": self.price_per_hour, "conditions": self.conditions,
            "interrupted": self.interrupted,
        }  # fmt: skip
        return convert_to_strict_json(convert_to_json_data(plain))

    def page(self) -> Page:
        """Return the page about it."""
        return build_bench_page(self)

    def markdown(self) -> str:
        """Return the page as Markdown, for a pull request or a log."""
        return render_markdown(self.page())


def build_bench_page(bench: Bench, files: Sequence[Path] = ()) -> Page:
    """Return the page of a bench, whose result was written to these files."""
    device, count = bench.conditions.get("device", ""), len(bench.seeds)
    blocks = [*_build_verdict_blocks(bench)]
    blocks += [
        Heading("Figures", f"{bench.name} on {device}, {format_counted_noun(count, 'seed')}"),
        _build_bench_table(bench),
    ]
    blocks += build_charts(
        draw_bench_speeds(bench), draw_parity_chart(bench), draw_bench_memory(bench), draw_bench_losses(bench)
    )
    footnote = report.describe_bench_figures(bench.conditions, bench.seeds, bench.metric, raced=bench.raced)
    blocks += [Heading("Conditions"), Paragraph(Span(footnote, "dim"), indent=True)]
    if files:
        blocks.append(Paragraph(Span(f"wrote {', '.join(map(str, files))}", "dim"), indent=True, gap=True))
    blocks.append(Instruction(suggest_bench_command(bench), "do: ", gap=not files))
    return Page(f"bench of {bench.name}", tuple(blocks))


def _build_verdict_blocks(bench: Bench) -> Iterator[Block]:
    if bench.interrupted:
        yield Paragraph(Span("Interrupted: these are the runs that were finished.", "warn"))
    for row in bench.rows[1:]:
        verdict = row.parity.verdict if row.parity else ""
        tone = "bad" if row.failed else TONES.get(verdict, "")
        claim = report.describe_unnamed_result(row, bench.metric, len(bench.seeds))
        yield Paragraph((Span(row.name, tone, strong=True), f": {claim}"))
    if bench.best and bench.has_configs:
        yield Paragraph(Span(report.describe_best_candidate(bench.best, bench.metric), "good", strong=True))
    if bench.baseline.failed:
        yield Paragraph(Span(bench.verdicts[0], "bad"))
    for aside in bench.asides:
        yield Paragraph(Span(aside, "dim"), indent=True)


def _build_bench_table(bench: Bench) -> Table:
    shown = report.build_bench_columns(bench.metric, bench.price_per_hour, configs=bench.has_configs)
    main = report.build_main_columns(bench.metric, configs=bench.has_configs)
    # The heading above the table names the hardware on the terminal.
    columns = [Column("Hardware", terminal="never")]
    for title in shown:
        wrap = "never" if title in _WHOLE else "fold"
        columns.append(Column(title, wrap=wrap, terminal="always" if title in main else "second"))  # type: ignore[arg-type]
    hardware = str(bench.conditions.get("device", ""))
    rows = tuple((hardware, *(cell(row, bench.baseline) for cell in shown.values())) for row in bench.rows)
    return Table(tuple(columns), rows)


def draw_parity_chart(bench: Bench) -> Intervals | None:
    """Return each candidate's difference from fp32 with its interval, next to the margin."""
    title = f"Difference in {report.name_metric(bench.metric)}"
    return draw_parity_intervals(title, bench.rows, bench.metric, bench.margin) if bench.margin else None


def draw_parity_intervals(title: str, rows: Sequence[BenchRow], metric: BenchMetric, margin: Margin) -> Intervals:
    """Return the difference of each row from its baseline with its interval, next to the margin."""
    scale, unit = (report.POINTS, "points") if metric.higher_is_better else (1.0, metric.name)
    intervals = tuple(
        Interval(row.name, report.format_parity_difference(test, metric), test.verdict, TONES[test.verdict],
                 *(_scale_value(end, scale) for end in (test.low, test.difference, test.high)))
        for row in rows
        if (test := row.parity) is not None
    )  # fmt: skip
    legend = "dot: mean, line: its 90 % interval"
    return Intervals(title, intervals, f"{unit}, better to the right", 0.0, margin.size * scale, legend)


def _scale_value(value: float | None, scale: float) -> float:
    return math.nan if value is None else value * scale


def draw_bench_speeds(bench: Bench) -> Intervals:
    """Return each candidate's speed-up with its interval, next to fp32's 1."""
    rows = [
        Interval(row.name, f"{gain.times:.2f}x", gain.verdict, TONES[gain.verdict],
                 _scale_value(gain.low, 1.0), gain.times, _scale_value(gain.high, 1.0))
        for row in bench.rows[1:]
        if (gain := row.gain) is not None
    ]  # fmt: skip
    legend = "dot: measured, line: its 95 % interval"
    return Intervals("Speed", tuple(rows), "times as fast as strict fp32", 1.0, legend=legend)


def draw_bench_memory(bench: Bench) -> Bars:
    """Return the memory of each candidate: predicted in parts, and measured."""
    known = [(row.name, row.memory) for row in bench.rows if row.memory is not None]
    uses = [MemoryUse(name, memory.parts or {}, memory.measured) for name, memory in known]
    return draw_memory_bars(uses, "Tensors of one update")


def draw_bench_losses(bench: Bench) -> Curves:
    """Return the loss of each candidate over the seconds of its run with the first seed."""
    seed = bench.seeds[0] if bench.seeds else None
    runs = [(row.name, run) for row in bench.rows for run in row.runs if run.seed == seed and run.curve]
    curves = tuple(
        Curve(name, [at for at, _ in run.curve], [loss for _, loss in run.curve], n % 2 == 1, n)
        for n, (name, run) in enumerate(runs)
    )
    return Curves(f"Loss over time, seed {seed}", curves, "seconds", "loss")


def suggest_bench_command(bench: Bench) -> str:
    """Return what to do next: use the fastest precision of equal accuracy, or run more seeds where it is open."""
    # module:callable is a case; a recipe's name has no colon.
    is_case = ":" in bench.name
    if bench.interrupted:
        return "run the same command again; it " + ("starts over" if is_case else "continues where it stopped")
    base = bench.baseline
    if base.failed:
        return f"fix the failure of {base.name}, then run the same command again"
    if base.finite < len(base.runs):
        return f"make {base.name} train to a finite {bench.metric.name} first, then run the same command again"
    if bench.best is None and any(map(_is_undecided, bench.rows[1:])):
        words = shlex.join([bench.name, *bench.settings, *_list_arm_options(bench)])
        return f"halfstep bench {words} --seeds {max(5, len(bench.seeds) + 2)}"
    best = bench.best or base
    if is_case:
        return f'halfstep.Stepper(model, optimizer, precision="{best.config.precision}")'
    changed = best.config.settings or (f"precision={best.config.precision}",)
    return f"halfstep train {shlex.join([bench.name, *bench.settings, *changed])}"


def _is_undecided(row: BenchRow) -> bool:
    """Return whether more seeds might decide it."""
    verdicts = (row.parity and row.parity.verdict, row.gain and row.gain.verdict)
    return all(verdicts) and "can't tell" in verdicts and not row.failed


def _list_arm_options(bench: Bench) -> list[str]:
    """Return the candidates that did not fail, as typed on the command line."""
    rows = [row for row in bench.rows if not row.failed]
    if not bench.has_configs:
        return ["--precisions", ",".join(row.name for row in rows)]
    return [word for row in rows[1:] for word in ("--arm", f"{row.name}: {shlex.join(row.config.settings)}")]


def check_report_folder(folder: Path, name: str) -> None:
    """Raise `FolderTaken` if a report cannot be written there, or would replace one of another subject.

    Called before anything runs.
    """
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    # Creating a file in a folder needs X_OK as well.
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "which is not writable" if nearest.is_dir() else "which is a file"
        raise FolderTaken(f"{nearest}, {what}", allowed="a folder, or a place for a new one", do="--out NEW")
    earlier = read_json(folder / "bench.json")
    if isinstance(earlier, dict) and earlier.get("name", name) != name:
        raise FolderTaken(
            f"{folder}, which has a bench of {earlier['name']}", allowed="a folder for each bench", do="--out NEW"
        )


def write_bench_report(bench: Bench, folder: Path) -> list[Path]:
    """Write bench.json, bench.md and its charts, bench.svg; return the paths written."""
    write_json(folder / "bench.json", bench.as_dict())
    return [folder / "bench.json", *write_markdown(bench.page(), folder / "bench.md")]
