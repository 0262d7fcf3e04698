"""A case under one setting, ready to be stepped and timed."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.formats import BF16, FP32
from halfstep.measure.batches import count_samples, list_tensors, resize_batch, sum_storage_bytes
from halfstep.measure.batches import move_batch as placed_batch
from halfstep.measure.case import SEED, Case, resolve_precision
from halfstep.measure.conditions import collect_conditions
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Stopwatch
from halfstep.measure.worker_process import CandidateInfo, TimedUpdate
from halfstep.observe.reachable import find_generators
from halfstep.precision.converted import find_converted_layers
from halfstep.precision.hardware import describe_device
from halfstep.random_state import build_seeded_states, collect_random_states, restore_random_states
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper
from halfstep.step.to_device import move_model_to_device
from halfstep.step.window import Window


class Candidate:
    """A candidate: a copy of the case's model that takes the same step repeatedly.

    It raises an error for a precision that the device cannot compute in; it never substitutes another one.
    """

    def __init__(
        self, case: Case, setting: StepSetting, device: torch.device | str | None = None, *, observe: bool = True
    ) -> None:
        self.setting = setting
        self.device = torch.device(describe_device(device).place)
        # A copy, because the model is the user's, and all candidates start from the same weights.
        self.model = move_model_to_device(copy.deepcopy(case.model), self.device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self.model)
        # Dynamo's counters belong to the process: only the difference is this candidate's.
        self._graphs_before = _count_compiled_graphs()
        if setting.compile:
            self.model.compile()
        batch = placed_batch(case.batch, self.device, setting.channels_last)
        self.batch = resize_batch(batch, setting.batch or count_samples(batch))
        self.loss_fn = case.loss_fn
        stored = setting.weight_format
        if stored != FP32.name and resolve_precision(setting.precision, self.device).narrow is not BF16.dtype:
            stored = FP32.name
        self.stepper = Stepper(
            self.model,
            case.optimizer(self.model),
            precision=setting.precision,
            weight_format=stored,
            gradient_sums=setting.gradient_sums,
            observe=observe,
        )
        self._stopwatch = Stopwatch(self.device)
        # Freshly seeded, not the caller's states: all candidates draw the same random numbers from the start.
        self._held = find_generators(self.loss_fn, self.batch)
        self._random = build_seeded_states(SEED, self.device, self._held)
        self.trail: list[float] = []
        """Losses of the updates so far: of those applied, and of those skipped with a non-finite loss."""

    @property
    def opened(self) -> CandidateInfo:
        """Return the conditions of its device and the samples of an update."""
        found = collect_conditions(self.device)
        if converted := find_converted_layers(self.model):
            found["precision"] = {"converted": converted}
        return {"conditions": found, "samples": self.samples}

    @property
    def graphs(self) -> int:
        """Return the graphs compiled since construction; 0 means that torch.compile silently skipped the model."""
        return _count_compiled_graphs() - self._graphs_before

    @property
    def samples(self) -> int:
        """Return the number of samples in one update."""
        return count_samples(self.batch) * self.setting.microbatches

    def step(self) -> StepReport:
        """Take one update with the generators in their current states; the other methods use the candidate's own."""
        report = self.stepper.step(self.loss_fn, Window([self.batch] * self.setting.microbatches))
        # A skip with a finite loss (fp16 gradients overflowed) leaves the weights unchanged. It is left out, so that
        # the trails of all candidates count the same updates.
        if report.applied or not math.isfinite(report.loss):
            self.trail.append(report.loss)
        return report

    def seconds(self, steps: int = 1) -> float:
        """Return the seconds of one update, averaged over `steps` in a row."""
        with self.use_own_generators():
            return self._stopwatch.seconds(self.step, steps)

    def losses(self, steps: int) -> list[float]:
        """Take `steps` more updates and return their losses."""
        with self.use_own_generators():
            return [self.step().loss for _ in range(steps)]

    @contextmanager
    def use_own_generators(self) -> Iterator[None]:
        """Use the candidate's own generator states, then restore the caller's.

        All candidates draw the same random numbers, regardless of the order in which they are timed.
        """
        before = collect_random_states(self.device, self._held)
        restore_random_states(self._random)
        try:
            yield
        finally:
            self._random = collect_random_states(self.device, self._held)
            restore_random_states(before)

    @torch.no_grad()
    def nudge(self, share: float, seed: int = 1) -> None:
        """Multiply every weight by 1 + `share` × normal noise: a different but equally good starting point."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            # Drawn on the CPU: a device's generator would give other numbers for the same seed.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + share * noise.to(parameter))


def _count_compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # a module that was never imported has compiled nothing
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


_ALLOCATION = "[memory]"  # Kineto's name for allocation events
# Kineto prints a banner to stderr unless this is set before its first use; level 5 still lets some lines through.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def measure_peak_bytes(call: Callable[[], object], device: torch.device, held: Iterable[Tensor]) -> int:
    """Return the peak bytes of tensors during `call`, including the tensors in `held`, which exist throughout."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        call()
        torch.accelerator.synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device))
    before = sum_storage_bytes(held)
    # The CPU allocator keeps no peak statistics, so the profiler's allocation events are summed instead.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return before + _compute_allocation_peak(recorded)


def measure_update_peak(candidate: Candidate) -> int:
    """Return the peak bytes of one update, measured after a first update that creates the optimizer state."""
    with candidate.use_own_generators():
        candidate.step()
        optimizers = candidate.stepper.optimizers.values()
        held: list[Any] = [*candidate.model.parameters(), *candidate.model.buffers(), *list_tensors(candidate.batch)]
        held += [tensor for optimizer in optimizers for tensor in list_tensors(list(optimizer.state.values()))]
        return measure_peak_bytes(candidate.step, candidate.device, held)


def take_timed_update(candidate: Candidate) -> TimedUpdate:
    """Take one more update and time it."""
    reports: list[StepReport] = []
    with candidate.use_own_generators():
        seconds = Stopwatch(candidate.device).seconds(lambda: reports.append(candidate.step()))
    return TimedUpdate(seconds, reports[0].loss, reports[0].reason)


def _compute_allocation_peak(recorded: Any) -> int:
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == _ALLOCATION]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest
