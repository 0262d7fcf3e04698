"""What the benchmarks of the trainer's overhead share: samples in memory, their task, and the trainer's own steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from halfstep.train.task import Task


class Memory:
    """Samples that were made before, the same in every arm: of each tensor the row of their number."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def read(self, number: int) -> dict[str, Tensor]:
        return {name: tensor[number] for name, tensor in self._tensors.items()}

    __getitem__ = read

    def name(self, number: int) -> str:
        return f"sample {number}"


class InMemory(Task):
    """A task whose samples are in memory, for training and validation alike; it lacks a model and a loss."""

    metric = "loss"
    higher_is_better = False
    memory: Memory

    def source(self, split: str) -> Memory:
        return self.memory


def steps(loop: Any) -> Iterator[object]:
    """The trainer's own steps, epoch after epoch."""
    while True:
        yield from loop.steps()
        loop.progress.epoch, loop.progress.step_in_epoch = loop.progress.epoch + 1, 0
