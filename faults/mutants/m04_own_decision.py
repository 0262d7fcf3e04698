"""Each rank decides from its own numbers whether a step is applied."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.step.ranks import Ranks

WHAT = "each rank decides separately whether a step is skipped"
ROWS = ("F15", "F16")


def apply() -> None:
    def alone(self: Ranks, numbers: Tensor) -> Tensor:
        """As if all the others had the same."""
        return numbers.to(torch.float64) * self.size

    Ranks.agree = alone  # type: ignore[method-assign]
