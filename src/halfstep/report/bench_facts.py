"""Read the result of a bench again, and lay out its comparison: the table, intervals beside the margin, curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from halfstep.errors import BadData
from halfstep.measure.bench.comparison import BenchMetric, Config, Gain, Memory, RunResult, rows_of
from halfstep.measure.bench.report import NONE, NOT_MEASURED, Bench, columns, difference, footnote, kind, sentence
from halfstep.measure.conditions import Conditions
from halfstep.measure.parity import ParityTest
from halfstep.report.bars import Bar, Intervals, MemoryUse, intervals, memory_bars
from halfstep.report.charts import Chart, Curve, line_chart
from halfstep.report.json_fields import fields, number, rows, text, texts


@dataclass(frozen=True)
class BenchFacts:
    """A bench, ready to be shown."""

    file: Path
    bench: Bench

    @property
    def label(self) -> str:
        return f"bench of {self.bench.name}"

    @property
    def verdict(self) -> str:
        """Return the best proven candidate in one sentence, or how far the others are from proven."""
        bench, best = self.bench, self.bench.best
        if best is not None or len(bench.rows) == 2:
            return sentence(best or bench.rows[1], bench.metric, len(bench.seeds)).rstrip(".") + "."
        if len(bench.rows) < 2:
            return "The bench has a baseline and nothing to compare it with."
        told = "; ".join(f"{word}: {', '.join(names)}" for word, names in self._by_verdict.items())
        base, many = bench.baseline.name, len(bench.rows) - 1
        return f"None of {many} candidates is proven faster and as good as {base} ({told})."

    @property
    def _by_verdict(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in self.bench.rows[1:]:
            word = "failed" if row.parity is None else f"{row.parity.verdict} {kind(self.bench.metric)}"
            found.setdefault(word.replace("can't tell", "can't tell about"), []).append(row.name)
        return found

    @property
    def table(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return the heads and the rows of the comparison, and the columns in which nothing was measured."""
        shown = columns(self.bench.metric, self.bench.price_per_hour, configs=self.bench.has_configs)
        found = {head: [cell(row, self.bench.baseline) for row in self.bench.rows] for head, cell in shown.items()}
        empty = [head for head, cells in found.items() if set(cells) <= {NONE, NOT_MEASURED}]
        kept = [head for head in found if head not in empty]
        return kept, [list(row) for row in zip(*(found[head] for head in kept), strict=True)], empty

    @property
    def footnote(self) -> str:
        bench = self.bench
        return footnote(bench.conditions, bench.seeds, bench.metric, raced=bench.raced)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can represent."""
        return {"kind": "bench", "file": str(self.file), "verdict": self.verdict, "bench": self.bench.as_dict()}


def bench_from(plain: Mapping[str, Any], file: Path) -> BenchFacts:
    """Return the bench from its JSON; raise BadData where that is not one that `halfstep bench` wrote."""
    try:
        return BenchFacts(file, _bench(plain))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadData(
            f"{file} is not the result of a bench: {type(error).__name__} {text(error, 200)}",
            allowed="bench.json as `halfstep bench` wrote it",
            do="give the folder of a bench, such as runs/bench-cifar10",
        ) from error


def _bench(plain: Mapping[str, Any]) -> Bench:
    given = {text(row["name"], 80): row for row in rows(plain["rows"])}
    metric = BenchMetric(text(plain["metric"]["name"], 60), bool(plain["metric"]["higher_is_better"]))
    raced = bool(plain.get("raced"))
    memories = {name: fields(row["memory"]) for name, row in given.items() if row.get("memory")}
    gains = {name: row["gain"] for name, row in given.items() if raced and row.get("gain")}
    found = rows_of(
        {name: [RunResult.from_dict(run) for run in rows(row["runs"])] for name, row in given.items()},
        {name: text(row.get("failed"), 500) for name, row in given.items()},
        metric,
        {n: Memory(one.get("measured"), one.get("parts"), text(one.get("note"), 300)) for n, one in memories.items()},
        {n: Gain(float(one["times"]), one["low"], one["high"], int(one["pairs"])) for n, one in gains.items()},
        {
            name: Config(text(row.get("precision"), 40) or name, row.get("batch"), tuple(texts(row.get("settings"))))
            for name, row in given.items()
        },
    )
    return Bench(
        name=text(plain["name"], 120),
        metric=metric,
        seeds=tuple(int(seed) for seed in plain["seeds"]),
        rows=found,
        settings=tuple(texts(plain.get("settings"))),
        conditions=cast(Conditions, fields(plain.get("conditions"))),
        price_per_hour=plain.get("price_per_hour"),
        interrupted=bool(plain.get("interrupted")),
        notes=tuple(texts(plain.get("notes"))),
        raced=raced,
    )


# -- drawings ---------------------------------------------------------------------------------------------------------


def parity_drawing(found: BenchFacts) -> Intervals | None:
    """Return each candidate's difference from fp32 with its interval, beside the margin."""
    bench = found.bench
    scale, unit = (100.0, "points") if bench.metric.higher_is_better else (1.0, bench.metric.name)
    laid = [
        (row.name, _difference(row.parity, bench.metric), row.parity.verdict, *_ends(row.parity))
        for row in bench.rows
        if row.parity is not None
    ]
    if bench.margin is None:
        return None
    unit = f"{unit}, better to the right"
    return intervals(laid, around=0.0, unit=unit, scale=scale, margin=bench.margin.size)


def _difference(test: ParityTest, metric: BenchMetric) -> str:
    return difference(test, metric).removeprefix("difference ")


def _ends(test: ParityTest) -> tuple[float, float, float]:
    return number(test.low), number(test.difference), number(test.high)


def speed_drawing(found: BenchFacts) -> Intervals | None:
    """Return each candidate's speed-up with its interval, beside fp32's 1."""
    laid = [
        (row.name, f"{gain.times:.2f}x", gain.verdict, number(gain.low), gain.times, number(gain.high))
        for row in found.bench.rows[1:]
        if (gain := row.gain) is not None
    ]
    return intervals(laid, around=1.0, unit="times as fast as strict fp32")


def memory_drawing(found: BenchFacts) -> list[Bar]:
    """Return the memory of each candidate: predicted in parts, and measured where it was."""
    known_ = [(row.name, row.memory) for row in found.bench.rows if row.memory is not None]
    return memory_bars([MemoryUse(name, memory.parts or {}, number(memory.measured)) for name, memory in known_])


def loss_drawing(found: BenchFacts) -> Chart | None:
    """Return the loss of each candidate over the seconds of its run with the first seed."""
    seed = found.bench.seeds[0] if found.bench.seeds else None
    runs = [(row.name, run) for row in found.bench.rows for run in row.runs if run.seed == seed and run.curve]
    curves = [
        Curve(name, [at for at, _ in run.curve], [loss for _, loss in run.curve], n % 2 == 1, n)
        for n, (name, run) in enumerate(runs)
    ]
    return line_chart(f"Loss over time, seed {seed}", curves, unit="seconds across", x_name="second")


def subject(found: BenchFacts) -> str:
    """Return what the verdicts are about: accuracy, or the loss."""
    return kind(found.bench.metric)
