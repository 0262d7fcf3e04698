"""Define the order of samples: a function of (seed, epoch, position), and of nothing else.

It does not depend on the number of devices, on workers, or on interruptions. A step takes the next window of the
epoch's order; devices and micro-batches divide the window. With the same number of samples per step, a step has the
same samples on one device and on a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


def derive(seed: int, *parts: int | str) -> int:
    """Return a separate seed for each combination of parts: the same on every machine, and below 2**63."""
    # The type is part of the text, so that 1 and "1" differ; the separator occurs in no part.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Order:
    """The order of `size` samples in each epoch."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def numbers(self, epoch: int) -> Tensor:
        """Return each number from 0 to size - 1 once."""
        if not self.shuffle:
            return torch.arange(self.size)
        # A generator of its own: the order must not depend on what else draws random numbers.
        generator = torch.Generator().manual_seed(derive(self.seed, "order", epoch))
        return torch.randperm(self.size, generator=generator)


@dataclass(frozen=True)
class RankShare:
    """The share of this rank in each window."""

    batch_size: int
    """Samples per device and micro-batch."""
    microbatches: int = 1
    rank: int = 0
    size: int = 1

    @property
    def window(self) -> int:
        """Samples per step, over all devices and micro-batches."""
        return self.batch_size * self.size * self.microbatches

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of steps of an epoch; the last one is filled up."""
        return -(-samples // self.window)

    def repeats(self, samples: int) -> int:
        """Return how many samples an epoch repeats from its beginning to fill the last window."""
        return self.steps_per_epoch(samples) * self.window - samples

    def batches(self, numbers: Tensor, first: int = 0) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from step `first` to the end of the epoch."""
        per_microbatch = self.batch_size * self.size
        for step in range(first, self.steps_per_epoch(len(numbers))):
            for micro in range(self.microbatches):
                start = step * self.window + micro * per_microbatch + self.rank * self.batch_size
                places = torch.arange(start, start + self.batch_size) % len(numbers)
                yield numbers[places].tolist()

    def once(self, samples: int) -> Iterator[list[int]]:
        """Yield batches with every sample exactly once over all ranks, for evaluation; the last may be short."""
        # Strided, so that the ranks differ by at most one sample.
        mine = range(self.rank, samples, self.size)
        for start in range(0, len(mine), self.batch_size):
            yield list(mine[start : start + self.batch_size])
