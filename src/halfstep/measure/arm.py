"""A case under a setting, ready to step: what a run would do with it, timed."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfstep.measure.batches import placed as placed_batch
from halfstep.measure.batches import resized, size_of
from halfstep.measure.case import SEED, Case
from halfstep.measure.setting import Setting
from halfstep.measure.stopwatch import Stopwatch
from halfstep.precision.hardware import describe
from halfstep.step.attempt import generator_states, set_generator_states
from halfstep.step.report import StepReport
from halfstep.step.transaction import Stepper
from halfstep.step.window import Window
from halfstep.train.placing import placed
from halfstep.train.recomputing import checkpoint_activations


class Arm:
    """Takes the same step again and again, on a copy of the case's model. A precision is refused, never replaced."""

    def __init__(
        self, case: Case, setting: Setting, device: torch.device | str | None = None, *, observe: bool = True
    ) -> None:
        self.setting = setting
        self.device = torch.device(describe(device).place)
        self.model = placed(copy.deepcopy(case.model), self.device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self.model)
        self._graphs_before = _graphs()
        if setting.compile:
            self.model.compile()
        batch = placed_batch(case.batch, self.device, setting.channels_last)
        self.batch = resized(batch, setting.batch or size_of(batch))
        self.loss_fn = case.loss_fn
        self.stepper = Stepper(
            self.model, case.optimizer(self.model), precision=setting.precision, strict=True, observe=observe
        )
        self._stopwatch = Stopwatch(self.device)
        self._generators = _first_states(self.device)
        self.trail: list[float] = []
        """Losses of the updates so far: those that were applied, and those that were not finite."""

    @property
    def graphs(self) -> int:
        """Graphs that were compiled since it was made: torch passes over some models in silence."""
        return _graphs() - self._graphs_before

    @property
    def samples(self) -> int:
        """In one update."""
        return size_of(self.batch) * self.setting.microbatches

    def step(self) -> StepReport:
        """One update, with the random numbers of whoever calls."""
        report = self.stepper.step(self.loss_fn, Window([self.batch] * self.setting.microbatches))
        if report.applied or not math.isfinite(report.loss):
            self.trail.append(report.loss)
        return report

    def seconds(self, steps: int = 1) -> float:
        """Of one update, averaged over `steps` in a row."""
        with self._own_random_numbers():
            return self._stopwatch.seconds(self.step, steps)

    def losses(self, steps: int) -> list[float]:
        """Of `steps` more updates."""
        with self._own_random_numbers():
            return [self.step().loss for _ in range(steps)]

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Every arm draws the same ones, whoever takes turns with it; the caller's go on as if it had not been."""
        before = generator_states(self.device)
        set_generator_states(self._generators, self.device)
        try:
            yield
        finally:
            self._generators = generator_states(self.device)
            set_generator_states(before, self.device)

    @torch.no_grad()
    def nudge(self, share: float, seed: int = 1) -> None:
        """Move every weight by about this share of itself: another beginning, as good as the first."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + share * noise.to(parameter))


def _first_states(device: torch.device) -> list[torch.Tensor]:
    """Of generators that were just seeded: the CPU's, then the device's."""
    kinds = dict.fromkeys((torch.device("cpu"), device))
    return [torch.Generator(kind).manual_seed(SEED).get_state() for kind in kinds]


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # what was not loaded has compiled nothing
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
