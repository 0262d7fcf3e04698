"""Choose a cell, and give the reasons for rejecting the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.json_data import JsonResult
from halfstep.measure.plan.probe import LossParity
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from halfstep.numbers import format_counted_noun
from halfstep.precision.select import WORTH_IT

SIMPLEST_FIRST = ("fp32", "tf32", "bf16", "fp16")
"""Precisions by complexity: tf32 rounds less than bf16, and fp16 needs a loss scale."""
BASELINE_PRECISION = SIMPLEST_FIRST[0]


@dataclass(frozen=True)
class PlanCell(JsonResult):
    """The measurements of one setting."""

    json_keys: ClassVar[tuple[str, ...]] = ("setting", "name", "speed", "cut", "first_step", "peak")
    setting: StepSetting
    speed: Speed | None = None
    """Speed relative to strict fp32."""
    cut: str = ""
    """Why it cannot be chosen; empty if it can."""
    first_step: float | None = None
    """Seconds of the first update, including compilation."""
    peak: int | None = None
    """Predicted peak bytes of one update."""
    trail: tuple[float, ...] = ()
    """Losses of its first updates."""

    @property
    def can_be_chosen(self) -> bool:
        """Return whether it was timed and not cut."""
        return self.speed is not None and not self.cut

    @property
    def name(self) -> str:
        return str(self.setting)


@dataclass(frozen=True)
class LadderCell(PlanCell):
    """A cell with its parity by the rule of all cells; None if it was not measured."""

    json_keys: ClassVar[tuple[str, ...]] = (*PlanCell.json_keys, "parity")
    parity: LossParity | None = None


def rank_setting_simplicity(setting: StepSetting) -> tuple[bool, int, bool, int]:
    """Return a sort key, simplest first: eager before compiled, wide before narrow, few micro-batches before many."""
    known = setting.precision in SIMPLEST_FIRST
    precision = SIMPLEST_FIRST.index(setting.precision) if known else len(SIMPLEST_FIRST)
    return setting.compile, precision, setting.channels_last, setting.microbatches


FEWEST_PAIRS = 3
"""With fewer pairs there is no conclusion, even if nothing else was measured."""
LIKELY, LIKELY_COMPILED = 1.03, 1.1
"""Median gains required where intervals overlap, for another layout and for compiling.

Neither changes the precision, so the better guess is used without a verdict. Compiling costs more than time.
"""
SPLIT_WORTH_IT = 1.03
"""Required gain of other micro-batches, which change the statistics of batch normalization."""


def choose_cell(cells: Iterable[PlanCell], *, fp32: float = 1.0, has_batch_norm: bool = False) -> PlanCell:
    """Return the fastest cell; it replaces a simpler one only if its whole interval lies above. The first is the base.

    Within one precision and micro-batch, a clear gain of the median is enough. A narrower precision must gain more than
    its rounding is worth over the best of fp32. Cells with too few pairs for an interval count only if no others exist.
    """
    best, *others = cells
    others = [cell for cell in others if has_interval(cell)] or others
    # Simplest first: each cell then has to beat the simpler one that it would replace.
    for cell in sorted(others, key=lambda cell: rank_setting_simplicity(cell.setting)):
        if cell.can_be_chosen and _can_replace(cell, best, fp32, has_batch_norm):
            best = cell
    return best


def has_interval(cell: PlanCell) -> bool:
    """Return whether the cell can be chosen and has enough pairs for an interval."""
    return cell.can_be_chosen and cell.speed is not None and cell.speed.pairs >= FEWEST_FOR_INTERVAL


def is_fp32(cell: PlanCell) -> bool:
    """Return whether the cell is in fp32."""
    return cell.setting.precision == BASELINE_PRECISION


def _can_replace(cell: PlanCell, simpler: PlanCell, fp32: float, has_batch_norm: bool) -> bool:
    # Against the best of fp32, not strict fp32: another layout alone may gain as much without any rounding.
    if not is_fp32(cell) and _get_speedup(cell) < WORTH_IT * fp32:
        return False
    split = cell.setting.microbatches != simpler.setting.microbatches
    if split and has_batch_norm and _get_speedup(cell) < SPLIT_WORTH_IT * _get_speedup(simpler):
        return False
    return is_interval_above(cell.speed, simpler.speed) or (not split and _is_likely_faster(cell, simpler))


def _is_likely_faster(cell: PlanCell, simpler: PlanCell) -> bool:
    if cell.setting.precision != simpler.setting.precision or not (has_interval(cell) and has_interval(simpler)):
        return False
    enough = LIKELY_COMPILED if cell.setting.compile and not simpler.setting.compile else LIKELY
    return _get_speedup(cell) >= enough * _get_speedup(simpler)


def is_interval_above(one: Speed | None, other: Speed | None) -> bool:
    """Return whether one interval lies above the other; False with fewer than `FEWEST_PAIRS` pairs."""
    if one is None or other is None or one.pairs < FEWEST_PAIRS:
        return False
    return one.low > other.high


def format_speed_interval(speed: Speed) -> str:
    """Return the interval and its number of pairs as text, or that there are too few pairs."""
    if speed.pairs < FEWEST_FOR_INTERVAL:
        return f"{format_counted_noun(speed.pairs, 'pair')}, too few for an interval"
    return f"{speed.low:.2f} to {speed.high:.2f}, {speed.pairs} pairs"


def _get_speedup(cell: PlanCell) -> float:
    return cell.speed.speedup if cell.speed else 0.0


def sort_by_speed(cells: Iterable[PlanCell]) -> list[PlanCell]:
    """Return the cells that can be chosen, fastest first."""
    return sorted((cell for cell in cells if cell.can_be_chosen), key=_get_speedup, reverse=True)


def find_runner_up(choice: PlanCell, cells: Sequence[PlanCell]) -> tuple[PlanCell | None, str]:
    """Return the fastest other cell, and why it was not chosen."""
    others = [cell for cell in sort_by_speed(cells) if cell.setting != choice.setting]
    if not others:
        return None, ""
    other = others[0]
    return other, _explain_rejection(other, choice)


def _explain_rejection(other: PlanCell, choice: PlanCell) -> str:
    assert other.speed is not None
    if (
        choice.speed is None
        or is_interval_above(choice.speed, other.speed)
        or _get_speedup(other) < _get_speedup(choice)
    ):
        beside = f"{other.speed.speedup:.2f}x against {_get_speedup(choice):.2f}x"
        return beside if is_interval_above(choice.speed, other.speed) else f"{beside}; their intervals overlap"
    if other.speed.pairs < FEWEST_FOR_INTERVAL:
        return f"{other.speed.pairs} pairs were measured, too few for a verdict"
    if not is_interval_above(other.speed, choice.speed):
        return f"{other.speed.speedup:.2f}x, but the intervals overlap, and the choice is simpler"
    if not is_fp32(other) and is_fp32(choice):
        return f"{other.speed.speedup:.2f}x is less than {WORTH_IT}x what fp32 can do: not worth its roundings"
    return f"{other.speed.speedup:.2f}x: too little gained for what it changes"


def explain_staying_in_fp32(choice: PlanCell, cells: Iterable[PlanCell]) -> str:
    """Return why a plan stays in fp32: the results of the narrower formats."""
    narrow = [cell for cell in cells if not is_fp32(cell)]
    best = next((cell for cell in sort_by_speed(narrow) if cell.speed), None)
    if best is not None and best.speed is not None:
        found = best.speed
        words = f"{best.setting} is {found.speedup:.2f}x ({format_speed_interval(found)})"
        if _get_speedup(best) < WORTH_IT * _get_speedup(choice):
            return f"{words}, less than {WORTH_IT}x what fp32 does"
        return f"{words}, which overlaps with fp32's {_get_speedup(choice):.2f}x: no verdict"
    if narrow:
        return "; ".join(f"{cell.setting} ({cell.cut or 'not measured'})" for cell in narrow[:3])
    return "this device has no narrower native format"
