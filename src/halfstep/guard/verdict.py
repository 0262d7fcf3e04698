"""What a failed step came from, in plain data: for the log, for a machine, and for the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Cause = Literal["warm_up", "precision", "data", "divergence", "compiler", "hardware"]
WARM_UP: Cause = "warm_up"
"""The loss scale finds its place: normal, and over in a few steps."""
PRECISION: Cause = "precision"
"""A number does not fit the format, or vanishes in it; fp32 is finite."""
DATA: Cause = "data"
"""The batch itself holds what no model can use, was written to, or cannot be used a second time."""
DIVERGENCE: Cause = "divergence"
"""fp32 fails too, or its loss is far from anything before: the weights, the learning rate or the code."""
COMPILER: Cause = "compiler"
"""The same step is finite when it is not compiled."""
HARDWARE: Cause = "hardware"
"""It does not happen again: an operation that is not deterministic, random numbers not torch's, or the device."""

CureKind = Literal["skip", "island", "precision", "lower_rate", "eager", "fix_code"]


@dataclass(frozen=True)
class Culprit:
    """The first operation that made what is not finite, or what came into the step as such."""

    operation: str
    """Such as aten.mul; empty where it came from outside."""
    module: str
    backward: bool
    line: str | None
    format: str
    kinds: tuple[str, ...]
    largest_input: float
    in_fp32: float | None
    """The largest absolute value of its result in fp32."""
    limit: float
    """The largest number of its format."""
    outside: str | None = None


@dataclass(frozen=True)
class Cure:
    """Something that may help."""

    kind: CureKind
    target: str
    """The path of an island, the name of a precision, or a sentence."""
    works: bool | None
    """Whether the same step was finite with it; None where that cannot be tried."""


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    sentence: str
    """One line that a person can act on."""
    culprit: Culprit | None
    evidence: tuple[str, ...]
    cures: tuple[Cure, ...]
    """Smallest first; those that were tried and work come before those that do not."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": list(self.evidence), "cures": [asdict(cure) for cure in self.cures]}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Verdict:
        culprit = plain["culprit"]
        return cls(
            plain["cause"],
            plain["sentence"],
            None if culprit is None else Culprit(**{**culprit, "kinds": tuple(culprit["kinds"])}),
            tuple(plain["evidence"]),
            tuple(Cure(**cure) for cure in plain["cures"]),
        )
