"""What an earlier Stepper of this process has learned about the steps of the same optimizers.

A loop that builds its Stepper in the function of one epoch would otherwise start the loss scale, the counts and the
schedule of observation over in each epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from halfstep.finding import Finding
from halfstep.observe.precision_check import ObservationSchedule
from halfstep.step.ema import StepCounts
from halfstep.step.loss import LossSlot


class EarlierSteps(NamedTuple):
    """The parts of a Stepper that the next one over the same optimizers continues."""

    names: tuple[str, ...]
    """The names of the optimizers."""
    precision: str
    counts: StepCounts
    losses: Mapping[str, LossSlot]
    schedule: ObservationSchedule
    stepper: weakref.ref[object]


# Of nobody who holds an optimizer: a record goes with its optimizer.
_RECORDS: weakref.WeakKeyDictionary[torch.optim.Optimizer, EarlierSteps] = weakref.WeakKeyDictionary()


def continue_earlier_steps(optimizers: Mapping[str, torch.optim.Optimizer], own: EarlierSteps) -> list[Finding]:
    """Give a new Stepper the counts, loss scales and schedule of one that has stepped these optimizers before.

    A loss scale is continued if the precision and the settings of the scale are the same. Returns the finding that says
    so, or nothing for the first Stepper.
    """
    earlier = next(iter({id(record): record for record in map(_find_record, optimizers.values())}.values()))
    together = all(_find_record(optimizer) is earlier for optimizer in optimizers.values())
    for optimizer in optimizers.values():
        _keep_record(optimizer, own)
    if earlier is None or not together or earlier.names != own.names or not earlier.counts.attempted:
        return []
    own.counts.load_state_dict(earlier.counts.state_dict())
    own.schedule.continue_from(earlier.schedule)
    scales = []
    for name, loss in own.losses.items() if earlier.precision == own.precision else ():
        if name in earlier.losses and loss.starts_like(earlier.losses[name]):
            loss.load_state_dict(earlier.losses[name].state_dict())
            scales.append(f"{loss.scale.value:g}")
    scaled = any(loss.scale.can_fall or loss.scale.value != 1.0 for loss in own.losses.values())
    continued = f", the loss scale {' and '.join(dict.fromkeys(scales))}" if scales and scaled else ""
    return [
        Finding(
            "stepper.continued",
            "note",
            f"another Stepper has made {earlier.counts.attempted} steps with this optimizer: its counts{continued} and "
            "its schedule of observation are continued",
            "build one Stepper next to the optimizer, not one per epoch; for a new start, build a new optimizer",
        )
    ]


def is_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a Stepper that still exists steps this optimizer."""
    record = _find_record(optimizer)
    return record is not None and record.stepper() is not None


def forget_earlier_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the next Stepper of this optimizer begin anew: for loops that count the steps of each training themselves."""
    with suppress(TypeError):
        _RECORDS.pop(optimizer, None)


def _find_record(optimizer: torch.optim.Optimizer) -> EarlierSteps | None:
    try:
        return _RECORDS.get(optimizer)
    except TypeError:  # a class without weak references
        return None


def _keep_record(optimizer: torch.optim.Optimizer, record: EarlierSteps) -> None:
    try:
        _RECORDS[optimizer] = record
    except TypeError:
        return
