"""The head as an island, as it is and under torch.compile, beside one another: the same updates of the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p31_compiled_backward_leaves_fp32.plain import FORMATS, Model, batch, compiled, in_words

STEPS = 12


class Declared(Model):
    """The same model without casts of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def run() -> Outcome:
    off = {name: _off(name) for name in FORMATS}
    return Outcome(
        good=max(off.values()) < 1e-5,
        seen=f"{STEPS} updates of the island, compiled against not compiled: "
        + ", ".join(f"{in_words(distance)} in {name}" for name, distance in off.items()),
    )


def _off(name: str) -> float:
    right, other = _update(name, lambda model: model), _update(name, compiled)
    return ((other - right).norm() / right.norm()).item() if right.any() else float("inf")


def _update(name: str, made: Any) -> Tensor:
    """Return how far some steps moved the head's weights; in fp16 the first ones are skipped, until the scale fits."""
    model = halfstep.island(Declared(), "head")
    before = model.head.weight.detach().clone()
    # The precision itself, not its name: bf16 by name becomes fp32 on a CPU that only emulates it.
    stepper = halfstep.Stepper(
        made(model), torch.optim.SGD(model.parameters(), lr=1e-3), precision=resolve_precision_name(name)
    )
    for _ in range(STEPS):
        stepper.step(loss_fn, batch())
    return model.head.weight.detach() - before


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 20.0).square().mean()
