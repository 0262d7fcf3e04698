"""A planted fault: where it is, and what must be said of it. What is expected is written down next to it, by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = ""
"""The model's own forward."""
LOSS = "(outside the model)"


@dataclass(frozen=True)
class Expected:
    """What is None may be anything."""

    cause: str
    operation: str | None = None
    module: str | None = None
    backward: bool = False
    mark: str | None = None
    """The line of the fault ends with a comment of this name."""
    outside: str | None = None
    """What came into the step not finite."""
    words: tuple[str, ...] = ()
    """Must be in the sentence."""


@dataclass(frozen=True)
class Scene:
    """A run in which a step will fail."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    rate: float = 1e-3
    steps: int = 1
    """How many steps to take at most, until one fails."""
    before: Callable[[int], None] = field(default=lambda step: None)
    """Called with the number of each step ahead of it."""
    scale: float = 2.0**16
    batch_at: Callable[[int], Any] | None = None
    """The batch of each step, where they differ."""
    checkpoint: str = ""
    """What the run was taken up from, before its first step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the Stepper, such as `on_gradients`."""
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] = field(
        default=lambda model, rate: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    )


@dataclass(frozen=True)
class Plant:
    name: str
    precision: str
    make: Callable[[], Scene]
    expected: Expected

    @property
    def title(self) -> str:
        return f"{self.name}[{self.precision}]"


def plants(name: str, precisions: str, make: Callable[[], Scene], expected: Expected) -> list[Plant]:
    """The same fault in several precisions."""
    return [Plant(name, precision, make, expected) for precision in precisions.split()]


@cache
def line_of(mark: str) -> str:
    """Where a fault was planted, as file:line."""
    found = [
        f"{file.name}:{number}"
        for file in sorted(Path(__file__).parent.glob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith(f"# {mark}")
    ]
    assert len(found) == 1, (mark, found)
    return found[0]
