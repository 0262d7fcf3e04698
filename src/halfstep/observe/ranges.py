"""How numbers fared when they were rounded to a format: their range, and what overflowed or vanished, by module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.observe.recorder import Operation

WEIGHTS, FORWARD, BACKWARD = "weights", "forward", "backward"


class Rounded(NamedTuple):
    """A tensor before and after it was rounded."""

    wide: Tensor
    after: Tensor
    format: Format
    weight: bool = False


@dataclass(frozen=True)
class Event:
    """An operation whose result did not fit."""

    module: str
    operation: str
    """Such as aten.mul; `weight` where a weight itself does not fit."""
    value: float
    """The largest absolute value that did not fit, before it was rounded."""
    largest: float
    """The largest value that would have fitted."""


@dataclass
class Range:
    """The numbers of one module, added up."""

    nonzero: int = 0
    largest: float = 0.0
    """The largest absolute value before rounding, where it was finite."""
    overflows: int = 0
    """Finite before, and afterwards not finite, or cut off at the largest number."""
    underflows: int = 0
    """Not zero before, zero after."""
    subnormals: int = 0
    """Not zero, but below the smallest normal number, where digits are lost."""
    headroom: float = math.inf
    """Factors of two between the largest value and the end of the format."""

    @property
    def underflow_share(self) -> float:
        return self.underflows / self.nonzero if self.nonzero else 0.0

    @property
    def subnormal_share(self) -> float:
        return self.subnormals / self.nonzero if self.nonzero else 0.0

    def add(self, other: Range) -> None:
        self.nonzero += other.nonzero
        self.overflows += other.overflows
        self.underflows += other.underflows
        self.subnormals += other.subnormals
        self.largest = max(self.largest, other.largest)
        self.headroom = min(self.headroom, other.headroom)


class Ranges:
    """Ranges by module and by part: its weights, its forward, its backward."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[str, str], Range] = {}
        self.first_overflow: dict[str, Event] = {}
        """By part, in the order in which they happened."""
        self.first_spoiled: Event | None = None
        """The first result that was not finite even before it was rounded, as 1/x is where x had vanished."""

    def add(self, operation: Operation, rounded: Rounded) -> None:
        part = WEIGHTS if rounded.weight else BACKWARD if operation.backward else FORWARD
        if not rounded.wide.numel():
            return
        found, did_not_fit, was_finite = _range_of(rounded)
        self.by_place.setdefault((operation.module, part), Range()).add(found)
        name = "weight" if rounded.weight else str(operation.function._overloadpacket)
        event = Event(operation.module, name, did_not_fit, rounded.format.largest)
        if found.overflows:
            self.first_overflow.setdefault(part, event)
        if not was_finite and self.first_spoiled is None:
            self.first_spoiled = event

    @property
    def first_on_the_way_forward(self) -> Event | None:
        return next((event for part, event in self.first_overflow.items() if part != BACKWARD), None)

    def total(self, part: str) -> Range:
        total = Range()
        for (_, of), found in self.by_place.items():
            if of == part:
                total.add(found)
        return total


def _limit(format: Format) -> float:
    """What is beyond this does not round to the largest number, even where a cast makes it that for want of an inf."""
    step = format.epsilon * 2.0 ** math.floor(math.log2(format.largest))
    return format.largest + step / 2


@torch.no_grad()
def _range_of(rounded: Rounded) -> tuple[Range, float, bool]:
    """The range, the largest value that did not fit, and whether all were finite before."""
    size, after = rounded.wide.detach().abs(), rounded.after.detach()
    finite = size.isfinite()
    lost = finite & (~after.isfinite() | (size > _limit(rounded.format)))
    nothing = torch.zeros((), dtype=size.dtype, device=size.device)
    counts = torch.stack([
        size.count_nonzero(),
        lost.count_nonzero(),
        ((size != 0) & (after == 0)).count_nonzero(),
        ((after != 0) & (after.abs() < rounded.format.smallest_normal)).count_nonzero(),
        (~finite).count_nonzero(),
    ])  # fmt: skip
    nonzero, overflows, underflows, subnormals, spoiled = counts.tolist()
    largest = [torch.where(finite, size, nothing).max(), torch.where(lost, size, nothing).max()]
    most, did_not_fit = torch.stack(largest).tolist()
    headroom = math.log2(rounded.format.largest / most) if most else math.inf
    found = Range(nonzero, most, overflows, underflows, subnormals, headroom)
    return found, did_not_fit, not spoiled
