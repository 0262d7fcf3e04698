"""Measure the throughput of a run, and estimate how long it still takes from what this process has timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from halfstep.numbers import format_duration
from halfstep.recipe.sources import list_recipe_names, read_recipe
from halfstep.train.setup import AnyRecipe

T = TypeVar("T")
KEPT = 0.98
"""The weight that past values keep with each new one: about the last fifty count."""


class Throughput:
    """A counter of samples, seconds, and seconds spent waiting for data since the last `read`."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._since, self._samples, self._waited = time.perf_counter(), 0, 0.0

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items, and count the time until each arrives as waiting."""
        source = iter(items)
        while True:
            asked = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            yield item

    def count(self, samples: int) -> None:
        """Count so many samples."""
        self._samples += samples

    def read(self) -> tuple[float, float]:
        """Return samples per second and the share of time spent waiting, and start over."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        found = self._samples / seconds, min(self._waited / seconds, 1.0)
        self._begin()
        return found


class MovingMean:
    """An exponentially weighted mean; None before its first value."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, number: float) -> None:
        """Add a value."""
        self._sum, self._weight = KEPT * self._sum + number, KEPT * self._weight + 1.0

    @property
    def value(self) -> float | None:
        """The mean, or None."""
        return self._sum / self._weight if self._weight else None


def is_evaluated(epoch: int, every_epochs: int) -> bool:
    """Return whether an epoch before the last one ends with an evaluation: the first always does."""
    return epoch == 1 or epoch % every_epochs == 0


@dataclass(frozen=True)
class RunLength:
    """The number of steps, epochs and evaluations of a run."""

    steps: int
    epochs: int
    every_epochs: int
    """Epochs from one evaluation to the next; the first and the last epoch always have one."""
    evaluation_steps: float
    """The estimated cost of an evaluation in steps before one was timed: a sample costs as much as in training."""

    def ends(self, epoch: int) -> tuple[int, int]:
        """Return how many epochs after the first `epoch` end with an evaluation, and how many without."""
        last = max(self.epochs, epoch)
        due = last // self.every_epochs - epoch // self.every_epochs
        # The first and the last epoch are evaluated in any case.
        due += int(last % self.every_epochs != 0 and last > epoch)
        due += int(epoch == 0 and self.every_epochs > 1 and last > 1)
        return due, last - epoch - due


class TimeLeft:
    """A timer of everything that a run does: each lap starts at the end of the last one."""

    def __init__(self, length: RunLength, clock: Callable[[], float] = time.perf_counter) -> None:
        self.length, self._clock, self._lap = length, clock, clock()
        self._first: float | None = None
        self._steps, self._evaluated, self._closed = MovingMean(), MovingMean(), MovingMean()
        self.steps_timed = 0
        """Steps timed, without the first one, in which kernels are selected and workers start."""

    def begin(self) -> None:
        """Start timing steps."""
        self._lap = self._clock()

    def stepped(self) -> None:
        """Record a step, including its wait for data and the save after the previous one."""
        seconds = self._since()
        if self._first is None:
            self._first = seconds
        else:
            self._steps.add(seconds)
            self.steps_timed += 1

    def closed(self, evaluated: bool) -> None:
        """Record the end of an epoch, with its evaluation where there was one, its pictures and saved files."""
        (self._evaluated if evaluated else self._closed).add(self._since())

    @property
    def per_step(self) -> float:
        """Seconds per step; those of the first step as long as there is no other."""
        return self._steps.value or self._first or 0.0

    @property
    def is_rough(self) -> bool:
        """Return whether an evaluation is still to come and none was timed."""
        return self._evaluated.value is None

    def of_steps(self, steps: int) -> float:
        """Return the seconds for so many steps."""
        return self.per_step * max(steps, 0)

    def of_run(self, attempts: int, epoch: int) -> float:
        """Return the seconds left after so many attempts and closed epochs."""
        guess = self.per_step * self.length.evaluation_steps
        return self._after(attempts, epoch, guess if self._evaluated.value is None else self._evaluated.value)

    def of_batches(self, batches: int, done: int) -> float:
        """Return the seconds for so many batches of the present evaluation, of which `done` are done."""
        return (self._clock() - self._lap) / max(done, 1) * max(batches, 0)

    def while_evaluating(self, attempts: int, epoch: int, done: int, of: int) -> float:
        """Return the seconds left of the run during the evaluation of the next epoch to be closed."""
        each = self.of_batches(1, done)
        evaluation = each * of if self._evaluated.value is None else self._evaluated.value
        return each * max(of - done, 0) + self._after(attempts, epoch + 1, evaluation)

    def _after(self, attempts: int, epoch: int, evaluation: float) -> float:
        due, others = self.length.ends(epoch)
        return self.of_steps(self.length.steps - attempts) + due * evaluation + others * (self._closed.value or 0.0)

    def _since(self) -> float:
        now = self._clock()
        seconds, self._lap = now - self._lap, now
        return seconds


ENOUGH = 2
"""Steps after the first that are timed before the warning."""
LONG, LONG_ON_ACCELERATOR = 3600.0, 24 * 3600.0
"""Seconds from which a run counts as long; an accelerator may run overnight."""
A_LOOK = 1800.0
"""Seconds for a short trial of whether something works."""
MULTIPLE = 32
"""Image sizes that are multiples of this fit every model here."""


def describe_long_run(
    recipe: AnyRecipe, resolution: str, *, seconds: float, per_step: float, on_cores: bool
) -> str | None:
    """Return a warning for a run of so many seconds, or None; `resolution` is `Task.resolution`."""
    if seconds < (LONG if on_cores else LONG_ON_ACCELERATOR):
        return None
    ways = [*_suggest_smaller_images(recipe, resolution, seconds), _suggest_shorter_run(recipe, seconds)]
    lighter = ", ".join(_list_lighter_recipes(recipe, resolution))
    ways += [f"a smaller recipe: {lighter}"] if lighter else []
    return (
        f"{format_duration(per_step)} a step: this run takes about {format_duration(seconds)} here. Shorter: "
        f"{'; or '.join(ways)}"
    )


def _suggest_smaller_images(recipe: AnyRecipe, resolution: str, seconds: float) -> list[str]:
    size = _find_nested_value(recipe.model_dump(), resolution)
    # Half of the size must still be a multiple.
    if not isinstance(size, int) or size % (2 * MULTIPLE):
        return []
    return [f"{resolution}={size // 2}, with a quarter of the pixels (about {format_duration(seconds / 4)})"]


def _suggest_shorter_run(recipe: AnyRecipe, seconds: float) -> str:
    """Return the number of epochs or steps that a trial allows, at least one."""
    name = "steps" if recipe.train.steps is not None else "epochs"
    each = seconds / (recipe.train.steps or recipe.train.epochs or 1)
    number = max(1, int(A_LOOK / each))
    return f"train.{name}={number} for a quick look (about {format_duration(number * each)})"


def _list_lighter_recipes(recipe: AnyRecipe, resolution: str) -> list[str]:
    """Return the recipes of the same task with smaller images, smallest first."""
    own = _find_nested_value(recipe.model_dump(), resolution)
    raws = {name: read_recipe(name).raw for name in list_recipe_names()}
    sizes = {name: _find_nested_value(raw, resolution) for name, raw in raws.items() if raw.get("task") == recipe.task}
    lighter = [name for name, size in sizes.items() if isinstance(size, int) and isinstance(own, int) and size < own]
    return sorted(lighter, key=lambda name: sizes[name])


def _find_nested_value(sections: Any, key: str) -> Any:
    for word in key.split("."):
        sections = sections.get(word) if isinstance(sections, dict) else None
    return sections
