"""What the allocator itself counted while something ran: the truth that predictions are held against."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.measure.arm import Arm
from halfstep.measure.batches import bytes_of, tensors

_ALLOCATION = "[memory]"
# The profiler greets on standard error, unless it is told not to before it is first used; 5 leaves some of its lines.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def peak_bytes(call: Callable[[], object], device: torch.device, held: Iterable[Tensor]) -> int:
    """The most bytes of tensors at any moment of `call`, those that are `held` throughout included."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        call()
        torch.accelerator.synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device))
    before = bytes_of(held)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return before + _highest(recorded)


def peak_of(arm: Arm) -> int:
    """Of one update after the first one, when the optimizer has made its state."""
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
