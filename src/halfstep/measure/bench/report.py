"""Format the figures of a bench as text, once for every place that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfstep import numbers
from halfstep.formats import BF16
from halfstep.measure.bench.comparison import BenchMetric, BenchRow, Gain, gain_of
from halfstep.measure.conditions import Conditions, in_words
from halfstep.measure.parity import Margin, ParityTest
from halfstep.numbers import many, several

Cell = Callable[[BenchRow, BenchRow], str]
"""The text of a column, from a row and the baseline's row."""
POINTS = 100.0
"""Points in a metric of 1."""
NONE = "-"
NOT_MEASURED = "not measured"


def sentence(row: BenchRow, metric: BenchMetric, seeds: int) -> str:
    """Return one line: `bf16: 1.70x as fast (1.62 to 1.79), 31 % less memory, same accuracy (...)`."""
    return f"{row.name}: {claim(row, metric, seeds)}"


def claim(row: BenchRow, metric: BenchMetric, seeds: int) -> str:
    """Return the line of a candidate without its name."""
    if row.failed and not row.runs:
        return f"failed: {row.failed}"
    parts = [_speed_said(row.gain), *([] if row.less_memory is None else [_memory_said(row.less_memory)])]
    parts.append(_parity_said(row.parity, metric))
    few = f"; {len(row.runs)} of {seeds} {many(seeds, 'seed')}" if len(row.runs) < seeds else ""
    failed = f"; then it failed: {row.failed}" if row.failed else ""
    return f"{', '.join(parts)}{few}{failed}"


def fp8_said(row: BenchRow, rows: Sequence[BenchRow], metric: BenchMetric) -> str:
    """Return `fp8: eligible (3 layers), slower than bf16 (0.35x, 0.33 to 0.37), same accuracy as fp32 (...)`."""
    base = rows[0]
    other = next((each for each in rows if each.config.precision == BF16.name and each.runs), base)
    # Paired by seed: a race is against the baseline alone.
    gain = gain_of(other.runs, row.runs)
    if gain is None:
        speed = f"speed {NOT_MEASURED}"
    else:
        unsure = gain.verdict == "can't tell"
        verdict = "can't tell whether it is faster" if unsure else gain.verdict
        speed = f"{verdict} than {other.name} ({gain_in_words(gain)})"
    return f"{row.name}: eligible ({several(row.converted, 'layer')}), {speed}, {_parity_said(row.parity, metric)}"


def best_said(row: BenchRow, metric: BenchMetric) -> str:
    """Return `Best: AMP+Compiled = 2.03x as fast, same accuracy`."""
    return f"Best: {row.name} = {row.gain.times if row.gain else 0.0:.2f}x as fast, same {kind(metric)}"


def _speed_said(gain: Gain | None) -> str:
    if gain is None:
        return f"speed {NOT_MEASURED}"
    if gain.verdict == "can't tell":
        return f"can't tell whether it is faster ({gain_in_words(gain)})"
    return f"{gain.times:.2f}x as fast ({_range(gain)})"


def gain_in_words(gain: Gain) -> str:
    """Return the speed-up and its interval as text."""
    return f"{gain.times:.2f}x" + (f", {_range(gain)}" if gain.low is not None else "")


def _range(gain: Gain) -> str:
    return f"{gain.low:.2f} to {gain.high:.2f}"


def _memory_said(less: float) -> str:
    # Would be rounded to 0 %.
    if abs(less) < 0.005:
        return "as much memory"
    return f"{abs(less):.0%}".replace("%", " %") + (" less memory" if less > 0 else " more memory")


def _parity_said(found: ParityTest | None, metric: BenchMetric) -> str:
    what = kind(metric)
    if found is None:
        return f"{what} {NOT_MEASURED}"
    word = f"can't tell about its {what}" if found.verdict == "can't tell" else f"{found.verdict} {what}"
    between = difference(found, metric)
    aside = "; ".join(part for part in (between and f"difference {between}", found.note) if part)
    return f"{word} ({aside})" if aside else word


def kind(metric: BenchMetric) -> str:
    """Return the subject of a verdict: "accuracy", or the name of the loss."""
    return "accuracy" if metric.higher_is_better else metric.name


def difference(found: ParityTest, metric: BenchMetric) -> str:
    """Return `-0.1 ± 0.3 points`; for a loss in its own unit, where higher is worse."""
    scale, unit = _unit(metric)
    if found.difference is None:
        return ""
    mean = found.difference * scale * (1 if metric.higher_is_better else -1)
    around = "" if found.low is None else f" ± {_format_difference((found.difference - found.low) * scale)}"
    return f"{_format_difference(mean, sign=True)}{around}{unit}"


def margin_said(margin: Margin, metric: BenchMetric, base: str = "fp32") -> str:
    """Return `margin 1.2 points for every precision: three standard deviations of fp32 over its 3 seeds`."""
    scale, unit = _unit(metric)
    spread = f"three standard deviations of {base} over its {margin.seeds} seeds"
    whence = spread if margin.size > margin.smallest else f"the minimum, {smallest(metric, base)}"
    return f"margin {margin.size * scale:.2g}{unit} for every precision: {whence}"


def smallest(metric: BenchMetric, base: str = "fp32") -> str:
    """Return the smallest margin as text."""
    return "half a point" if metric.higher_is_better else f"0.5 % of {base}'s {metric.name}"


def _unit(metric: BenchMetric) -> tuple[float, str]:
    return (POINTS, " points") if metric.higher_is_better else (1.0, "")


_ROUNDING = 1e-12
"""Differences that come from rounding: of metrics that are equal, the mean is not exactly zero."""


def _format_difference(number: float, sign: bool = False) -> str:
    """Return a difference with two decimals, or two significant digits if it is smaller."""
    plus = "+" if sign else ""
    number = 0.0 if abs(number) < _ROUNDING else number
    return f"{number:{plus}.2f}" if abs(number) >= 0.01 or number == 0 else f"{number:{plus}.2g}"


def columns(metric: BenchMetric, price_per_hour: float | None, *, configs: bool = False) -> dict[str, Cell]:
    """Return all columns; the terminal shows them in two parts."""
    return {
        **main_columns(metric, configs=configs),
        kind(metric).capitalize(): _accuracy,
        "Samples/s": lambda row, base: _samples(row),
        "Skipped": lambda row, base: format_skips(row),
        "Time to fp32's final loss": lambda row, base: format_time_to_loss(row),
        "Peak memory of the process": lambda row, base: (
            NOT_MEASURED if row.peak_bytes is None else numbers.size(row.peak_bytes)
        ),
        "Energy per epoch": lambda row, base: format_energy(row),
        **({} if price_per_hour is None else {"Cost of training": lambda row, base: _cost(row, price_per_hour)}),
    }


def main_columns(metric: BenchMetric, *, configs: bool = False) -> dict[str, Cell]:
    """Return the columns that decide; with `configs`, beginning with the configuration of named candidates."""
    figures: dict[str, Cell] = {
        "Speed": _speed,
        "Time per epoch": lambda row, base: (
            NONE if row.seconds_per_epoch is None else numbers.duration(row.seconds_per_epoch.mean)
        ),
        "Memory usage": _memory,
        f"Final {metric.name}": lambda row, base: _metric(row),
    }
    if not configs:
        return {"Precision": lambda row, base: row.name, **figures, kind(metric).capitalize(): _accuracy}
    return {
        "Config": lambda row, base: "Baseline" if row is base else row.name,
        "Batch": lambda row, base: NONE if row.config.batch is None else str(row.config.batch),
        "Precision": lambda row, base: row.config.precision,
        **figures,
    }


def _speed(row: BenchRow, base: BenchRow) -> str:
    if row.failed and not row.runs:
        return "failed"
    if row is base:
        return "1.00x (baseline)"
    if row.gain is None:
        return NONE
    told = f"{row.gain.times:.2f}x" + (f" ({_range(row.gain)})" if row.gain.low is not None else "")
    return told if row.gain.verdict != "can't tell" else f"{told}, can't tell"


def _memory(row: BenchRow, base: BenchRow) -> str:
    if row.memory is None or row.memory.peak is None:
        return NOT_MEASURED
    how = "" if row.memory.measured is not None else " predicted"
    share = "" if row.less_memory is None else f" ({1.0 - row.less_memory:.0%})"
    return f"{numbers.size(row.memory.peak)}{share}{how}"


def _metric(row: BenchRow) -> str:
    if not row.runs:
        return NONE
    if row.metric is None:
        return "not finite"
    spread = "" if row.metric.sd is None else f" ± {numbers.value(row.metric.sd)}"
    some = "" if row.finite == len(row.runs) else f" ({row.finite} of {len(row.runs)} finite)"
    return f"{numbers.value(row.metric.mean)}{spread}{some}"


def _accuracy(row: BenchRow, base: BenchRow) -> str:
    if row is base:
        return "baseline"
    return row.parity.verdict if row.parity else NONE


def _samples(row: BenchRow) -> str:
    found = row.samples_per_second
    if found is None:
        return NONE
    around = "" if found.low is None else f" ± {numbers.speed(found.mean - found.low)}"
    return f"{numbers.speed(found.mean)}{around}"


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
    return f"{numbers.duration(found.seconds)}{some}"


def format_energy(row: BenchRow) -> str:
    """Return the energy per epoch as text."""
    return NOT_MEASURED if row.joules_per_epoch is None else f"{row.joules_per_epoch.mean / 3600:.3g} Wh"


def _cost(row: BenchRow, price_per_hour: float) -> str:
    cost = row.cost(price_per_hour)
    return NONE if cost is None else f"{cost:.3g}"


def footnote(conditions: Conditions, seeds: Sequence[int], metric: BenchMetric, *, raced: bool) -> str:
    """Return what the figures mean and the conditions of the measurement."""
    told = f"{in_words(conditions)}. " if "flags" in conditions else ""
    speed = "from a race of all arms in turns, and samples/s from the runs" if raced else "with the same seed"
    return (
        f"{told}{many(len(seeds), 'Seed')} {', '.join(map(str, seeds))}. Speed: relative to strict fp32, {speed}, with "
        f"a 95 % interval. Memory: the tensors of one update. {kind(metric).capitalize()}: the same if the 90 % "
        f"interval of the mean difference lies within the margin, the larger of {smallest(metric)} and three standard "
        "deviations of fp32."
    )
