"""Measure peak memory with the allocator itself; predictions are checked against these figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.measure.batches import bytes_of, tensors
from halfstep.measure.candidate import Candidate

_ALLOCATION = "[memory]"  # Kineto's name for allocation events
# Kineto prints a banner to stderr unless this is set before its first use; level 5 still lets some lines through.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def peak_bytes(call: Callable[[], object], device: torch.device, held: Iterable[Tensor]) -> int:
    """Return the peak bytes of tensors during `call`, including the tensors in `held`, which exist throughout."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        call()
        torch.accelerator.synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device))
    before = bytes_of(held)
    # The CPU allocator keeps no peak statistics, so the profiler's allocation events are summed instead.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return before + _highest(recorded)


def peak_of(arm: Candidate) -> int:
    """Return the peak bytes of one update, measured after a first update that creates the optimizer state."""
    arm.step()
    optimizers = arm.stepper.optimizers.values()
    held: list[Any] = [*arm.model.parameters(), *arm.model.buffers(), *tensors(arm.batch)]
    held += [tensor for optimizer in optimizers for tensor in tensors(list(optimizer.state.values()))]
    return peak_bytes(arm.step, arm.device, held)


def _highest(recorded: Any) -> int:
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == _ALLOCATION]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest
