"""What a step was made from: enough to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.step.synchronise import LossFunction


class Attempt(NamedTuple):
    """The step in hand, or the last one. It refers to the batch, which lives until the next step begins."""

    loss_fn: LossFunction | None
    """None in the context form, which cannot be run again."""
    microbatches: Sequence[Any]
    only: str | None
    generators: list[Tensor]
    """torch's generator states before the first micro-batch: the CPU's, then the device's."""


def generator_states(device: torch.device) -> list[Tensor]:
    if device.type in ("cuda", "xpu"):
        return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)]
    if device.type == "mps":
        return [torch.get_rng_state(), torch.mps.get_rng_state()]
    return [torch.get_rng_state()]


def set_generator_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Draw again what was drawn after `generator_states` gave these."""
    torch.set_rng_state(states[0])
    if device.type == "mps":
        torch.mps.set_rng_state(states[1])
    elif len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
