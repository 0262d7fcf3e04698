"""A loss that is not finite on one rank only: every rank skips that step, and they stay the same to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from faults import mutants, stepped
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep import Window
from tests.support.ranks import Ranks

ID = "F15"
WHAT = "NaN on one rank skips the step on all, in any micro-batch; weights stay equal, with one small collective"
STEPS = {False: 8, True: 40}
"""Every second one is bad, on each rank in turn."""
PRECISIONS = {False: ("fp16",), True: ("fp32", "bf16", "fp16")}
MICROBATCHES = (1, 3)
MOST_BYTES = 128


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    ranks = Ranks(2)
    try:
        for precision in PRECISIONS[full]:
            for microbatches in MICROBATCHES:
                found = ranks(trained, "ddp", precision, microbatches, STEPS[full])
                trials |= judged(f"{precision}, {microbatches} micro-batches", found)
    finally:
        ranks.stop()
    return outcome(trials, f"1 collective of at most {MOST_BYTES} bytes a step")


def judged(name: str, found: list[list[dict[str, Any]]]) -> dict[str, str | None]:
    """What was wrong with each step that was bad on one of the ranks; a bad step is judged with the one after it."""
    steps = list(zip(*found, strict=True))
    trials = {}
    for number in range(0, len(steps), 2):
        bad, good = steps[number], steps[number + 1]
        trials[f"{name}, step {number}"] = first_wrong(
            ("skipped on all ranks", lambda bad=bad: not any(one["applied"] for one in bad)),  # type: ignore[misc]
            ("for the same reason", lambda bad=bad: len({one["reason"] for one in bad}) == 1),  # type: ignore[misc]
            ("and nothing moved", lambda bad=bad: not any(one["moved"] for one in bad)),  # type: ignore[misc]
            ("the next is applied", lambda good=good: all(one["applied"] for one in good)),  # type: ignore[misc]
            ("weights and scale are the same on all ranks", lambda both=(bad, good): all(map(_alike, both))),  # type: ignore[misc]
            ("one small collective a step", lambda both=(bad, good): all(map(_small, both))),  # type: ignore[misc]
        )
    return trials


def _alike(step: tuple[dict[str, Any], ...]) -> bool:
    return len({(one["weights"], str(one["scale"])) for one in step}) == 1


def _small(step: tuple[dict[str, Any], ...]) -> bool:
    return all(len(one["sizes"]) == 1 and one["sizes"][0] <= MOST_BYTES for one in step)


def trained(rank: int, mode: str, precision: str, microbatches: int, steps: int) -> list[dict[str, Any]]:
    """Train, with a NaN in the data of one rank at every second step."""
    mutants.apply(mutants.current())
    stepper = stepped.make(mode, precision)
    chance = random.Random(15)
    told = []
    for number in range(steps):
        where, micro = number // 2 % 2, chance.randrange(microbatches)
        spoilt = number % 2 == 0 and rank == where
        window = Window(
            _batch(rank, number, one) * (float("nan") if spoilt and one == micro else 1.0)
            for one in range(microbatches)
        )
        told.append(watched(stepper, lambda window=window: stepper.step(stepped.loss, window)))  # type: ignore[misc]
    return told


def watched(stepper: Any, step: Callable[[], Any]) -> dict[str, Any]:
    """What a step did on this rank, and the collectives that Python called in it: DDP's and FSDP2's own are below."""
    before, sizes, reduce = stepped.held(stepper), [], dist.all_reduce

    def counted(tensor: Tensor, *given: Any, **more: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *given, **more)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        report = step()
    finally:
        dist.all_reduce = reduce
    return {
        "applied": report.applied,
        "reason": report.reason,
        "moved": stepped.held(stepper) != before,
        "weights": stepped.weights(stepper),
        "scale": stepped.scale(stepper),
        "sizes": sizes,
    }


def _batch(rank: int, number: int, micro: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * number + 10 * micro + rank))
