"""Which cell is taken, and in which words the others are passed over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.plan.cell import BASELINE_PRECISION, Cell, simplicity
from halfstep.measure.timing import Speed
from halfstep.precision.ladder import WORTH_IT

FEWEST_PAIRS = 3
"""Of fewer nothing is concluded, not even where there is nothing better."""
LIKELY, LIKELY_COMPILED = 1.03, 1.1
"""What another layout, or compiling, has to gain by the medians where intervals overlap: it changes no precision, so
the better guess is taken without a verdict. Compiling costs more than time."""
SPLIT_WORTH_IT = 1.03
"""Other micro-batches change what batch normalisation averages over; less gain than this is not worth that."""


def choose(cells: Iterable[Cell], *, fp32: float = 1.0, has_batch_norm: bool = False) -> Cell:
    """The fastest, but a cell replaces a simpler one only where its interval lies wholly above. The first is the base.

    In one precision and with the same micro-batches a clear gain of the median is enough. A narrower precision has to
    gain more than its roundings are worth, over the best that fp32 can do. Cells with too few pairs for an interval are
    looked at only where no other was measured for longer.
    """
    best, *others = cells
    others = [cell for cell in others if has_interval(cell)] or others
    for cell in sorted(others, key=lambda cell: simplicity(cell.setting)):
        if cell.can_be_chosen and _replaces(cell, best, fp32, has_batch_norm):
            best = cell
    return best


def has_interval(cell: Cell) -> bool:
    """Whether enough pairs were measured for one, of a cell that can be chosen."""
    return cell.can_be_chosen and cell.speed is not None and cell.speed.pairs >= FEWEST_FOR_INTERVAL


def is_fp32(cell: Cell) -> bool:
    return cell.setting.precision == BASELINE_PRECISION


def _replaces(cell: Cell, simpler: Cell, fp32: float, has_batch_norm: bool) -> bool:
    if not is_fp32(cell) and _speedup(cell) < WORTH_IT * fp32:
        return False
    split = cell.setting.microbatches != simpler.setting.microbatches
    if split and has_batch_norm and _speedup(cell) < SPLIT_WORTH_IT * _speedup(simpler):
        return False
    return wholly_above(cell.speed, simpler.speed) or (not split and _likely_faster(cell, simpler))


def _likely_faster(cell: Cell, simpler: Cell) -> bool:
    if cell.setting.precision != simpler.setting.precision or not (has_interval(cell) and has_interval(simpler)):
        return False
    enough = LIKELY_COMPILED if cell.setting.compile and not simpler.setting.compile else LIKELY
    return _speedup(cell) >= enough * _speedup(simpler)


def wholly_above(one: Speed | None, other: Speed | None) -> bool:
    if one is None or other is None or one.pairs < FEWEST_PAIRS:
        return False
    return one.low > other.high


def interval(speed: Speed) -> str:
    """The median's, with the pairs that it comes from; of few pairs there is none."""
    if speed.pairs < FEWEST_FOR_INTERVAL:
        return f"{speed.pairs} {'pair' if speed.pairs == 1 else 'pairs'}, too few for an interval"
    return f"{speed.low:.2f} to {speed.high:.2f}, {speed.pairs} pairs"


def _speedup(cell: Cell) -> float:
    return cell.speed.speedup if cell.speed else 0.0


def by_speed(cells: Iterable[Cell]) -> list[Cell]:
    """Those that can be chosen, the fastest first."""
    return sorted((cell for cell in cells if cell.can_be_chosen), key=_speedup, reverse=True)


def runner_up(choice: Cell, cells: Sequence[Cell]) -> tuple[Cell | None, str]:
    """The fastest of the others, and why it was not taken."""
    others = [cell for cell in by_speed(cells) if cell.setting != choice.setting]
    if not others:
        return None, ""
    other = others[0]
    return other, _why_not(other, choice)


def _why_not(other: Cell, choice: Cell) -> str:
    assert other.speed is not None
    if choice.speed is None or wholly_above(choice.speed, other.speed) or _speedup(other) < _speedup(choice):
        beside = f"{other.speed.speedup:.2f}x against {_speedup(choice):.2f}x"
        return beside if wholly_above(choice.speed, other.speed) else f"{beside}; their intervals overlap"
    if other.speed.pairs < FEWEST_FOR_INTERVAL:
        return f"{other.speed.pairs} pairs were measured, too few for a verdict"
    if not wholly_above(other.speed, choice.speed):
        return f"{other.speed.speedup:.2f}x, but the intervals overlap, and the choice is simpler"
    if not is_fp32(other) and is_fp32(choice):
        return f"{other.speed.speedup:.2f}x is less than {WORTH_IT}x what fp32 can do: not worth its roundings"
    return f"{other.speed.speedup:.2f}x: too little gained for what it changes"


def why_stay(choice: Cell, cells: Iterable[Cell]) -> str:
    """Why a plan stays in fp32: what the narrower formats did here."""
    narrow = [cell for cell in cells if not is_fp32(cell)]
    best = next((cell for cell in by_speed(narrow) if cell.speed), None)
    if best is not None and best.speed is not None:
        found = best.speed
        words = f"{best.setting} is {found.speedup:.2f}x ({interval(found)})"
        if _speedup(best) < WORTH_IT * _speedup(choice):
            return f"{words}, less than {WORTH_IT}x what fp32 does"
        return f"{words}, which overlaps with fp32's {_speedup(choice):.2f}x: no verdict"
    if narrow:
        return "; ".join(f"{cell.setting} ({cell.cut or 'not measured'})" for cell in narrow[:3])
    return "this device computes in no narrower format natively"
