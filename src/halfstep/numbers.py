"""Format numbers for users, in one way everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def to_float(value: Any) -> float:
    """Return a number from the journal as a float: NaN and infinities may be words; None becomes NaN."""
    return math.nan if value is None else float(value)


def format_metric_value(number: Any) -> str:
    """Format a loss or a metric: four decimals in the usual range, else scientific notation."""
    number = to_float(number)
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else ("inf" if number > 0 else "-inf")
    size = abs(number)
    if size == 0.0 or 1e-3 <= size < 1e5:
        return f"{number:.4f}" if size < 1e3 else f"{number:.1f}"
    return f"{number:.2e}"


def format_learning_rate(number: Any) -> str:
    """Format a learning rate: three digits, without trailing zeros."""
    number = to_float(number)
    if not math.isfinite(number) or number == 0.0:
        return format_metric_value(number) if number else "0"
    return f"{number:.3g}" if 1e-3 <= abs(number) < 1e3 else format_scientific(number)


def format_scientific(number: float) -> str:
    """Format a finite number as 2.5e-4, without trailing zeros."""
    digits, power = f"{number:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_loss_scale(number: Any) -> str:
    """Format a loss scale, which is nearly always an integer."""
    number = to_float(number)
    return f"{number:.0f}" if 1.0 <= number < 1e9 else f"{number:.3g}"


def format_count(number: Any) -> str:
    """Format a count with thousands separators."""
    return f"{int(number):,}"


def format_short_count(number: Any) -> str:
    """Format a count with its unit: 24.4 M."""
    number = to_float(number)
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 1e3 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def format_number(value: float) -> str:
    """Format a number for a sentence: 71,204 and 3.4e+38."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def format_counted_noun(number: int, word: str) -> str:
    """Format a count with its noun: 1 epoch, 2 epochs."""
    return f"{number:,} {pluralize_noun(number, word)}"


def format_ordinal(number: int) -> str:
    """Format the place in a sequence: 1st, 22nd, 113th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def pluralize_noun(number: int, word: str) -> str:
    """Return the noun, in the plural unless the number is 1."""
    return word if number == 1 else f"{word}s"


def format_shape(sides: Iterable[int]) -> str:
    """Format the shape of a tensor: 3×224×224."""
    return "×".join(map(str, sides)) or "one number"


def format_bytes(number: Any) -> str:
    """Format a number of bytes with its binary unit."""
    number = to_float(number)
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}" if number < 100 * unit else f"{number / unit:.0f} {name}"
    return f"{number:.0f} B"


def format_percent(number: Any) -> str:
    """Format a share between 0 and 1 in percent; only an exact 0 or 1 is shown as 0 % or 100 %."""
    percent = 100.0 * to_float(number)
    if not math.isfinite(percent):
        return "? %"
    if 99.0 <= percent < 100.0 or 0.0 < percent < 1.0:
        return f"{min(max(percent, 0.1), 99.9):.1f} %"
    return f"{percent:.0f} %"


def format_speed(number: Any) -> str:
    """Format a throughput."""
    number = to_float(number)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def format_clock(seconds: Any) -> str:
    """Format a duration as a clock: 01:32, 2:05:09, 3 d 04:10."""
    seconds = to_float(seconds)
    if not 0.0 <= seconds < 1e9:
        return "--:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02d}:{minute:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute:02d}:{second:02d}"


def format_duration(seconds: Any) -> str:
    """Format a duration with units: 35 ms, 4.2 s, 3 min 20 s, 5 h 12 min."""
    seconds = to_float(seconds)
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02d} min" if hours else f"{minutes} min {second:02d} s"


def format_first_items(items: Sequence[int], most: int = 8) -> str:
    """Format the first of many numbers, such as sample ids, and the count of the rest."""
    shown = ", ".join(map(str, items[:most]))
    more = len(items) - most
    return f"{shown} and {more} more" if more > 0 else shown
