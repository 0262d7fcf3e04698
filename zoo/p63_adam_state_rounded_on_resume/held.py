"""The same with `bf16-split`: a resumed run has the bits of one that never stopped."""

from __future__ import annotations

import copy

import torch

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p63_adam_state_rounded_on_resume.plain import batch, make_model


def make_stepper() -> halfstep.Stepper:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return halfstep.Stepper(model, optimizer, precision=resolve_precision_name("bf16"), weight_format="bf16-split")


def run() -> Outcome:
    straight, resumed = make_stepper(), make_stepper()
    train(straight, 0, 5)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    train(straight, 5, 10)
    train(resumed, 5, 10)
    moments = [s.optimizers["loss"].state[s.model.weight]["exp_avg"] for s in (straight, resumed)]
    same = torch.equal(*moments) and torch.equal(straight.model.weight, resumed.model.weight)
    name = str(moments[1].dtype).removeprefix("torch.")
    return Outcome(good=same, seen=f"the moments come back in {name}, and the run goes on to the bit: {same}")


def train(stepper: halfstep.Stepper, begin: int, end: int) -> None:
    for number in range(begin, end):
        stepper.step(lambda m, x: m(x).float().square().mean(), batch(number))
