"""Start a run: join the process group, select the device, and protect the caller's random state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from halfstep.data.dataset import generators_aside
from halfstep.precision.hardware import describe
from halfstep.train.machine import AUTO


@contextmanager
def together() -> Iterator[None]:
    """Join the ranks that torchrun started, where it did, and leave the group at the end."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # A caller that has its own process group keeps it.
    if not launched or dist.is_initialized():
        yield
        return
    # Collectives run on the current device of each rank, so it is set first.
    _take_own_device()
    dist.init_process_group(backends())
    try:
        yield
    finally:
        dist.destroy_process_group()


def rng_preserved() -> AbstractContextManager[None]:
    """Return a context that restores all random generators at its end: a run seeds them for itself."""
    return generators_aside([torch.accelerator.current_device_index()] if torch.accelerator.is_available() else [])


def device_of(name: str) -> torch.device:
    """Return the device of this rank; an accelerator without an index means each rank's own."""
    _take_own_device()
    return torch.device(describe(None if name == AUTO else name).place)


def backends() -> str | None:
    """Return the backends: gloo on the host for texts and decisions, the accelerator's own for gradients."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return f"{torch.empty(0).device}:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def _take_own_device() -> None:
    if torch.accelerator.is_available():
        # Modulo: several ranks may share one device.
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(local % torch.accelerator.device_count())
