"""One step that the meters look at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from halfstep import world
from halfstep.guard.meters.members import Members
from halfstep.guard.meters.slate import Slate
from halfstep.step.lane import Lane
from halfstep.step.report import StepReport
from halfstep.step.roster import owned_by
from halfstep.step.transaction import Stepper

ELEMENTS = 2**20
"""Of one tensor that are looked at: its first rows, where it has more."""

T = TypeVar("T")


class Trained(NamedTuple):
    """A parameter that this step may move."""

    name: str
    parameter: Tensor
    lane: Lane


class Sample:
    """Which sample it is, the stepper, and where numbers go."""

    def __init__(self, stepper: Stepper, slate: Slate, members: Members, turn: int, *, hooks: bool) -> None:
        self.stepper, self.slate, self.members = stepper, slate, members
        self.hooks = hooks
        """Whether the model runs in the step and nowhere else until it ends."""
        self.turn = turn
        """Samples before this one."""
        self.in_hooks = 0.0
        """Seconds of the host that hooks took out of the forward pass."""
        self.report: StepReport | None = None
        """Known from the moment when the gradients are."""

    @cached_property
    def trained(self) -> list[Trained]:
        """The trainable parameters of the optimizers that this step is for."""
        assert self.report is not None, "which optimizers a step is for is known with its report"
        names = self.members.names
        return [
            Trained(names.get(id(p), "a parameter outside the model"), p, lane)
            for lane in self.stepper._lanes
            if lane.name in self.report.parts
            for p in owned_by(lane.optimizer)
            if p.requires_grad
        ]

    @cached_property
    def with_gradients(self) -> list[Trained]:
        """Those with a dense gradient of which this process holds a part. For the moment before the update."""
        return [one for one in self.trained if _dense(one.parameter.grad) and part_of(one.parameter).numel()]


def part_of(tensor: Tensor) -> Tensor:
    """What is looked at of a tensor: a view of this process's part of it, cut short where it is large."""
    whole: Any = tensor.detach()
    local: Tensor = whole.to_local() if world.is_shard(whole) else whole
    if local.numel() <= ELEMENTS:
        return local
    return local[: max(1, ELEMENTS // (local.numel() // len(local)))]


def taking_turns(all_of_them: Sequence[T], turn: int, at_once: int) -> list[T]:
    """Some of many, other ones each time, until all have had their turn."""
    if len(all_of_them) <= at_once:
        return list(all_of_them)
    first = turn * at_once % len(all_of_them)
    return [*all_of_them[first:], *all_of_them[:first]][:at_once]


def _dense(gradient: Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse
