"""Find unused parameters, which no loss has reached so far; only names are used, no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.finding import Finding
from halfstep.guard.monitors.base import Crossings, Monitor, SampledStep, and_more

LOOKS = 3
"""The number of steps of one optimizer before anything is reported: a layer that is dropped at random returns."""
SHOWN = 4


class Unreached(Monitor):
    """The meter of trainable parameters of an optimizer that never had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._never: dict[str, set[str]] = {}
        self._looks: dict[str, int] = {}
        self._over = Crossings()

    def gradients(self, sample: SampledStep) -> None:
        """Record which trained parameters have no gradient."""
        missing: dict[str, set[str]] = {}
        for one in sample.trained:
            missing.setdefault(one.slot.name, set())
            if one.parameter.grad is None:
                missing[one.slot.name].add(one.name)
        for optimizer, names in missing.items():
            self._never[optimizer] = names & self._never.get(optimizer, names)
            self._looks[optimizer] = self._looks.get(optimizer, 0) + 1

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding for parameters without a gradient in any observed step."""
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
