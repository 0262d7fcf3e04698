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
    if device.type == "cuda":
        return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]
    return [torch.get_rng_state()]
