"""Format the figures of a bench as text, once for every place that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfstep import numbers
from halfstep.formats import BF16
from halfstep.measure.bench.comparison import BenchMetric, BenchRow, Gain, compute_gain
from halfstep.measure.conditions import Conditions, describe_conditions
from halfstep.measure.parity import Margin, ParityTest
from halfstep.numbers import format_counted_noun, pluralize_noun

Cell = Callable[[BenchRow, BenchRow], str]
"""The text of a column, from a row and the baseline's row."""
POINTS = 100.0
"""Points in a metric of 1."""
NONE = "-"
NOT_MEASURED = "not measured"


def describe_candidate_result(row: BenchRow, metric: BenchMetric, seeds: int) -> str:
    """Return one line: `bf16: 1.70x as fast (1.62 to 1.79), 31 % less memory, same accuracy (...)`."""
    return f"{row.name}: {describe_unnamed_result(row, metric, seeds)}"


def describe_unnamed_result(row: BenchRow, metric: BenchMetric, seeds: int) -> str:
    """Return the line of a candidate without its name."""
    if row.failed and not row.runs:
        return f"failed: {row.failed}"
    parts = [_describe_speed(row.gain), *([] if row.less_memory is None else [_describe_saved_memory(row.less_memory)])]
    parts.append(_describe_parity(row.parity, metric))
    few = f"; {len(row.runs)} of {seeds} {pluralize_noun(seeds, 'seed')}" if len(row.runs) < seeds else ""
    failed = f"; then it failed: {row.failed}" if row.failed else ""
    return f"{', '.join(parts)}{few}{failed}"


def describe_fp8_result(row: BenchRow, rows: Sequence[BenchRow], metric: BenchMetric) -> str:
    """Return `fp8: eligible (3 layers), slower than bf16 (0.35x, 0.33 to 0.37), same accuracy as fp32 (...)`."""
    base = rows[0]
    other = next((each for each in rows if each.config.precision == BF16.name and each.runs), base)
    # Paired by seed: a race is against the baseline alone.
    gain = compute_gain(other.runs, row.runs)
    if gain is None:
        speed = f"speed {NOT_MEASURED}"
    else:
        unsure = gain.verdict == "can't tell"
        verdict = "can't tell whether it is faster" if unsure else gain.verdict
        speed = f"{verdict} than {other.name} ({format_gain(gain)})"
    return (
        f"{row.name}: eligible ({format_counted_noun(row.converted, 'layer')}), {speed}, "
        f"{_describe_parity(row.parity, metric)}"
    )


def describe_best_candidate(row: BenchRow, metric: BenchMetric) -> str:
    """Return `Best: AMP+Compiled = 2.03x as fast, same accuracy`."""
    return f"Best: {row.name} = {row.gain.times if row.gain else 0.0:.2f}x as fast, same {name_metric(metric)}"


def _describe_speed(gain: Gain | None) -> str:
    if gain is None:
        return f"speed {NOT_MEASURED}"
    if gain.verdict == "can't tell":
        return f"can't tell whether it is faster ({format_gain(gain)})"
    return f"{gain.times:.2f}x as fast ({_format_gain_range(gain)})"


def format_gain(gain: Gain) -> str:
    """Return the speed-up and its interval as text."""
    return f"{gain.times:.2f}x" + (f", {_format_gain_range(gain)}" if gain.low is not None else "")


def _format_gain_range(gain: Gain) -> str:
    return f"{gain.low:.2f} to {gain.high:.2f}"


def _describe_saved_memory(less: float) -> str:
    # Would be rounded to 0 %.
    if abs(less) < 0.005:
        return "as much memory"
    return f"{abs(less):.0%}".replace("%", " %") + (" less memory" if less > 0 else " more memory")


def _describe_parity(found: ParityTest | None, metric: BenchMetric) -> str:
    what = name_metric(metric)
    if found is None:
        return f"{what} {NOT_MEASURED}"
    word = f"can't tell about its {what}" if found.verdict == "can't tell" else f"{found.verdict} {what}"
    between = format_parity_difference(found, metric)
    aside = "; ".join(part for part in (between and f"difference {between}", found.note) if part)
    return f"{word} ({aside})" if aside else word


def name_metric(metric: BenchMetric) -> str:
    """Return the subject of a verdict: "accuracy", or the name of the loss."""
    return "accuracy" if metric.higher_is_better else metric.name


def format_parity_difference(found: ParityTest, metric: BenchMetric) -> str:
    """Return `-0.1 ± 0.3 points`; for a loss in its own unit, where higher is worse."""
    scale, unit = _select_metric_unit(metric)
    if found.difference is None:
        return ""
    mean = found.difference * scale * (1 if metric.higher_is_better else -1)
    around = "" if found.low is None else f" ± {_format_difference((found.difference - found.low) * scale)}"
    return f"{_format_difference(mean, sign=True)}{around}{unit}"


def describe_margin(margin: Margin, metric: BenchMetric, base: str = "fp32") -> str:
    """Return `margin 1.2 points for every precision: three standard deviations of fp32 over its 3 seeds`."""
    scale, unit = _select_metric_unit(metric)
    spread = f"three standard deviations of {base} over its {margin.seeds} seeds"
    whence = spread if margin.size > margin.smallest else f"the minimum, {describe_smallest_margin(metric, base)}"
    return f"margin {margin.size * scale:.2g}{unit} for every precision: {whence}"


def describe_smallest_margin(metric: BenchMetric, base: str = "fp32") -> str:
    """Return the smallest margin as text."""
    return "half a point" if metric.higher_is_better else f"0.5 % of {base}'s {metric.name}"


def _select_metric_unit(metric: BenchMetric) -> tuple[float, str]:
    return (POINTS, " points") if metric.higher_is_better else (1.0, "")


_ROUNDING = 1e-12
"""Differences that come from rounding: of metrics that are equal, the mean is not exactly zero."""


def _format_difference(number: float, sign: bool = False) -> str:
    """Return a difference with two decimals, or two significant digits if it is smaller."""
    plus = "+" if sign else ""
    number = 0.0 if abs(number) < _ROUNDING else number
    return f"{number:{plus}.2f}" if abs(number) >= 0.01 or number == 0 else f"{number:{plus}.2g}"


def build_bench_columns(metric: BenchMetric, price_per_hour: float | None, *, configs: bool = False) -> dict[str, Cell]:
    """Return all columns; the terminal shows them in two parts."""
    return {
        **build_main_columns(metric, configs=configs),
        name_metric(metric).capitalize(): _format_accuracy_cell,
        "Samples/s": lambda row, base: _format_throughput_cell(row),
        "Skipped": lambda row, base: format_skips(row),
        "Time to fp32's final loss": lambda row, base: format_time_to_loss(row),
        "Peak memory of the process": lambda row, base: (
            NOT_MEASURED if row.peak_bytes is None else numbers.format_bytes(row.peak_bytes)
        ),
        "Energy per epoch": lambda row, base: format_energy(row),
        **(
            {}
            if price_per_hour is None
            else {"Cost of training": lambda row, base: _format_cost_cell(row, price_per_hour)}
        ),
    }


def build_main_columns(metric: BenchMetric, *, configs: bool = False) -> dict[str, Cell]:
    """Return the columns that decide; with `configs`, beginning with the configuration of named candidates."""
    figures: dict[str, Cell] = {
        "Speed": _format_speed_cell,
        "Time per epoch": lambda row, base: (
            NONE if row.seconds_per_epoch is None else numbers.format_duration(row.seconds_per_epoch.mean)
        ),
        "Memory usage": _format_memory_cell,
        f"Final {metric.name}": lambda row, base: _format_metric_cell(row),
    }
    if not configs:
        return {
            "Precision": lambda row, base: row.name,
            **figures,
            name_metric(metric).capitalize(): _format_accuracy_cell,
        }
    return {
        "Config": lambda row, base: "Baseline" if row is base else row.name,
        "Batch": lambda row, base: NONE if row.config.batch is None else str(row.config.batch),
        "Precision": lambda row, base: row.config.precision,
        **figures,
    }


def _format_speed_cell(row: BenchRow, base: BenchRow) -> str:
    if row.failed and not row.runs:
        return "failed"
    if row is base:
        return "1.00x (baseline)"
    if row.gain is None:
        return NONE
    told = f"{row.gain.times:.2f}x" + (f" ({_format_gain_range(row.gain)})" if row.gain.low is not None else "")
    return told if row.gain.verdict != "can't tell" else f"{told}, can't tell"


def _format_memory_cell(row: BenchRow, base: BenchRow) -> str:
    if row.memory is None or row.memory.peak is None:
        return NOT_MEASURED
    how = "" if row.memory.measured is not None else " predicted"
    share = "" if row.less_memory is None else f" ({1.0 - row.less_memory:.0%})"
    return f"{numbers.format_bytes(row.memory.peak)}{share}{how}"


def _format_metric_cell(row: BenchRow) -> str:
    if not row.runs:
        return NONE
    if row.metric is None:
        return "not finite"
    spread = "" if row.metric.sd is None else f" ± {numbers.format_metric_value(row.metric.sd)}"
    some = "" if row.finite == len(row.runs) else f" ({row.finite} of {len(row.runs)} finite)"
    return f"{numbers.format_metric_value(row.metric.mean)}{spread}{some}"


def _format_accuracy_cell(row: BenchRow, base: BenchRow) -> str:
    if row is base:
        return "baseline"
    return row.parity.verdict if row.parity else NONE


def _format_throughput_cell(row: BenchRow) -> str:
    found = row.samples_per_second
    if found is None:
        return NONE
    around = "" if found.low is None else f" ± {numbers.format_speed(found.mean - found.low)}"
    return f"{numbers.format_speed(found.mean)}{around}"


def format_skips(row: BenchRow) -> str:
    """Return the skipped updates by reason as text."""
    return ", ".join(f"{count} {reason}" for reason, count in row.skipped.items()) or ("none" if row.runs else NONE)


def format_time_to_loss(row: BenchRow) -> str:
    """Return the time to fp32's final loss as text."""
    found = row.time_to_loss
    if found is None:
        return NONE
    if found.seconds is None:
        return "not reached"
    some = "" if found.reached == found.runs else f" (in {found.reached} of {found.runs} runs)"
    return f"{numbers.format_duration(found.seconds)}{some}"


def format_energy(row: BenchRow) -> str:
    """Return the energy per epoch as text."""
    return NOT_MEASURED if row.joules_per_epoch is None else f"{row.joules_per_epoch.mean / 3600:.3g} Wh"


def _format_cost_cell(row: BenchRow, price_per_hour: float) -> str:
    cost = row.cost(price_per_hour)
    return NONE if cost is None else f"{cost:.3g}"


def describe_bench_figures(conditions: Conditions, seeds: Sequence[int], metric: BenchMetric, *, raced: bool) -> str:
    """Return what the figures mean and the conditions of the measurement."""
    told = f"{describe_conditions(conditions)}. " if "flags" in conditions else ""
    speed = "from a race of all arms in turns, and samples/s from the runs" if raced else "with the same seed"
    return (
        f"{told}{pluralize_noun(len(seeds), 'Seed')} {', '.join(map(str, seeds))}. Speed: relative to strict fp32, "
        f"{speed}, with "
        f"a 95 % interval. Memory: the tensors of one update. {name_metric(metric).capitalize()}: the same if the 90 % "
        f"interval of the mean difference lies within the margin, the larger of {describe_smallest_margin(metric)} "
        "and three standard "
        "deviations of fp32."
    )
