"""The result of a bench: rows, what they were measured under, and one sentence for each arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from halfstep.measure.bench import words
from halfstep.measure.bench.results import Metric, spoken
from halfstep.measure.bench.row import Row, margin_over
from halfstep.measure.conditions import busy
from halfstep.measure.parity import Margin


@dataclass(frozen=True)
class Bench:
    """Arms beside strict fp32, which is the first row."""

    name: str
    metric: Metric
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    settings: tuple[str, ...] = ()
    """Of the recipe, the same in every arm."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    price_per_hour: float | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    """What went otherwise than planned, and cost no figure."""
    raced: bool = False
    """Speed is from a race of all arms, and not from their runs."""

    @property
    def baseline(self) -> Row:
        return self.rows[0]

    @property
    def margin(self) -> Margin | None:
        """On the metric, the same for every arm; None where fp32 came to nothing."""
        return margin_over(self.baseline.runs, self.metric) if self.baseline.finite else None

    @property
    def asides(self) -> tuple[str, ...]:
        """What belongs to all verdicts: the margin, other work on the machine, and what went amiss."""
        margin = [words.margin_said(self.margin, self.metric)] if self.margin and len(self.rows) > 1 else []
        return (*margin, *filter(None, [busy(dict(self.conditions))]), *self.notes)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence for each arm, and one for the baseline where it did not get through."""
        first = [f"{self.baseline.name}: failed: {self.baseline.failed}"] if self.baseline.failed else []
        return (*first, *(words.sentence(row, self.metric, len(self.seeds)) for row in self.rows[1:]))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as strict JSON can hold it."""
        return spoken(
            {
                "name": self.name,
                "settings": list(self.settings),
                "metric": asdict(self.metric),
                "baseline": self.baseline.name,
                "seeds": list(self.seeds),
                "verdicts": list(self.verdicts),
                "margin": asdict(self.margin) if self.margin else None,
                "notes": list(self.notes),
                "raced": self.raced,
                "rows": [row.as_dict(self.price_per_hour) for row in self.rows],
                "price_per_hour": self.price_per_hour,
                "conditions": dict(self.conditions),
                "interrupted": self.interrupted,
            }
        )

    def markdown(self) -> str:
        """The sentences, the table and the conditions."""
        columns = words.columns(self.metric, self.price_per_hour)
        lines = [*(f"**{sentence}**  " for sentence in map(_escaped, self.verdicts)), ""]
        lines += [f"{aside}  " for aside in map(_escaped, self.asides)] + [""] * bool(self.asides)
        if self.interrupted:
            lines += ["Interrupted: these are the runs that were finished.", ""]
        lines += ["| Hardware | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        hardware = _escaped(str(self.conditions.get("device", "")))
        for row in self.rows:
            cells = [hardware, *(_escaped(cell(row, self.baseline)) for cell in columns.values())]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(
            [*lines, "", _escaped(words.footnote(self.conditions, self.seeds, self.metric, raced=self.raced)), ""]
        )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
