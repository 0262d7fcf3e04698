"""A gradient that is not finite in the shard of one rank only: every rank skips that step, and scales stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from faults import mutants, stepped
from faults.f15_one_rank import judged, watched
from faults.judged import outcome
from faults.outcome import Outcome
from halfstep import distributed
from tests.support.ranks import Ranks

ID = "F16"
WHAT = "NaN in the gradient shard of one rank skips the step on all; weights and loss scale stay equal on all"
STEPS = {False: 8, True: 40}
"""Every second one is bad, on each rank in turn."""
PRECISIONS = {False: ("fp16",), True: ("fp32", "bf16", "fp16")}


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    ranks = Ranks(2)
    try:
        for precision in PRECISIONS[full]:
            trials |= judged(precision, ranks(trained, precision, STEPS[full]))
    finally:
        ranks.stop()
    return outcome(trials, "the same scale on all ranks")


def trained(rank: int, precision: str, steps: int) -> list[dict[str, Any]]:
    mutants.apply(mutants.current())
    number = 0

    def spoil(parameters: list[Tensor]) -> None:
        """After the gradients were reduced: what one rank holds of them is known to no other."""
        if number % 2 == 0 and rank == number // 2 % 2:
            gradient = parameters[number // 4 % len(parameters)].grad
            assert gradient is not None
            own = distributed.unwrap_local_tensor(gradient)
            own.view(-1)[:1] = float("nan")
            assert own.numel(), "this rank holds nothing of it"

    stepper = stepped.make("fsdp", precision, on_gradients=spoil)
    told = []
    for number in range(steps):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        told.append(watched(stepper, lambda batch=batch: stepper.step(stepped.loss, batch)))  # type: ignore[misc]
    return told
