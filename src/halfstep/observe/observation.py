"""The formats that a step was observed to compute in, how much was observed, and whether that justifies a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfstep.errors import PrecisionNotObserved
from halfstep.finding import Finding

SHARE_REQUIRED = 0.9
"""The share of the work outside islands; the rest is what autocast leaves in fp32 on purpose."""
DOUBT = 10
"""The estimate for an operation without a formula may be too small by this factor."""
_NAMED = 5


@dataclass(frozen=True)
class Observation:
    """The work of one step by the format it was done in."""

    expected: str
    flops: Mapping[str, int]
    """Matrix products, convolutions and recurrent layers outside islands, forward and backward."""
    island_flops: int
    strays: Mapping[str, int]
    """Work done in another format than expected, by module, most first."""
    idle_islands: tuple[str, ...] = ()
    """Islands in which nothing ran: their weights may be used without calling them, which protects nothing."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operations without a formula, by name, module and format, with estimated work, most first."""
    unknown_as_expected: int = 0
    """The part of it whose inputs were in the expected format."""
    fp8: Mapping[str, int] = field(default_factory=dict)
    """Work that the model itself requested in fp8, which autocast never does. It is not in `flops`."""

    @property
    def share(self) -> float | None:
        """The share of the counted work that was in the expected format; None if there was none."""
        total = sum(self.flops.values())
        return self.flops.get(self.expected, 0) / total if total else None

    @property
    def confidence(self) -> float:
        """The share of all work that is known, with estimates for unknown operations."""
        known = sum(self.flops.values()) + sum(self.fp8.values()) + self.island_flops
        total = known + sum(self.unknown.values())
        return known / total if total else 1.0

    @property
    def as_asked(self) -> bool:
        """Whether the precision is acceptable; False only if no format of the unknown work could change that."""
        # A wrong refusal stops a good run, so unknown work counts in favor of the step, ten times over.
        unseen = DOUBT * sum(self.unknown.values())
        total = sum(self.flops.values())
        return not total or (self.flops.get(self.expected, 0) + unseen) / (total + unseen) >= SHARE_REQUIRED

    @property
    def in_doubt(self) -> bool:
        """Whether the unknown work decides: without it the step would be refused, or it had another format."""
        if not self.unknown or not self.as_asked:
            return False
        total = sum(self.flops.values()) + sum(self.unknown.values())
        likely = (self.flops.get(self.expected, 0) + self.unknown_as_expected) / total if total else 1.0
        return min(likely, 1.0 if self.share is None else self.share) < SHARE_REQUIRED

    def __str__(self) -> str:
        islands = f", {self.island_flops:.3g} FLOPs in islands" if self.island_flops else ""
        fp8 = "".join(f", {work:.3g} FLOPs in {name}" for name, work in self.fp8.items())
        doubt = f", {self.confidence:.0%} of the work known" if self.unknown else ""
        if self.share is None:
            return f"{self.expected}: no matrix product or convolution was seen{islands}{fp8}{doubt}"
        return f"{self.expected}: {self.share:.1%} of {sum(self.flops.values()):.3g} FLOPs{islands}{fp8}{doubt}"


def not_observed(asked: str, seen: Observation) -> PrecisionNotObserved:
    """Return the error for a step that ran in another precision than requested."""
    return PrecisionNotObserved(
        f"{asked} was asked for, but matrix products and convolutions ran in {_by_format(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        allowed=f"{SHARE_REQUIRED:.0%} of the work outside islands in {seen.expected}",
        do="take out what casts or switches autocast off there, declare it with island(), or ask for another precision",
    )


def changed(asked: str, seen: Observation) -> Finding:
    """Return the finding for a running run whose precision changed; it does not end the run."""
    return Finding(
        "precision.changed",
        "warning",
        f"{asked} was asked for, but now matrix products and convolutions run in {_by_format(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        "take out what casts or switches autocast off there, or declare it with island()",
    )


def doubtful(asked: str, seen: Observation) -> Finding:
    """Return the finding for a step whose precision can be neither refused nor confirmed."""
    known = "nothing else was seen" if seen.share is None else f"of the rest {seen.share:.0%} ran in {seen.expected}"
    return Finding(
        "precision.unknown",
        "warning",
        f"whether this ran in {asked} is not known: no rule counts the work of "
        f"{', '.join(list(seen.unknown)[:_NAMED])}; {known}",
        "look at the dtypes that these are given, or declare what stays in fp32 with island()",
    )


def _by_format(seen: Observation) -> str:
    total = sum(seen.flops.values())
    return ", ".join(f"{name} {part / total:.1%}" for name, part in seen.flops.items())
