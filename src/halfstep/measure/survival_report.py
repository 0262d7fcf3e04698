"""The report of an emulated step: whether a model survives a format, where it does not, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.json_data import JsonResult
from halfstep.numbers import number
from halfstep.observe.emulate import BACKWARD, FORWARD, WEIGHTS, Event, Range, Ranges
from halfstep.observe.recorder import OUTSIDE

THE_MODEL_ITSELF = "(the model itself)"


@dataclass(frozen=True)
class ModuleRange:
    """The range of one module's values relative to the format."""

    module: str
    largest: float
    """The largest absolute value of its weights, inputs and results in forward."""
    headroom_bits: float | None
    """Powers of two between `largest` and the format's maximum; negative on overflow, None without values."""
    overflows: int
    underflow_forward: float
    """Share of the non-zero values that became zero."""
    underflow_backward: float
    """The same share for gradients, at the loss scale that survives."""
    subnormal_forward: float
    """Share of the values that are subnormal in the format, with fewer significant bits."""


@dataclass(frozen=True)
class LostGradient:
    """A parameter with gradients that became zero but are non-zero in fp32."""

    parameter: str
    share: float
    """Vanished gradients as a share of those that are non-zero in fp32."""
    largest: float
    """The largest vanished gradient, as in fp32."""


@dataclass(frozen=True, kw_only=True)
class Survival(JsonResult):
    """Whether one forward and backward step of a model survives a format."""

    format: str
    survives: bool
    verdict: str
    first_overflow: Event | None
    """The first overflow in forward; the first in backward if only gradients overflow."""
    loss: float | None
    """None if non-finite."""
    loss_fp32: float | None
    loss_scale: float | None
    """The first scale from 65536 downwards at which all gradients are finite; None if there is none or none is needed.
    """
    gradient_underflow: float
    """Share of the gradient values in backward that vanish at that loss scale."""
    gradient_underflow_unscaled: float | None
    """The same without a loss scale; None for formats that need none."""
    gradient_lost: float | None
    """Norm of the vanished parameter gradients over the norm of all of them, as in fp32."""
    gradient_error: float | None
    """Norm of the difference from fp32's gradients, over their norm."""
    lost: tuple[LostGradient, ...]
    """The largest vanished gradients."""
    modules: tuple[ModuleRange, ...]
    """The module ranges, worst first."""
    do: tuple[str, ...]
    """Remedies as code to type, best first; empty if nothing is needed."""
    notes: tuple[str, ...]
    scaled: Survival | None = None
    """For fp8: the result with a scale for each tensor, which fp8 training always uses."""

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  do: {one}" for one in self.do)])


def module_ranges(ranges: Ranges) -> tuple[ModuleRange, ...]:
    """Return the ranges by module, worst first: overflows, then least headroom, then underflow."""
    names = dict.fromkeys(module for module, _ in ranges.by_place)
    return tuple(sorted((_module_range(ranges, name) for name in names), key=_badness))


def named(module: str) -> str:
    """Return the module's path, or a placeholder for the root module."""
    return module or THE_MODEL_ITSELF


def event_named(event: Event) -> Event:
    """Return the event with a readable module name."""
    return Event(named(event.module), event.operation, event.value, event.largest)


def where(event: Event) -> str:
    """Return the part of the verdict that names the module, operation, value and limit."""
    place = "outside the model" if event.module == OUTSIDE else f"in {named(event.module)}"
    return f"{place} ({event.operation}): {number(event.value)} against {number(event.largest)}"


def remedies(event: Event | None, islands: Sequence[str], bf16_survives: bool) -> tuple[str, ...]:
    """Return remedies as code to type; the islands given here have already been tried."""
    do = [f'island(model, "{path}")' for path in islands]
    # In the root module's own code, or outside the model, there is no submodule to make an island of.
    if event is not None and not islands and event.module in ("", OUTSIDE):
        do.append(f"halfstep.widen(...) what {event.operation} is given {'in the model' if not event.module else ''}")
    if bf16_survives:
        do.append('precision="bf16"')
    return tuple(line.strip() for line in do)


def _module_range(ranges: Ranges, module: str) -> ModuleRange:
    parts = {part: ranges.by_place.get((module, part), Range()) for part in (WEIGHTS, FORWARD, BACKWARD)}
    forward = Range()
    forward.add(parts[WEIGHTS])
    forward.add(parts[FORWARD])
    return ModuleRange(
        module=named(module),
        largest=forward.largest,
        # Infinite where there is no value, and JSON has no infinity.
        headroom_bits=forward.headroom if math.isfinite(forward.headroom) else None,
        overflows=forward.overflows,
        underflow_forward=forward.underflow_share,
        underflow_backward=parts[BACKWARD].underflow_share,
        subnormal_forward=forward.subnormal_share,
    )


def _badness(found: ModuleRange) -> tuple[float, float, float]:
    # Modules without values sort last.
    headroom = math.inf if found.headroom_bits is None else found.headroom_bits
    return (-found.overflows, headroom, -found.underflow_backward)
