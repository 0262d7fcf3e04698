"""Loss scales: none, static, dynamic. One interface, so that the step does not depend on which one it has.

halfstep has its own, because a step must know whether it was skipped and all ranks must agree on it. The arithmetic
equals torch's to the bit (fp32, same order) as long as the scale stays between floor and cap.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from halfstep.errors import StateMismatch, WrongUse
from halfstep.formats import as_fp32


class LossScale(ABC):
    """The factor of the loss before backward; gradients are divided by it before anything else sees them."""

    value: float = 1.0

    @property
    @abstractmethod
    def can_fall(self) -> bool:
        """Whether a lower scale is possible after an overflow."""

    @abstractmethod
    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after an attempted step whose loss was finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NoScale(LossScale):
    """No loss scale, for formats with fp32's range: the factor is always 1."""

    can_fall = False

    def update(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept an empty state; raise StateMismatch for the state of a loss scale."""
        if state:
            raise StateMismatch(
                f"a loss scale was saved ({', '.join(state)}), but this run has none",
                allowed="an empty state",
                do="resume in fp16, or drop the loss scale's state on purpose",
            )


class StaticScale(LossScale):
    """A constant loss scale. An overflow skips the step and leaves the scale as it is."""

    def __init__(self, scale: float) -> None:
        self.value = _positive("scale", scale)

    @property
    def can_fall(self) -> bool:
        # Only names the reason of a skip: with a scale above 1 the overflow may be the scale's doing.
        return self.value > 1.0

    def update(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the scale."""
        return {"scale": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scale; raise StateMismatch if there is none."""
        self.value = _positive("scale", _require(state, "scale")["scale"])


class DynamicScale(LossScale):
    """A loss scale that falls on an overflow and rises after `growth_interval` clean steps, within [floor, cap].

    `torch.amp.GradScaler` has neither bound: 166 bad batches take it to exactly 0.0, and the next clean one writes NaN
    into the weights. Raises WrongUse for values out of range.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        # Below 1 a scale would shrink the gradients that it is there to protect.
        floor: float = 1.0,
        cap: float = 2.0**24,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.floor = _positive("floor", floor)
        self.cap = _positive("cap", cap)
        # torch keeps its scale in an fp32 tensor; rounding here keeps the two equal to the bit.
        self.value = as_fp32(_positive("init_scale", init_scale))
        self.growth_tracker = 0
        self._check()

    @property
    def can_fall(self) -> bool:
        return self.value > self.floor

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale as `torch.amp.GradScaler` does, within the bounds."""
        if overflow:
            self.value = max(self.floor, as_fp32(self.value * self.backoff_factor))
            self.growth_tracker = 0
        # The comparison of torch's kernel, so that a loaded growth tracker behaves the same.
        elif self.growth_tracker + 1 == self.growth_interval:
            self.value = min(self.cap, as_fp32(self.value * self.growth_factor))
            self.growth_tracker = 0
        else:
            self.growth_tracker += 1

    def state_dict(self) -> dict[str, Any]:
        """Return torch's keys, and the two bounds that torch does not have."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
            "floor": self.floor,
            "cap": self.cap,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load our own state, or that of a `torch.amp.GradScaler`, which has no floor and cap.

        Raises StateMismatch for missing keys and for a scale that is not a finite number.
        """
        _require(state, "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        cap = float(state.get("cap", self.cap))
        loaded = DynamicScale(
            init_scale=cap,  # any value within the bounds; the real one is set below
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
            floor=float(state.get("floor", self.floor)),
            cap=cap,
        )
        scale = float(state["scale"])
        if not math.isfinite(scale) or scale < 0:
            raise StateMismatch(f"a saved loss scale of {scale}", allowed="a finite number", do="start the scale anew")
        loaded.value = min(max(as_fp32(scale), loaded.floor), loaded.cap)
        loaded.growth_tracker = int(state["_growth_tracker"])
        # Only after every check: a refused state leaves the scale as it was.
        self.__dict__.update(loaded.__dict__)

    def _check(self) -> None:
        allowed = "growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1, floor <= init_scale <= cap"
        right = (
            self.growth_factor > 1
            and 0 < self.backoff_factor < 1
            and self.growth_interval >= 1
            and self.floor <= self.value <= self.cap
        )
        if not right:
            raise WrongUse(f"a loss scale with {self.state_dict()}", allowed=allowed, do="correct the knob that is off")


def _positive(name: str, number: Any) -> float:
    value = float(number)
    if not 0 < value < math.inf:
        raise WrongUse(f"{name}={number!r}", allowed="a positive, finite number", do=f"{name}=65536.0, for example")
    return value


def _require(state: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    missing = [key for key in keys if key not in state]
    if missing:
        raise StateMismatch(
            f"a loss scale's state without {', '.join(missing)}",
            allowed=f"a mapping with {', '.join(keys)}",
            do="an empty state comes from a scaler that was disabled: save it from an fp16 run",
        )
    return state
