"""How the learning rate moves: a factor for each number of applied updates, warm-up first."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from halfstep.train.recipe.schema import ScheduleOptions


class Shape(ABC):
    """A factor of the learning rate. An object rather than a function, so that torch saves its state."""

    def __init__(self, options: ScheduleOptions, total: int, per_epoch: int) -> None:
        self.warmup = min(options.warmup_steps, total)
        self.length = max(total - self.warmup, 1)
        self.prepare(options, per_epoch)

    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        """Keep what the shape needs of the options."""
        return

    @abstractmethod
    def after(self, step: int) -> float:
        """The factor after `step` updates, counted from the end of the warm-up."""

    def progress(self, metric: float | None) -> None:
        """An evaluation; None where its metric is no better than before."""
        return

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.after(0) * (step + 1) / (self.warmup + 1)
        return self.after(step - self.warmup)


class Constant(Shape):
    def after(self, step: int) -> float:
        return 1.0


class Cosine(Shape):
    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.final = options.final

    def after(self, step: int) -> float:
        return self.final + (1.0 - self.final) * _falling(step / self.length)


class Steps(Shape):
    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.every, self.factor = options.every_epochs * per_epoch, options.factor

    def after(self, step: int) -> float:
        return float(self.factor ** ((step + self.warmup) // self.every))


class Plateau(Shape):
    def prepare(self, options: ScheduleOptions, per_epoch: int) -> None:
        self.patience, self.factor = options.patience, options.factor
        self.cuts = self.waited = 0

    def progress(self, metric: float | None) -> None:
        self.waited = 0 if metric is not None else self.waited + 1
        if self.waited > self.patience:
            self.cuts, self.waited = self.cuts + 1, 0

    def after(self, step: int) -> float:
        return float(self.factor**self.cuts)


class OneCycle(Shape):
    """Up from a twenty-fifth for three tenths of the run, then down to nearly nothing."""

    rise, beginning, end = 0.3, 1 / 25, 1e-4

    def after(self, step: int) -> float:
        at = min(step / self.length, 1.0)
        if at < self.rise:
            return self.beginning + (1.0 - self.beginning) * (1.0 - _falling(at / self.rise))
        return self.end + (1.0 - self.end) * _falling((at - self.rise) / (1.0 - self.rise))


_SHAPES: dict[str, type[Shape]] = {
    "constant": Constant,
    "cosine": Cosine,
    "step": Steps,
    "plateau": Plateau,
    "one-cycle": OneCycle,
}


def make_schedule(options: ScheduleOptions, optimizer: Optimizer, total: int, per_epoch: int) -> tuple[LambdaLR, Shape]:
    """The schedule for `total` updates, `per_epoch` of them in an epoch, and the shape that it follows."""
    shape = _SHAPES[options.name](options, total, per_epoch)
    return LambdaLR(optimizer, shape), shape


def _falling(share: float) -> float:
    """Half a cosine, from one to zero."""
    return 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))
