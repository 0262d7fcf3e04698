"""The same twenty runs: on a skip the optimizer is not called, so it creates no state."""

from __future__ import annotations

from torch import Tensor, nn

import halfstep
from zoo.d20_fused_momentum_from_unset_memory.plain import RUNS, sane, start
from zoo.outcome import Outcome


def run() -> Outcome:
    results = [train(seed) for seed in range(RUNS)]
    sound = sum(sane(weight) and skipped and not state_after_skip for weight, skipped, state_after_skip in results)
    return Outcome(
        good=sound == RUNS,
        seen=f"one skipped step, then a clean one: no state after the skip and sane weights in {sound} of {RUNS} runs",
    )


def train(seed: int) -> tuple[Tensor, bool, bool]:
    model, optimizer, batch = start(seed)
    stepper = halfstep.Stepper(
        model, optimizer, precision="fp16", loss_scale=halfstep.DynamicScale(init_scale=128.0), observe=False
    )
    skipped = not stepper.step(loss_fn, batch * 1000).applied
    state_after_skip = bool(optimizer.state)
    stepper.step(loss_fn, batch)
    return model.weight.detach(), skipped, state_after_skip


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
