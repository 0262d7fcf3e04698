"""Learning rate schedules: a factor for each number of applied updates, after a warm-up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.recipe.schema import ScheduleOptions

REWARM_SHARE = 20
"""A new warm-up takes one in so many updates of its part, where the recipe has no warm-up."""


class SchedulePart(NamedTuple):
    """A range of updates with one warm-up and one decay."""

    begin: int
    end: int
    warmup: int

    @property
    def length(self) -> int:
        """The number of updates of the decay."""
        return max(self.end - self.begin - self.warmup, 1)


class LRSchedule(ABC):
    """A factor of the learning rate. An object, not a function: LambdaLR saves the state of objects only."""

    parts: Sequence[Sequence[int]] = ()
    """The parts of an extended run; the curve stays at the end of a part until the next one starts."""

    def __init__(self, options: ScheduleOptions, total: int, per_epoch: int) -> None:
        found = build_schedule_parts(options, total, per_epoch)
        self.warmup, self.length = found[0].warmup, found[0].length
        if options.extensions:
            self.parts = [list(part) for part in found]
        self.prepare(options, per_epoch)

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        """Store the options that the shape needs."""
        return

    @abstractmethod
    def after(self, step: int, part: SchedulePart) -> float:
        """Return the factor after `step` updates of a part, counted from the end of its warm-up."""

    def progress(self, metric: float | None) -> None:
        """Record an evaluation; `metric` is None if it did not improve."""
        return

    def __call__(self, step: int) -> float:
        part, at = self._place(step)
        if at < part.warmup:
            # One more than the warm-up in the divisor, so that the full lr is first reached after it; never 0.
            return self.after(0, part) * (at + 1) / (part.warmup + 1)
        return self.after(at - part.warmup, part)

    def _place(self, step: int) -> tuple[SchedulePart, int]:
        """Return the part of an update, and its number in that part."""
        if not self.parts:
            return SchedulePart(0, self.warmup + self.length, self.warmup), step
        part = SchedulePart(*[part for part in self.parts if part[0] <= step][-1])
        return part, min(step, part.end - 1) - part.begin


class Constant(LRSchedule):
    """A constant learning rate."""

    def after(self, step: int, part: SchedulePart) -> float:
        return 1.0


class Cosine(LRSchedule):
    """Half a cosine, from 1 to `final`."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.final = options.final

    def after(self, step: int, part: SchedulePart) -> float:
        return self.final + (1.0 - self.final) * _compute_cosine_decay(step / part.length)


class Steps(LRSchedule):
    """A multiplication by `factor` every few epochs."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.every, self.factor = options.every_epochs * per_epoch, options.factor

    def after(self, step: int, part: SchedulePart) -> float:
        # Epochs count from the beginning of the part, warm-up included.
        return float(self.factor ** ((step + part.warmup) // self.every))


class Plateau(LRSchedule):
    """A multiplication by `factor` after more than `patience` evaluations without improvement."""

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.patience, self.factor = options.patience, options.factor
        self.num_reductions = self.num_bad_evaluations = 0

    def progress(self, metric: float | None) -> None:
        self.num_bad_evaluations = 0 if metric is not None else self.num_bad_evaluations + 1
        if self.num_bad_evaluations > self.patience:
            self.num_reductions, self.num_bad_evaluations = self.num_reductions + 1, 0

    def after(self, step: int, part: SchedulePart) -> float:
        return float(self.factor**self.num_reductions)


class OneCycle(LRSchedule):
    """A rise from 1/25 over the first 0.3 of the run, then a decay to 1e-4."""

    # The rise and the start are the defaults of torch's OneCycleLR.
    rise, beginning, end = 0.3, 1 / 25, 1e-4

    def after(self, step: int, part: SchedulePart) -> float:
        at = min(step / part.length, 1.0)
        if at < self.rise:
            return self.beginning + (1.0 - self.beginning) * (1.0 - _compute_cosine_decay(at / self.rise))
        return self.end + (1.0 - self.end) * _compute_cosine_decay((at - self.rise) / (1.0 - self.rise))


_SHAPES: dict[str, type[LRSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Steps,
    "plateau": Plateau,
    "one-cycle": OneCycle,
}


def make_schedule(
    options: ScheduleOptions, optimizer: Optimizer, total: int, per_epoch: int
) -> tuple[LambdaLR, LRSchedule]:
    """Return the schedule for `total` updates, `per_epoch` of them in an epoch, and the shape it follows."""
    shape = _SHAPES[options.name](options, total, per_epoch)
    return LambdaLR(optimizer, shape), shape


def build_schedule_parts(options: ScheduleOptions, total: int, per_epoch: int) -> list[SchedulePart]:
    """Return the first part, and one for each extension with a new warm-up; other extensions hold the last value."""
    ends = [(extension.steps or (extension.epochs or 1) * per_epoch) for extension in options.extensions] + [total]
    found = [SchedulePart(0, ends[0], min(options.warmup_steps, ends[0]))]
    for extension, begin, end in zip(options.extensions, ends, ends[1:], strict=False):
        if extension.rewarm:
            added = max(end - begin, 1)
            found.append(SchedulePart(begin, end, min(options.warmup_steps or -(-added // REWARM_SHARE), added // 2)))
    return found


def _compute_cosine_decay(share: float) -> float:
    """Return half a cosine, from one to zero."""
    return 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))
