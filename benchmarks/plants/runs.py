"""Runs that need more than a model and a batch: several steps, a weight that changes, code that is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.faults import Applies, by_zero
from benchmarks.plants.models import Perceptron, Plain, batch_for, squares
from benchmarks.plants.plant import Scene


def compiled(model: Callable[[], nn.Module], backend: str) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model()
        torch._dynamo.reset()
        return Scene(torch.compile(built, backend=backend), squares, batch_for(built))  # type: ignore[arg-type]

    return make


def compiled_part() -> Scene:
    """Only the module with the fault is compiled."""
    torch._dynamo.reset()
    model = Perceptron(Applies(by_zero))
    model.fault.compile(backend="eager")
    return Scene(model, squares, batch_for(model))


def wrong_compiler() -> Scene:
    """A backend whose code is not what it was given."""
    torch._dynamo.reset()

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        return lambda *given: tuple(out * torch.nan if isinstance(out, Tensor) else out for out in graph(*given))

    model = Perceptron()
    return Scene(torch.compile(model, backend=backend), squares, batch_for(model))  # type: ignore[arg-type]


def nan_weight() -> Scene:
    """After three healthy steps one number of a weight is lost."""
    model = Perceptron()

    def lose(step: int) -> None:
        if step == 3:
            model.head.weight.data[1, 2] = torch.nan

    return Scene(model, squares, batch_for(model), steps=6, before=lose, scale=256.0)


def blown_up_weight(times: float) -> Scene:
    """After five healthy steps the first layer's weights are many times what they were, as after a bad update."""
    model = Plain()

    def blow_up(step: int) -> None:
        if step == 5:
            model.body.weight.data *= times

    return Scene(model, squares, batch_for(model), steps=8, before=blow_up, scale=256.0)


def high_rate() -> Scene:
    """A learning rate ten thousand times what works."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return Scene(model, squares, batch_for(model), rate=1e3, steps=60, scale=256.0)
