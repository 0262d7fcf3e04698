"""Compare several runs: what differs in their recipes, what came of it, and which is better by the test of `bench`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfstep import numbers
from halfstep.page import (
    Block,
    Column,
    Heading,
    Intervals,
    Items,
    Page,
    Paragraph,
    Span,
    Table,
    build_charts,
)
from halfstep.report.json_fields import coerce_number, is_known_number
from halfstep.report.run_facts import RunFacts, format_metric_in_sentence
from halfstep.runs.listing import FINISHED

SEED = "train.seed"
_ASIDE = ("run.", "about")
"""Settings in which two runs may differ and be of one kind: where they write and what they draw."""
HEADS = ["Run", "State", "Precision", "Best", "Last", "Steps", "Skipped", "Samples/s", "Time"]


@dataclass(frozen=True)
class Judgment:
    """Which of several runs is better, and how far that is known."""

    verdicts: list[str]
    drawing: Intervals | None
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side."""

    runs: list[tuple[str, RunFacts]]
    """The runs, each with a unique name."""
    judgment: Judgment

    @property
    def verdict(self) -> str:
        """Return the comparison in one sentence."""
        first = next(iter(self.judgment.verdicts), "nothing could be compared")
        return f"{len(self.runs)} runs side by side: {first.rstrip('.')}."

    @property
    def differences(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and rows of the settings in which the recipes differ."""
        recipes = [run.recipe for _, run in self.runs]
        keys = dict.fromkeys(key for recipe in recipes for key in recipe if not key.startswith(_ASIDE))
        rows = [[key, *(recipe.get(key, "-") for recipe in recipes)] for key in keys]
        return ["Setting", *(name for name, _ in self.runs)], [row for row in rows if len(set(row[1:])) > 1]

    @property
    def table(self) -> list[list[str]]:
        """Return a row of figures for each run."""
        return [_build_run_row(name, run) for name, run in self.runs]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can represent."""
        heads, rows = self.differences
        return {
            "verdict": self.verdict,
            "verdicts": self.judgment.verdicts,
            "notes": self.judgment.notes,
            "differences": [dict(zip(heads, row, strict=True)) for row in rows],
            "table": [dict(zip(HEADS, row, strict=True)) for row in self.table],
        }


def compare_runs(runs: Sequence[RunFacts]) -> Comparison:
    """Return the comparison of two runs or more."""
    named = list(zip(_name_runs(runs), runs, strict=True))
    return Comparison(named, _build_judgment(named))


def build_comparison_page(found: Comparison, title: str, runs: tuple[Block, ...]) -> Page:
    """Return the page of several runs; `runs` has a block for each."""
    from halfstep.report.run_charts import build_comparison_charts

    none = Paragraph(Span("None of them has taken a step.", "dim"))
    heads, differences = found.differences
    same = Paragraph(Span("Only their output folders.", "dim"))
    blocks: list[Block] = [Paragraph(found.verdict), Heading("Results"), _make_table(HEADS, found.table)]
    blocks += [Heading("Curves"), *(build_charts(*build_comparison_charts(found.runs)) or (none,))]
    blocks += [Heading("Differences of their recipes"), _make_table(heads, differences) if differences else same]
    blocks += [Heading("Which is better"), Items(tuple(found.judgment.verdicts))]
    blocks += [*build_charts(found.judgment.drawing), *(Paragraph(Span(note, "dim")) for note in found.judgment.notes)]
    return Page(title, (*blocks, Heading("Each run"), *runs))


def _make_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(tuple(map(Column, heads)), tuple(map(tuple, rows)))


def _name_runs(runs: Sequence[RunFacts]) -> list[str]:
    """Return the folders' names, or as much of their paths as tells them apart."""
    parts = [run.folder.absolute().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({n})" for n, name in enumerate(names, 1)]


def _build_run_row(name: str, run: RunFacts) -> list[str]:
    (best, _), rate = run.best, run.samples_per_second
    return [
        name,
        run.state.word,
        run.chosen,
        f"{format_metric_in_sentence(run.metric)} {numbers.format_metric_value(best)}"
        if is_known_number(best)
        else "no evaluation",
        numbers.format_metric_value(run.final) if is_known_number(run.final) else "-",
        f"{run.recorded.applied:,}",
        f"{sum(run.recorded.skipped.values()):,}",
        numbers.format_speed(rate) if is_known_number(rate) else "-",
        numbers.format_duration(run.recorded.seconds),
    ]


def _build_judgment(named: list[tuple[str, RunFacts]]) -> Judgment:
    metrics = {run.metric for _, run in named}
    if len(metrics) > 1:
        return Judgment([f"their metrics differ ({', '.join(sorted(metrics))}), so that none is better"], None, [])
    arms, notes = _group_runs(named)
    if len(arms) < 2:
        return Judgment([_explain_no_test(list(arms.values()), named)], None, notes)
    return _test_arms(arms, named[0][1], notes)


Arms = dict[str, list[Any]]
"""The results of the runs of each kind, by a name for the kind."""


def _group_runs(named: list[tuple[str, RunFacts]]) -> tuple[Arms, list[str]]:
    kinds: dict[Any, list[tuple[str, RunFacts]]] = {}
    notes = []
    for name, run in named:
        if run.state.word == FINISHED and is_known_number(run.final):
            # Runs of one kind share these: all but the seed and their places.
            settings = tuple((k, v) for k, v in sorted(run.recipe.items()) if k != SEED and not k.startswith(_ASIDE))
            kinds.setdefault(settings, []).append((name, run))
        else:
            why = "it has no result" if run.state.word == FINISHED else f"it is {run.state.word}"
            notes.append(f"{name} is left out of the test: {why}.")
    # Strict fp32 is what others are compared with, as in a bench; without it, the first run that was given.
    ordered = sorted(kinds.values(), key=lambda found: found[0][1].chosen != "fp32")
    # A precision names its kind if no other kind has it; else the first run of each does.
    chosen = [kind[0][1].chosen for kind in ordered]
    names = chosen if len(set(chosen)) == len(chosen) else [kind[0][0] for kind in ordered]
    return {name: [_build_run_result(run) for _, run in kind] for name, kind in zip(names, ordered, strict=True)}, notes


def _build_run_result(run: RunFacts) -> Any:
    """Return a run as `bench` has its results."""
    from halfstep.measure.bench.comparison import RunResult

    seed, rate = coerce_number(run.recipe.get(SEED)), run.samples_per_second
    return RunResult(
        int(seed) if is_known_number(seed) else 0,
        run.final,
        run.recorded.seconds,
        None,
        rate if is_known_number(rate) else None,
    )


def _explain_no_test(arms: list[list[Any]], named: list[tuple[str, RunFacts]]) -> str:
    if not arms:
        return "none of them has ended with a result, so that there is nothing to test"
    values = [one.metric for one in arms[0]]
    seeds = Counter(one.seed for one in arms[0])
    spread = f"{numbers.format_metric_value(min(values))} to {numbers.format_metric_value(max(values))}"
    what = "one recipe with different seeds" if len(seeds) > 1 else "one recipe with one seed"
    return f"all that ended are of {what}; their {format_metric_in_sentence(named[0][1].metric)} goes from {spread}"


def _test_arms(arms: Arms, first: RunFacts, notes: list[str]) -> Judgment:
    from halfstep.measure.bench.comparison import BenchMetric, build_bench_rows, compute_baseline_margin
    from halfstep.measure.bench.page import draw_parity_intervals
    from halfstep.measure.bench.report import describe_candidate_result, describe_margin

    metric = BenchMetric(first.metric, first.higher_is_better)
    base, *_ = arms
    rows = build_bench_rows(arms, {}, metric, {}, {}, {}, base_name=base)[1:]
    margin = compute_baseline_margin(arms[base], metric)
    shared = len({one.seed for one in arms[base]})
    verdicts = [f"against {base}, {describe_candidate_result(row, metric, shared)}" for row in rows]
    drawing = draw_parity_intervals("Difference with its 90 % interval", rows, metric, margin)
    said = describe_margin(margin, metric, base)
    return Judgment(verdicts, drawing, [f"The test is that of halfstep bench: {said}.", *notes])
