"""The same, merged as `halfstep export --merge` does: the sum in fp32, rounded once to 16 bits, and compared."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halfstep.errors import WrongUse
from halfstep.tasks.models.text.adapters import MergeLosses
from zoo.outcome import Outcome
from zoo.p73_merge_into_four_bits.plain import kept, parts, to_nf4


def run() -> Outcome:
    base, adapter, inputs, outputs = parts()
    share = kept((base + adapter).to(torch.bfloat16).float())
    # Rounding the merged weights to nf4 twice is the planted merge that loses more than the adapter gained.
    spoiled = to_nf4(base + adapter + 0.05 * torch.randn(base.shape, generator=torch.Generator().manual_seed(1)))
    losses = [float(F.mse_loss(inputs @ weight.T, outputs)) for weight in (base, base + adapter, spoiled)]
    try:
        MergeLosses(*losses).refuse_worse()
        refused = False
    except WrongUse as error:
        refused = error.id == "merge-loses"
    return Outcome(
        good=share > 0.9 and refused,
        seen=f"merged into 16 bits, {share:.1%} of the adapter's gain is left; a merge that loses more is refused",
    )
