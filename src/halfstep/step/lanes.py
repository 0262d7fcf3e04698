"""The lanes of a step together: made, differentiated, agreed on and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.precision.precision import Precision
from halfstep.step.lane import Lane
from halfstep.step.loss_scale import DynamicScale, LossScale, NoScale
from halfstep.step.report import StepReport
from halfstep.step.riders import Counts, checked_schedule

V = TypeVar("V")
ByName: TypeAlias = V | Mapping[str, V] | None
"""One for all optimizers, or one for each by name, or none."""


def make_lanes(
    optimizers: Mapping[str, torch.optim.Optimizer],
    precision: Precision,
    loss_scale: ByName[LossScale],
    schedule: ByName[Any],
    clip_norm: ByName[float],
    clip_value: ByName[float],
) -> list[Lane]:
    if clip_norm is not None and clip_value is not None:
        raise WrongUse("clip_norm and clip_value together", allowed="one of them", do="clip_norm=1.0")
    names = list(optimizers)
    return [
        Lane(
            name,
            optimizer,
            scale=_scale(_of(loss_scale, name, names), precision),
            schedule=checked_schedule(_of(schedule, name, names)),
            clip_norm=_of(clip_norm, name, names),
            clip_value=_of(clip_value, name, names),
            alone=len(names) == 1,
        )
        for name, optimizer in optimizers.items()
    ]


def differentiate(lanes: Sequence[Lane], losses: Any, divide: int) -> None:
    """Backward from each lane's loss, into its own optimizer's parameters and no others."""
    by_name = losses if isinstance(losses, dict) else {lane.name: losses for lane in lanes[:1]}
    missing = [lane.name for lane in lanes if lane.name not in by_name]
    if missing:
        raise WrongUse(
            f"no loss for {missing}; got {sorted(by_name) if isinstance(losses, dict) else type(losses).__name__}",
            allowed=f"a dict with {[lane.name for lane in lanes]}",
            do="return one loss for each optimizer, or step(..., only=name)",
        )
    ready = [(lane, lane.scaled(by_name[lane.name], divide)) for lane in lanes]
    for lane, loss in ready:
        if lane.alone:
            loss.backward()
        else:
            loss.backward(inputs=lane.gradients.parameters, retain_graph=lane is not lanes[-1])


def agree(lanes: Sequence[Lane]) -> None:
    """One small collective, and one read by the host: the only ones of a step."""
    numbers = [lane.numbers() for lane in lanes]
    agreed = iter(world.agree(torch.stack([n for some in numbers for n in some])).tolist())  # host read
    for lane, some in zip(lanes, numbers, strict=True):
        lane.read(*(next(agreed) for _ in some))


def report_of(lanes: Sequence[Lane], counts: Counts, reason: str | None) -> StepReport:
    """What a step with this outcome says about itself."""
    applied = reason is None
    return StepReport(
        step=counts.applied + applied,
        attempt=counts.attempted,
        applied=applied,
        reason=reason,
        finite=all(lane.finite for lane in lanes),
        loss=sum(lane.loss for lane in lanes),
        grad_norm=math.hypot(*(lane.norm for lane in lanes)),
        loss_scale=lanes[0].scale.value,
        parts={lane.name: lane.part() for lane in lanes},
    )


def lane_named(name: str, lanes: Sequence[Lane]) -> Lane:
    for lane in lanes:
        if lane.name == name:
            return lane
    names = ", ".join(repr(lane.name) for lane in lanes)
    raise WrongUse(f"only={name!r}", allowed=names, do="name one of this Stepper's optimizers")


def strays(model: nn.Module, lanes: Sequence[Lane]) -> list[Tensor]:
    """Parameters that backward reaches and no optimizer owns: their gradients must not pile up."""
    owned = {id(p) for lane in lanes for p in lane.gradients.parameters}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in owned]


def _of(values: ByName[V], name: str, names: Sequence[str]) -> V | None:
    if not isinstance(values, Mapping):
        if values is not None and len(names) > 1 and not isinstance(values, (int, float)):
            raise WrongUse(
                f"one {type(values).__name__} for optimizers {list(names)}",
                allowed="a dict by optimizer name",
                do=f"{{{names[0]!r}: ..., {names[1]!r}: ...}}",
            )
        return values
    unknown = set(values) - set(names)
    if unknown:
        raise WrongUse(f"{sorted(unknown)} among the names", allowed=str(list(names)), do="use the optimizers' names")
    return values.get(name)


def _scale(given: LossScale | None, precision: Precision) -> LossScale:
    """fp16 has a loss scale and nothing else has one: without it gradients vanish, with it they gain nothing."""
    if given is None:
        return DynamicScale() if precision.scaled else NoScale()
    if isinstance(given, NoScale) == precision.scaled:
        raise WrongUse(
            f"{type(given).__name__} with precision {precision.name}",
            allowed="a loss scale with fp16, and only there",
            do="leave loss_scale out, or give StaticScale(1.0) to see fp16 without one",
        )
    return given
