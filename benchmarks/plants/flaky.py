"""What does not happen again, although batch, weights and torch's random numbers are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Pictures, Transformer, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants
from halfstep import Window

TWO = "bf16 fp32"


def counter() -> Callable[[], int]:
    """Count calls from 1, outside the module: a skip restores plain attributes, and the event would repeat."""
    calls: list[None] = []

    def count() -> int:
        calls.append(None)
        return len(calls)

    return count


class Fails(nn.Module):
    """In some of its calls, counted from 1."""

    def __init__(self, *calls: int, value: float = float("nan")) -> None:
        super().__init__()
        self.calls, self.value, self.count = calls, value, counter()

    def forward(self, h: Tensor) -> Tensor:
        return h * self.value if self.count() in self.calls else h


class Chance(nn.Module):
    """Draws from Python's random numbers, which nobody puts back; the first draw is the unlucky one."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random(1)  # 0.13, 0.85, 0.76, 0.26 ...

    def forward(self, h: Tensor) -> Tensor:
        return h / (0.0 if self.numbers.random() < 0.2 else 1.0)


class BackwardsOnce(nn.Module):
    """One gradient is lost on its way, once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = counter()

    def forward(self, h: Tensor) -> Tensor:
        h = h.clone()
        if h.requires_grad and self.count() == 1:
            h.register_hook(lambda gradient: gradient * torch.nan)
        return h


class Memory(nn.Module):
    """Reads memory that was never set: whatever is left of others."""

    def __init__(self) -> None:
        super().__init__()
        self.left = iter([float("inf"), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.full_like(h, next(self.left, 0.0))


class Element(nn.Module):
    """One bit of one number, once: its exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.count = counter()

    def forward(self, h: Tensor) -> Tensor:
        if self.count() > 1:
            return h
        flipped = torch.zeros_like(h)
        flipped.view(-1)[0] = torch.inf
        return h + flipped


def _in(model: Callable[..., nn.Module], fault: Callable[[], nn.Module]) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model(fault())
        return Scene(built, squares, batch_for(built), scale=256.0)

    return make


def loss_once() -> Scene:
    """The loss itself, of one step in the middle of a run."""
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        calls.append(1)
        return squares(model, batch) + (torch.inf if len(calls) == 5 else 0.0)

    model = Perceptron()
    return Scene(model, loss_fn, batch_for(model), steps=8, scale=256.0)


def second_of_three() -> Scene:
    """A micro-batch in the middle of a window."""
    model = Perceptron(Fails(2))
    return Scene(model, squares, Window([batch_for(model) for _ in range(3)]), scale=256.0)


def all_of_them() -> list[Plant]:
    expected = Expected("not_reproducible", words=("non-deterministic operation",))
    return [
        *plants("fails_twice", "fp16 bf16 fp32", _in(Perceptron, lambda: Fails(1, 2)), expected),
        *plants("fails_in_attention", TWO, _in(Transformer, lambda: Fails(1)), expected),
        *plants("fails_in_pictures", TWO, _in(Pictures, lambda: Fails(1, value=float("inf"))), expected),
        *plants("chance", TWO, _in(Perceptron, Chance), expected),
        *plants("backwards_once", TWO, _in(Perceptron, BackwardsOnce), expected),
        *plants("memory", TWO, _in(Perceptron, Memory), expected),
        *plants("element", TWO, _in(Perceptron, Element), expected),
        *plants("loss_once", TWO, loss_once, expected),
        *plants("second_of_three", TWO, second_of_three, expected),
    ]  # fmt: skip
