"""Say what a precision means: for speed and memory, the benefits, the risks, and what to expect while it trains.

Every line comes from a measurement, an estimate or a setting, and names it; what nobody measured is said to be so.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from halfstep import numbers
from halfstep.report.json_fields import (
    coerce_mapping,
    coerce_number,
    coerce_rows,
    coerce_text,
    coerce_texts,
    is_known_number,
)
from halfstep.report.run_facts import RunFacts
from halfstep.report.run_journal import CurvePoints, find_curve_points

LOW, WATCH, HIGH = "low", "watch", "high"
"""Levels of a risk."""
NEAR_THE_END, SOME_HEADROOM = 1.0, 3.0
"""Bits of headroom: the guard warns below the first; below the second, training may use them up."""
MOST_LOST, SOME_LOST = 0.5, 0.05
"""Shares of gradients that are zero, or of updates that change nothing."""


class Risk(NamedTuple):
    """One thing that can go wrong in this precision, how likely it looks, and on what evidence."""

    what: str
    level: str
    evidence: str


class Outlook(NamedTuple):
    """What a precision means, as sections of plain lines."""

    impact: list[tuple[str, str]]
    benefits: list[str]
    risks: list[Risk]
    expect: list[tuple[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "impact": dict(self.impact),
            "benefits": self.benefits,
            "risks": self.risks,
            "expect": dict(self.expect),
        }


def build_run_outlook(run: RunFacts) -> Outlook:
    """Return the consequences of a run's precision, from its journal and the findings about its model."""
    columns = list_estimate_columns(run.examined)
    return Outlook(
        [("Speed", _describe_run_speed(run)), ("Memory", _describe_run_memory(run, columns))],
        [
            *_describe_larger_batches(run.examined, run.chosen),
            *_list_savings(columns, run.chosen),
            *_describe_precision_choice(run.precision),
        ],
        [*_list_seen_risks(run), *_list_survival_risks(run), *_list_finding_risks(run)],
        list(_list_observed_figures(run)),
    )


def list_estimate_columns(examined: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the predicted memory of each precision on the first device."""
    devices = coerce_rows(coerce_mapping(examined.get("estimate")).get("devices"))
    return coerce_rows(devices[0].get("columns")) if devices else []


def _describe_run_speed(run: RunFacts) -> str:
    rate = run.samples_per_second
    said = f"{numbers.format_speed(rate)} samples/s in {run.chosen}" if is_known_number(rate) else "not measured"
    recipe = shlex.quote(str(run.folder / "recipe.yaml"))
    precisions = "fp32,bf16" if run.chosen in ("fp32", "tf32") else f"fp32,{run.chosen}"
    return f"{said}; compared with fp32: halfstep bench {recipe} --precisions {precisions}"


def _describe_run_memory(run: RunFacts, columns: list[dict[str, Any]]) -> str:
    found = {
        coerce_text(coerce_mapping(one.get("setting")).get("precision"), 20): coerce_number(one.get("peak"))
        for one in columns
    }
    peaks = {name: peak for name, peak in found.items() if is_known_number(peak) and peak > 0}
    if run.chosen in peaks and "fp32" in peaks and run.chosen != "fp32":
        return describe_memory_saving(peaks[run.chosen], peaks["fp32"], run.chosen)
    if run.chosen in peaks:
        return f"{numbers.format_bytes(peaks[run.chosen])} of tensors at the peak of an update, predicted"
    return f"not predicted: halfstep report {shlex.quote(str(run.folder))} --examine"


def describe_memory_saving(peak: float, base: float, name: str) -> str:
    """Return the predicted peak of a precision next to that of fp32."""
    share = 1 - peak / base
    word = "less" if share >= 0 else "more"
    sizes = f"{numbers.format_bytes(peak)} at the peak of an update, fp32 {numbers.format_bytes(base)}"
    return f"{name} {numbers.format_percent(abs(share))} {word}: {sizes}, predicted"


def _list_savings(columns: list[dict[str, Any]], chosen: str) -> Iterator[str]:
    """Yield what shrinks most."""
    parts = {
        coerce_text(coerce_mapping(one.get("setting")).get("precision"), 20): coerce_mapping(one.get("whole"))
        for one in columns
    }
    if chosen == "fp32" or not {chosen, "fp32"} <= set(parts):
        return
    wide, narrow = coerce_number(parts["fp32"].get("activations")), coerce_number(parts[chosen].get("activations"))
    if is_known_number(wide) and is_known_number(narrow) and narrow < wide:
        yield f"Activations saved for backward: {numbers.format_bytes(narrow)} instead of {numbers.format_bytes(wide)}."


def _describe_larger_batches(examined: Mapping[str, Any], chosen: str) -> Iterator[str]:
    devices = coerce_rows(coerce_mapping(examined.get("estimate")).get("devices"))
    largest = coerce_rows(devices[0].get("largest")) if devices else []
    found = {
        coerce_text(row.get("precision"), 20): coerce_number(row.get("batch"))
        for row in largest
        if not row.get("recompute")
    }
    own, wide = found.get(chosen, coerce_number(None)), found.get("fp32", coerce_number(None))
    if is_known_number(own) and is_known_number(wide) and own > wide > 0:
        yield f"Larger batches: up to {own:,.0f} samples fit here, {own / wide:.2g} times as many as in fp32."


def _describe_precision_choice(precision: Mapping[str, Any]) -> Iterator[str]:
    summary = coerce_text(precision.get("summary"), 300)
    if summary:
        yield f"{coerce_text(precision.get('chosen'), 40)}: {summary}."
    for reason in coerce_texts(precision.get("reasons")):
        yield f"{reason}."


def _list_seen_risks(run: RunFacts) -> Iterator[Risk]:
    recorded = run.recorded
    steps, skipped = recorded.attempts, sum(recorded.skipped.values())
    if steps:
        level = HIGH if skipped / steps > 0.25 else WATCH if skipped else LOW
        yield Risk("Skipped steps", level, f"{skipped:,} of {steps:,} steps were skipped")
    least = min(recorded.headroom.items(), key=lambda item: item[1].value, default=None)
    if least is not None:
        module, (attempt, bits) = least
        level = HIGH if bits < NEAR_THE_END else WATCH if bits < SOME_HEADROOM else LOW
        said = f"{bits:.1f} bits were left in {module} at step {attempt:,}, the least of all that was sampled"
        yield Risk("Overflow", level, said)
    yield from _find_meter_risk(
        run, "gradient_zero_share", "Gradients that vanish", "of the sampled gradients were zero"
    )
    yield from _find_meter_risk(
        run, "lost_update_share", "Updates lost to rounding", "of the sampled updates changed nothing"
    )


def _find_meter_risk(run: RunFacts, key: str, what: str, said: str) -> Iterator[Risk]:
    found = find_curve_points(run.recorded.speeds, f"meters.{key}").y
    if found:
        worst = max(found)
        level = HIGH if worst > MOST_LOST else WATCH if worst > SOME_LOST else LOW
        yield Risk(what, level, f"{f'at most {numbers.format_percent(worst)}' if worst else 'none'} {said}")


def _list_survival_risks(run: RunFacts) -> Iterator[Risk]:
    for found in coerce_rows(run.examined.get("survival")):
        name, verdict = coerce_text(found.get("format"), 20), coerce_text(found.get("verdict"), 400)
        what = f"One step in {name}, emulated" + ("" if name == run.chosen else " (not this run's precision)")
        yield Risk(what, LOW if found.get("survives") else HIGH, verdict.removeprefix(f"{name}: "))


def _list_finding_risks(run: RunFacts) -> Iterator[Risk]:
    found = coerce_rows(run.start.get("findings")) + coerce_rows(
        coerce_mapping(run.examined.get("audit")).get("findings")
    )
    for one in found[:20]:
        level = HIGH if one.get("severity") == "error" else WATCH
        fix = f"; {coerce_text(one.get('fix'), 300)}" if one.get("fix") else ""
        yield Risk(coerce_text(one.get("id"), 80), level, f"{coerce_text(one.get('evidence'), 400)}{fix}")


def _list_observed_figures(run: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield what this run did, which is what the next one of its kind will do."""
    speeds, epochs = run.recorded.speeds, run.recorded.epochs
    rates = find_curve_points(speeds, "samples_per_second")
    if len(rates.y) > 3:
        yield "Throughput", _describe_throughput_range(rates)
    if is_known_number(run.wait_share):
        yield "Waiting for data", f"{numbers.format_percent(run.wait_share)} of the time, by the median"
    seconds = find_curve_points(epochs, "seconds")
    if seconds.y:
        yield "An epoch", f"{numbers.format_duration(seconds.median)}, without its evaluation"
    for name, key in (("Device memory", "memory.device_peak_bytes"), ("Memory of the process", "memory.host_bytes")):
        sizes = find_curve_points(speeds, key).y
        if sizes:
            yield name, f"up to {numbers.format_bytes(max(sizes))}"
    busy = find_curve_points(speeds, "gpu.utilisation")
    if busy.y:
        yield "GPU utilization", f"{numbers.format_percent(busy.median)} by the median"
    losses = find_curve_points(epochs, "val.loss").y
    if len(losses) == 1:
        yield "Validation loss", f"{numbers.format_metric_value(losses[0])} after one evaluation"
    elif losses:
        yield (
            "Validation loss",
            f"from {numbers.format_metric_value(losses[0])} after the first epoch to "
            f"{numbers.format_metric_value(losses[-1])}",
        )


def _describe_throughput_range(rates: CurvePoints) -> str:
    """Return the range of throughput; of a long run only the extremes of its spans are known."""
    found = sorted(rates.without_first())
    if not rates.is_whole:
        return f"{numbers.format_speed(found[0])} to {numbers.format_speed(found[-1])} samples/s, at all times"
    low, high = found[len(found) // 10], found[-1 - len(found) // 10]
    return f"{numbers.format_speed(low)} to {numbers.format_speed(high)} samples/s, eight times in ten"
