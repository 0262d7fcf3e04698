"""What an emulated step says: whether a model survives a format, where it does not, and what cures it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.observe.ranges import BACKWARD, FORWARD, WEIGHTS, Event, Range, Ranges
from halfstep.observe.recorder import OUTSIDE

THE_MODEL_ITSELF = "(the model itself)"


@dataclass(frozen=True)
class ModuleRange:
    """How the numbers of one module lie in the format."""

    module: str
    largest: float
    """The largest absolute value of its weights, inputs and results in forward."""
    headroom_bits: float | None
    """Factors of two between that and the end of the format; negative where it does not fit, None without values."""
    overflows: int
    underflow_forward: float
    """Share of the values that were not zero and became zero."""
    underflow_backward: float
    """The same of gradients, at the loss scale that survives."""
    subnormal_forward: float
    """Share of the values that fit, but with fewer digits."""


@dataclass(frozen=True)
class LostGradient:
    """A parameter of which some gradients became zero that are not zero in fp32."""

    parameter: str
    share: float
    """Of its gradients that are not zero in fp32."""
    largest: float
    """The largest of those that vanished, as fp32 has it."""


@dataclass(frozen=True, kw_only=True)
class Survival:
    """Whether one step of a model, forward and backward, survives a format."""

    format: str
    survives: bool
    verdict: str
    first_overflow: Event | None
    """In forward; the first of gradients where only they overflow."""
    loss: float | None
    """None where it is not finite."""
    loss_fp32: float | None
    loss_scale: float | None
    """The first one from 65536 downwards at which all gradients are finite; None where there is none, or no need."""
    gradient_underflow: float
    """Share of gradients on their way back that vanish, at that loss scale."""
    gradient_underflow_unscaled: float | None
    """The same without a loss scale; None for formats that need none."""
    gradient_lost: float | None
    """Norm of the parameters' gradients that vanished, over the norm of all, as fp32 has them."""
    gradient_error: float | None
    """Norm of the difference to fp32's gradients, over their norm."""
    lost: tuple[LostGradient, ...]
    """The largest gradients that vanished."""
    modules: tuple[ModuleRange, ...]
    """The worst first."""
    do: tuple[str, ...]
    """What to type, the best first; empty where nothing is to be done."""
    notes: tuple[str, ...]
    scaled: Survival | None = None
    """For fp8: the same with a scale for each tensor, which training in fp8 always has."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without numbers that JSON has no word for."""
        return asdict(self)


def module_ranges(ranges: Ranges) -> tuple[ModuleRange, ...]:
    """By module, the worst first: overflows, then the least headroom, then what vanishes."""
    names = dict.fromkeys(module for module, _ in ranges.by_place)
    return tuple(sorted((_module_range(ranges, name) for name in names), key=_badness))


def named(module: str) -> str:
    return module or THE_MODEL_ITSELF


def event_named(event: Event) -> Event:
    return Event(named(event.module), event.operation, event.value, event.largest)


def number(value: float) -> str:
    """91 400 rather than 91400.0; others in three digits."""
    return f"{value:,.0f}".replace(",", " ") if 1000 <= value < 1e7 else f"{value:.3g}"


def where(event: Event) -> str:
    """The sentence's part that says where, what and how much."""
    place = "outside the model" if event.module == OUTSIDE else f"in {named(event.module)}"
    return f"{place} ({event.operation}): {number(event.value)} against {number(event.largest)}"


def cures(event: Event | None, islands: Sequence[str], bf16_survives: bool) -> tuple[str, ...]:
    """What to type; an island was tried before it is recommended."""
    do = [f'island(model, "{path}")' for path in islands]
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
        headroom_bits=forward.headroom if math.isfinite(forward.headroom) else None,
        overflows=forward.overflows,
        underflow_forward=forward.underflow_share,
        underflow_backward=parts[BACKWARD].underflow_share,
        subnormal_forward=forward.subnormal_share,
    )


def _badness(found: ModuleRange) -> tuple[float, float, float]:
    headroom = math.inf if found.headroom_bits is None else found.headroom_bits
    return (-found.overflows, headroom, -found.underflow_backward)
