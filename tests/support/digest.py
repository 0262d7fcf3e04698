"""sha256 over everything that a skipped step must not move."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from halfstep import Stepper


def feed(digest: Any, value: Any) -> None:
    """Every bit of nested state, with types and shapes, in a fixed order."""
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"key {key!r}".encode())
            feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            feed(digest, item)
    else:
        digest.update(repr(value).encode())


def digest_of(*values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        feed(digest, value)
    return digest.hexdigest()


def digest_of_run(stepper: Stepper) -> str:
    """Weights, buffers, optimizer state, schedule, EMA and applied counters; not the scale, which does move."""
    state = stepper.state_dict()
    return digest_of(
        dict(stepper.model.named_parameters()),
        dict(stepper.model.named_buffers()),
        {name: (own["optimizer"], _plain(own["schedule"])) for name, own in state["optimizers"].items()},
        state["ema"],
        state.get("weights"),
        stepper.counts.applied,
    )


def _plain(schedule: dict[str, Any] | None) -> Any:
    """A schedule's state without the functions in it, whose repr holds an address."""
    return {k: v for k, v in (schedule or {}).items() if not callable(v) and k != "lr_lambdas"}
