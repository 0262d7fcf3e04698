"""A loss that is a hundred to a million times too high, and finite: one bad batch must not move the weights."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from faults import child, rig
from faults.outcome import Outcome
from halfstep.journal.events import Journal
from halfstep.recipe.names import Override
from halfstep.recipe.resolve import resolve_recipe
from halfstep.step.report import StepReport
from halfstep.train.loop import Loop
from halfstep.train.process_group import preserve_rng
from halfstep.train.run import make_loop
from tests.support.digest import digest_of_run
from tests.support.tiny_task import Tiny

ID = "F11"
WHAT = "a step with a loss 100 to 1,000,000 times too high is refused and changes no bit; healthy steps are applied"
SPIKES, CLEAN = {False: 4, True: 20}, {False: (1, 300), True: (10, 1000)}
"""Spikes; and seeds with the clean steps of each."""
WARM, APART = 30, 12
FALSE_SHARE = 1 / 10_000
SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "data.samples": 800,
    "train.batch_size": 4,
    "train.steps": 1000,
    "train.ema": 0.9,
    "checkpoint.every_steps": 100_000,
    "guard.spikes": "refuse",
}
"""Batches of four points, whose losses are noisy by themselves."""


class Spiked(Tiny):
    """Its loss is multiplied as the row has it."""

    times = 1.0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        return super().loss(model, batch, metrics) * (self.times if model.training else 1.0)


def run(full: bool) -> Outcome:
    with rig.scratch() as folder, preserve_rng():
        spiked = list(_spiked(_loop(folder / "spiked", 0), SPIKES[full]))
        seeds, steps = CLEAN[full]
        refused = [_refused(_loop(folder / str(seed), seed), steps) for seed in range(seeds)]
    allowed = math.ceil(FALSE_SHARE * seeds * steps)
    wrong = [text for text in spiked if text]
    too_many = sum(refused) > allowed
    worst = wrong[0] if wrong else f"{sum(refused)} of {seeds * steps:,} clean steps refused"
    return Outcome(len(spiked) - len(wrong) + (not too_many), len(spiked) + 1, worst)


def _loop(folder: Path, seed: int) -> Loop:
    folder.mkdir()
    settings = {**child.RECIPE, **SETTINGS, "train.seed": seed}
    overrides = [Override(key, value) for key, value in settings.items() if key != "task"]
    recipe = resolve_recipe({"task": "tiny"}, Tiny.schema, overrides, "spiked").recipe
    return make_loop(Spiked(recipe), recipe, folder, Journal())


def _spiked(loop: Loop, count: int) -> Iterator[str]:
    """What went wrong with each spike; nothing where it was refused and the next step was not."""
    chance, task, steps = random.Random(11), loop.task, loop.attempts()
    assert isinstance(task, Spiked)
    for _ in itertools.islice(steps, WARM):
        pass
    for _ in range(count):
        for _ in itertools.islice(steps, chance.randrange(1, APART)):
            pass
        before, task.times = digest_of_run(loop.stepper), 10 ** chance.uniform(2, 6)
        report = next(steps)
        same, times, task.times = digest_of_run(loop.stepper) == before, task.times, 1.0
        yield _wrong(report, same, times, next(steps))


def _wrong(report: StepReport, same: bool, times: float, after: StepReport) -> str:
    if report.applied or report.reason != "guard:spike":
        return f"a loss {times:,.0f} times too high was {'applied' if report.applied else report.reason}"
    if not same:
        return "bits moved on a refused step"
    return "" if after.applied else "the step after a spike was refused, too"


def _refused(loop: Loop, steps: int) -> int:
    return sum(not report.applied for report in itertools.islice(loop.attempts(), steps))
