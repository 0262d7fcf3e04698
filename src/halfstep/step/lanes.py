"""The lanes of a step together: made, differentiated and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.precision.precision import Precision
from halfstep.step.lane import Lane
from halfstep.step.loss_scale import DynamicScale, LossScale, NoScale
from halfstep.step.report import StepReport
from halfstep.step.riders import Counts, checked_schedule

MOST_ON_RANKS = 4
"""Optimizers whose numbers fit into one agreement of 128 bytes."""

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
    if world.size() > 1 and len(names) > MOST_ON_RANKS:
        raise WrongUse(
            f"{len(names)} optimizers on several processes", allowed=f"{MOST_ON_RANKS}", do="join some of them"
        )
    return [
        Lane(
            name,
            optimizer,
            scale=scale_for(precision, _of(loss_scale, name, names)),
            schedule=checked_schedule(_of(schedule, name, names), optimizer),
            clip_norm=_limit("clip_norm", _of(clip_norm, name, names)),
            clip_value=_limit("clip_value", _of(clip_value, name, names)),
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
            loss.backward(inputs=lane.gradients.trainable, retain_graph=lane is not lanes[-1])


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


def _limit(name: str, given: Any) -> float | None:
    if given is None:
        return None
    if not isinstance(given, (int, float)) or not given > 0:
        raise WrongUse(f"{name}={given!r}", allowed="a positive number, or None", do=f"{name}=1.0")
    return float(given)


def scale_for(precision: Precision, given: LossScale | None = None) -> LossScale:
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
