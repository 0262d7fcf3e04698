"""What a step was made from: enough to run it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.observe.leaves import leaves
from halfstep.step.lane import Lane
from halfstep.step.synchronise import LossFunction


class Factor(NamedTuple):
    """What one optimizer's loss is multiplied and divided by before backward."""

    scale: float
    base: float | None
    """What sums are divided by; None for means, and before the first sum."""


class Reach(NamedTuple):
    """Where the loss of one optimizer leads."""

    parameters: Sequence[Tensor]
    """Those that it trains: no gradient of others is looked at."""
    alone: bool
    """Backward goes wherever it leads; with several optimizers, to these parameters only."""


class Attempt(NamedTuple):
    """The step in hand, or the last one. It refers to the batch, which lives until the next step begins."""

    loss_fn: LossFunction | None
    """None in the context form, which cannot be run again."""
    microbatches: Sequence[Any]
    only: str | None
    generators: list[Tensor]
    """torch's generator states before the first micro-batch: the CPU's, then the device's."""
    factors: Mapping[str, Factor]
    """By optimizer; only of those that the step was for."""
    versions: tuple[int, ...]
    """How often each tensor of the batch had been written to before the step."""
    reaches: Mapping[str, Reach] | None = None
    """By optimizer; None where it is not known, as of a step that was read from disk: all that the model trains."""
    own_generators: Sequence[tuple[torch.Generator, Tensor]] = ()
    """Those that the loss function holds, with their states before the first micro-batch."""

    @classmethod
    def of(
        cls,
        lanes: Sequence[Lane],
        loss_fn: LossFunction | None,
        microbatches: Sequence[Any],
        only: str | None,
        device: torch.device,
        own_generators: Sequence[tuple[torch.Generator, Tensor]],
    ) -> Attempt:
        """A step that begins now."""
        factors = {lane.name: Factor(lane.scale.value, lane.base_count) for lane in lanes}
        reaches = {lane.name: Reach(lane.gradients.trainable, lane.alone) for lane in lanes}
        states, versions = generator_states(device), versions_of(microbatches)
        return cls(loss_fn, microbatches, only, states, factors, versions, reaches, own_generators)

    @property
    def batch_changed(self) -> bool:
        """Whether something has written into the batch since: a step from it would not be the same."""
        return self.versions != versions_of(self.microbatches)


def versions_of(tree: Sequence[Any]) -> tuple[int, ...]:
    """Version counters of a batch's tensors, in order; those made under inference_mode have none."""
    found: list[Tensor] = []
    for microbatch in tree:
        # Most batches are a tensor or a row of them, and need no closer look.
        if isinstance(microbatch, Tensor):
            found.append(microbatch)
        elif type(microbatch) in (tuple, list) and all(isinstance(item, Tensor) for item in microbatch):
            found += microbatch
        else:
            found += [leaf for _, leaf in leaves(microbatch)]
    return tuple([-1 if tensor.is_inference() else tensor._version for tensor in found])


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
