"""Gradients that overflow fp16: the scale falls as torch's own would, and nothing else of the step happens."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from faults import mutants, stepped
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from tests.support.ranks import Ranks

ID = "F13"
WHAT = "an overflow halves the loss scale once, as in torch's own trace, and changes nothing else, also on ranks"
MODES = ("one", "ddp", "fsdp")
TIMES = {False: 1, True: 10}
INF = float("inf")
SEQUENCE = (INF, -INF, *[float("nan")] * 6)
"""DeepSpeed's own sequence: what all gradients of eight steps are."""


class Spoilt(torch.autograd.Function):
    """The loss stays as it is; its gradient becomes something else."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.value, None


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    ranks = Ranks(2)
    try:
        for mode in MODES:
            for number in range(TIMES[full]):
                seed = MODES.index(mode) * 100 + number
                found = [judge(0, mode, seed)] if mode == "one" else ranks(judge, mode, seed)
                trials[f"{mode} {number}"] = next((text for text in found if text), None)
    finally:
        ranks.stop()
    return outcome(trials, f"{len(SEQUENCE)} skips each, the scale as torch has it")


def judge(rank: int, mode: str, seed: int) -> str | None:
    """Clean steps, eight overflows among them, and clean steps again until the scale has grown."""
    mutants.apply(mutants.current() if mode != "one" else None)
    chance = random.Random(seed)
    interval = chance.choice([2, 3, 5])
    plan = [1.0] * chance.randrange(6) + list(SEQUENCE) + [1.0] * (2 * interval + chance.randrange(3))
    stepper = stepped.make(mode, "fp16", interval=interval)
    scales, moved, skipped = [], 0, 0
    for number, value in enumerate(plan):
        before = stepped.held(stepper)
        report = stepper.step(lambda model, batch, value=value: _loss(model, batch, value), _batch(rank, number))
        moved += stepped.held(stepper) != before and not report.applied
        skipped += not report.applied
        scales.append(stepped.scale(stepper)["scale"])
    return first_wrong(
        (f"{skipped} skips", lambda: skipped == len(SEQUENCE)),
        (f"{moved} skips moved something", lambda: not moved),
        (f"scales {scales}", lambda: scales == torch_scales(plan, interval)),
        ("the schedule has a step for each update", lambda: _schedule(stepper) == len(plan) - len(SEQUENCE)),
        ("all weights are finite", lambda: all(bool(p.isfinite().all()) for p in stepper.model.parameters())),
    )


def torch_scales(plan: list[float], interval: int) -> list[float]:
    """The scale after each step by torch's own GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=stepped.SCALE, growth_interval=interval)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    found = []
    for value in plan:
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        weight.grad.mul_(value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


def _loss(model: nn.Module, batch: Tensor, value: float) -> Tensor:
    found: Tensor = Spoilt.apply(stepped.loss(model, batch), value)  # type: ignore[no-untyped-call]
    return found


def _batch(rank: int, number: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * number + rank))


def _schedule(stepper: Any) -> int:
    [slot] = stepper.state_dict()["optimizers"].values()
    return int(slot["schedule"]["last_epoch"])
