"""Read the result of a bench again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from halfstep.errors import BadData
from halfstep.measure.bench.comparison import (
    BenchMetric,
    CandidateConfig,
    Gain,
    RunResult,
    UpdateMemory,
    build_bench_rows,
)
from halfstep.measure.bench.page import Bench
from halfstep.measure.bench.report import describe_candidate_result, name_metric
from halfstep.measure.conditions import Conditions
from halfstep.page import Heading, Page, Pairs, Paragraph
from halfstep.report.json_fields import coerce_mapping, coerce_rows, coerce_text, coerce_texts, format_typed_setting


@dataclass(frozen=True)
class BenchFacts:
    """A bench, ready to be shown."""

    json_keys: ClassVar = ("kind", "file", "verdict", "bench")
    kind: ClassVar = "bench"

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
            return describe_candidate_result(best or bench.rows[1], bench.metric, len(bench.seeds)).rstrip(".") + "."
        if len(bench.rows) < 2:
            return "The bench has a baseline and nothing to compare it with."
        told = "; ".join(f"{word}: {', '.join(names)}" for word, names in self._by_verdict.items())
        base, many = bench.baseline.name, len(bench.rows) - 1
        return f"None of {many} candidates is proven faster and as good as {base} ({told})."

    @property
    def _by_verdict(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in self.bench.rows[1:]:
            word = "failed" if row.parity is None else f"{row.parity.verdict} {name_metric(self.bench.metric)}"
            found.setdefault(word.replace("can't tell", "can't tell about"), []).append(row.name)
        return found

    def page(self) -> Page:
        """Return the page of the bench, with where it comes from."""
        bench = self.bench
        settings = " ".join(bench.settings) or "the recipe's own"
        known = [("Subject", bench.name), ("Settings", settings), ("Seeds", ", ".join(map(str, bench.seeds)))]
        listed = {
            key: ", ".join(f"{name} {inner}" for name, inner in coerce_mapping(value).items())
            for key, value in bench.conditions.items()
        }
        conditions = [
            (key.capitalize(), listed[key] or format_typed_setting(value) or "none")
            for key, value in bench.conditions.items()
        ]
        provenance = Pairs((*known, *conditions))
        blocks = (Paragraph(self.verdict), *bench.page().blocks, Heading("Provenance"), provenance)
        return Page(self.label, blocks, str(self.file))


def parse_bench(plain: Mapping[str, Any], file: Path) -> BenchFacts:
    """Return the bench from its JSON; raise BadData if that is not one that `halfstep bench` wrote."""
    try:
        return BenchFacts(file, _build_bench(plain))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadData(
            f"{file} is not the result of a bench: {type(error).__name__} {coerce_text(error, 200)}",
            allowed="bench.json as `halfstep bench` wrote it",
            do="give the folder of a bench, such as runs/bench-cifar10",
        ) from error


def _build_bench(plain: Mapping[str, Any]) -> Bench:
    given = {coerce_text(row["name"], 80): row for row in coerce_rows(plain["rows"])}
    metric = BenchMetric(coerce_text(plain["metric"]["name"], 60), bool(plain["metric"]["higher_is_better"]))
    raced = bool(plain.get("raced"))
    memories = {name: coerce_mapping(row["memory"]) for name, row in given.items() if row.get("memory")}
    gains = {name: row["gain"] for name, row in given.items() if raced and row.get("gain")}
    found = build_bench_rows(
        {name: [RunResult.from_dict(run) for run in coerce_rows(row["runs"])] for name, row in given.items()},
        {name: coerce_text(row.get("failed"), 500) for name, row in given.items()},
        metric,
        {
            n: UpdateMemory(one.get("measured"), one.get("parts"), coerce_text(one.get("note"), 300))
            for n, one in memories.items()
        },
        {n: Gain(float(one["times"]), one["low"], one["high"], int(one["pairs"])) for n, one in gains.items()},
        {
            name: CandidateConfig(
                coerce_text(row.get("precision"), 40) or name,
                row.get("batch"),
                tuple(coerce_texts(row.get("settings"))),
            )
            for name, row in given.items()
        },
    )
    return Bench(
        name=coerce_text(plain["name"], 120),
        metric=metric,
        seeds=tuple(int(seed) for seed in plain["seeds"]),
        rows=found,
        settings=tuple(coerce_texts(plain.get("settings"))),
        conditions=cast(Conditions, coerce_mapping(plain.get("conditions"))),
        price_per_hour=plain.get("price_per_hour"),
        interrupted=bool(plain.get("interrupted")),
        notes=tuple(coerce_texts(plain.get("notes"))),
        raced=raced,
    )
