"""How long a run still takes: all that is to come, from what was seen; and what is said where that is hours."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.throughput import RunLength, TimeLeft, describe_long_run


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(epochs: int = 5, every: int = 1, steps: int = 10, evaluation: float = 3.0) -> tuple[TimeLeft, Clock]:
    clock = Clock()
    left = TimeLeft(RunLength(epochs * steps, epochs, every, evaluation), clock)
    left.begin()
    return left, clock


def take(left: TimeLeft, clock: Clock, steps: int, seconds: float) -> None:
    for _ in range(steps):
        clock.now += seconds
        left.stepped()


def test_evaluations_are_counted_as_they_were_seen() -> None:
    left, clock = timed()
    take(left, clock, 1, 60.0)
    assert left.per_step == 60.0
    take(left, clock, 9, 2.0)
    assert left.per_step == pytest.approx(2.0), "the first step chooses kernels, and says nothing of the others"
    assert left.is_rough
    assert left.of_run(10, 0) == pytest.approx(40 * 2.0 + 5 * 3 * 2.0), "an evaluation is taken for three steps"
    clock.now += 43.0
    left.closed(evaluated=True)
    assert not left.is_rough
    assert left.of_run(10, 1) == pytest.approx(40 * 2.0 + 4 * 43.0)
    assert left.of_steps(4) == pytest.approx(8.0)
    assert left.of_run(50, 5) == 0.0


def test_an_evaluation_says_what_it_takes_while_it_runs() -> None:
    left, clock = timed(epochs=2, steps=5)
    take(left, clock, 5, 1.0)
    clock.now += 4.0
    assert left.of_batches(6, done=2) == pytest.approx(12.0)
    # 6 more batches, 5 steps, and an evaluation of 8 batches.
    assert left.while_evaluating(5, 0, 2, 8) == pytest.approx(12.0 + 5.0 + 16.0)
    clock.now += 16.0
    left.closed(evaluated=True)
    take(left, clock, 5, 1.0)
    clock.now += 1.0
    assert left.while_evaluating(10, 1, 1, 8) == pytest.approx(7.0), "the last one: nothing comes after it"


@pytest.mark.parametrize("every", range(1, 8))
@pytest.mark.parametrize("epochs", range(1, 8))
def test_epochs_that_end_with_an_evaluation_are_those_that_the_loop_judges(epochs: int, every: int) -> None:
    length = RunLength(10 * epochs, epochs, every, 1.0)
    for done in range(epochs + 1):
        to_come = range(done + 1, epochs + 1)
        due = [epoch for epoch in to_come if epoch % every == 0 or epoch in (1, epochs)]
        assert length.ends(done) == (len(due), len(to_come) - len(due))


def test_epochs_without_an_evaluation_cost_what_they_cost() -> None:
    left, clock = timed(epochs=4, every=2)
    take(left, clock, 10, 1.0)
    clock.now += 5.0
    left.closed(evaluated=False)
    take(left, clock, 10, 1.0)
    clock.now += 30.0
    left.closed(evaluated=True)
    assert left.of_run(20, 2) == pytest.approx(20.0 + 30.0 + 5.0)


def recipe(name: str, *settings: str) -> Any:
    return resolve_run_recipe(read_recipe(name), list(settings)).recipe


def test_a_run_of_hours_is_told_with_what_would_be_shorter() -> None:
    text = describe_long_run(recipe("unet"), "data.crop", seconds=50_400.0, per_step=41.0, on_cores=True)
    assert text is not None
    assert text.startswith("41 s a step: this run takes about 14 h 00 min here. Shorter: ")
    assert "data.crop=256, with a quarter of the pixels (about 3 h 30 min)" in text
    assert "train.epochs=3 for a quick look (about 25 min 12 s)" in text
    assert "a smaller recipe: segmentation_tiny, oxford_pets" in text


@pytest.mark.parametrize(("seconds", "on_cores"), [(3000.0, True), (50_400.0, False)])
def test_an_hour_is_none_to_speak_of_nor_is_a_night_on_an_accelerator(seconds: float, on_cores: bool) -> None:
    assert describe_long_run(recipe("unet"), "data.crop", seconds=seconds, per_step=1.0, on_cores=on_cores) is None


def test_a_run_by_steps_is_shortened_by_steps_and_a_size_that_cannot_be_halved_is_left() -> None:
    by_steps = recipe("segmentation_tiny", "train.epochs=null", "train.steps=1000")
    text = describe_long_run(by_steps, "data.crop", seconds=36_000.0, per_step=36.0, on_cores=True)
    assert text is not None
    assert "train.steps=50 for a quick look (about 30 min 00 s)" in text
    assert "data.crop" not in text
    assert describe_long_run(by_steps, "", seconds=36_000.0, per_step=36.0, on_cores=True)
