"""Numbers that are no numbers, and right after them a spike: what is usual must not have changed, nor be forgotten."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import torch
from torch import Tensor, nn

from faults.outcome import Outcome
from halfstep.guard.alarms.spike import REFUSED, SpikeGuard
from halfstep.step.stepper import Stepper

ID = "F17"
WHAT = "1 to 5 non-finite losses disable no detector, and a resumed detector makes the same decisions"
LENGTH, RESUMES, ON = {False: 1500, True: 10_000}, {False: 6, True: 50}, 400
EVERY = 25
"""Losses between two poisonings, on the average: several of them fall into one window of what is usual."""
NOT_FINITE = (math.nan, math.inf, -math.inf)


def run(full: bool) -> Outcome:
    chance = random.Random(17)
    stream, spikes = _stream(chance, LENGTH[full])
    decisions, states = _decided(stream, SpikeGuard())
    missed = [at for at in spikes if decisions[at] != REFUSED]
    false = [at for at, said in enumerate(decisions) if said == REFUSED and at not in spikes]
    points = sorted(chance.sample(range(30, len(stream) - 10), RESUMES[full]))
    other = [at for at in points if _decided_on(stream, states[at], at) != decisions[at : at + ON]]
    n = len(spikes) + len(points) + 1
    passed = n - len(missed) - len(other) - bool(len(false) > len(stream) / 10_000)
    return Outcome(
        passed, n, f"{len(missed)} of {len(spikes)} spikes missed, {len(other)} of {len(points)} resumes differ"
    )


def _stream(chance: random.Random, length: int) -> tuple[list[float], set[int]]:
    """A loss that falls, with noise; now and then losses that are not finite, and a spike right after them."""
    values: list[float] = []
    spikes: set[int] = set()
    while len(values) < length:
        usual = (0.05 + math.exp(-len(values) / 3000)) * math.exp(chance.gauss(0.0, 0.3))
        if len(values) < 60 or chance.random() > 1 / EVERY:
            values.append(usual)
            continue
        values += [chance.choice(NOT_FINITE) for _ in range(chance.randint(1, 5))]
        spikes.add(len(values))
        values.append(usual * 10 ** chance.uniform(2, 6))
    return values, spikes


def _decided(stream: list[float], spike: SpikeGuard) -> tuple[list[str | None], list[str]]:
    """What became of each step, and the detector's state before it, as a checkpoint would have it."""
    model = nn.Linear(1, 1, bias=False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp32", guards=[spike], observe=False)
    decisions, states = [], []
    for loss in stream:
        states.append(json.dumps(spike.state_dict()))
        decisions.append(stepper.step(_loss, loss).reason)
    return decisions, states


def _loss(model: nn.Module, loss: float) -> Tensor:
    """This loss, whatever the model says; it is finite where its gradient is, too."""
    out: Tensor = model(torch.ones(1, 1)).sum()
    return out * 0.0 + loss


def _decided_on(stream: list[float], state: str, at: int) -> Any:
    spike = SpikeGuard()
    spike.load_state_dict(json.loads(state))
    return _decided(stream[at : at + ON], spike)[0]
