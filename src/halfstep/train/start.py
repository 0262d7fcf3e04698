"""The beginning of a run: which processes, which device, which random numbers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from halfstep import world
from halfstep.errors import HalfstepError
from halfstep.precision.hardware import describe

AUTO = "auto"


@contextmanager
def together() -> Iterator[None]:
    """Join the processes that torchrun started with this one, where it did; leave them at the end."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not launched or dist.is_initialized():
        yield
        return
    _take_own_device()
    dist.init_process_group(backends())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def generators_kept() -> Iterator[None]:
    """A run seeds all generators for itself; whoever called it finds them as they were."""
    own = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(own):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def device_of(name: str) -> torch.device:
    """The device of this process; an accelerator named without a number is each process's own."""
    _take_own_device()
    return torch.device(describe(None if name == AUTO else name).place)


def backends() -> str | None:
    """Texts and decisions travel through the main memory, gradients between accelerators where there are any."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return f"{torch.empty(0).device}:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def _take_own_device() -> None:
    if torch.accelerator.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(local % torch.accelerator.device_count())


def cores_each() -> int:
    """Cores of this machine for each process that trains on it."""
    return max(1, world.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def decided_once(decide: Callable[[], str]) -> str:
    """Rank 0's decision, on every rank; where it fails there, every rank ends with the same words."""
    if world.rank() > 0:
        return _told(world.from_rank_zero(""))
    try:
        decision = json.dumps({"decided": decide()})
    except HalfstepError as error:
        world.from_rank_zero(refusal(error))
        raise
    return _told(world.from_rank_zero(decision))


def refusal(error: HalfstepError) -> str:
    """An error as words for other processes, which `unless_refused` raises there."""
    return json.dumps({"refused": [error.given, error.allowed, error.do], "code": error.exit_code})


def unless_refused(text: str, rank: int) -> dict[str, Any]:
    """What a process said; where it was a refusal, this one ends with the same words."""
    message: dict[str, Any] = json.loads(text)
    if "refused" in message:
        given, allowed, do = message["refused"]
        error = HalfstepError(f"rank {rank}: {given}", allowed=allowed, do=do)
        error.exit_code = message["code"]
        raise error
    return message


def _told(text: str) -> str:
    return str(unless_refused(text, 0)["decided"])
