"""Parameters that no loss has reached so far. Names only: no tensor is looked into."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.finding import Finding
from halfstep.guard.meters.meter import Crossings, Meter, and_more
from halfstep.guard.meters.sample import Sample

LOOKS = 3
"""At steps of one optimizer before anything is said: a layer that is dropped at random returns."""
SHOWN = 4


class Unreached(Meter):
    """Trainable parameters of an optimizer that never had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._never: dict[str, set[str]] = {}
        self._looks: dict[str, int] = {}
        self._over = Crossings()

    def gradients(self, sample: Sample) -> None:
        missing: dict[str, set[str]] = {}
        for one in sample.trained:
            missing.setdefault(one.lane.name, set())
            if one.parameter.grad is None:
                missing[one.lane.name].add(one.name)
        for optimizer, names in missing.items():
            self._never[optimizer] = names & self._never.get(optimizer, names)
            self._looks[optimizer] = self._looks.get(optimizer, 0) + 1

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        never = [
            name
            for optimizer, names in self._never.items()
            if self._looks[optimizer] >= LOOKS
            for name in sorted(names)
        ]
        self.readings = {"without_gradient": len(never)}
        fresh = self._over.new(never, never)
        if not fresh:
            return []
        return [
            Finding(
                "no-gradient",
                "warning",
                f"{', '.join(fresh[:SHOWN])}{and_more(len(fresh) - SHOWN)}: no gradient in any step that was looked "
                "at: the loss does not depend on them",
                "use them in the loss, or freeze them: parameter.requires_grad_(False)",
            )
        ]
