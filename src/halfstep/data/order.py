"""Order the samples of an indexed set without a list of them: a position gives its sample, at any place of an epoch.

`FeistelOrder` permutes the whole set. `WindowOrder` reads chunks of neighboring samples, for spinning disks and network
file systems: a step has as many slots as samples; lanes divide the slots, and each lane has its own chunks in all
epochs; a lane takes its chunks in an order of the epoch, a window of them at a time, and permutes the samples of each
window. Ranks have neighboring slots, so that each reads the chunks of its lanes only.

Both are functions of (seed, epoch, step, slot) and of the samples per step: not of ranks, workers or interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from halfstep.data.dataset import Order, RankShare, derive_seed

FEW = 65_536
"""Numbers below which a permutation is drawn: the network is uniform on many numbers only."""
MOST_LANES = 64
"""Lanes of an order without a number of them: those of earlier versions."""
WELL_MIXED = 16
"""Open chunks for each sample of a step with which a set that is sorted by class is mixed well."""
_ROUNDS = 6
_GOLDEN, _ALL_BITS = 0x9E3779B97F4A7C15, 2**64 - 1
Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class SavedOrder:
    """The order of a run, as its checkpoints have it."""

    name: Literal["randperm", "feistel", "windows"] = "randperm"
    chunk: int = 0
    """Samples of a chunk."""
    window: int = 0
    """Chunks that are open at once, over all lanes."""
    lanes: int = 0
    """Lanes of windows; 0 for the rule of earlier versions, whose checkpoints have no number."""

    def of(self, size: int, seed: int, batch: int) -> Order:
        """Return the order of so many samples, `batch` in each step."""
        if self.name == "windows":
            return WindowOrder(size, seed, batch, self.chunk, self.window, self.lanes)
        return FeistelOrder(size, seed) if self.name == "feistel" else Order(size, seed)


RANDPERM = SavedOrder()


# -- permutations -----------------------------------------------------------------------------------------------------


class Permutation:
    """The numbers below `size`, permuted: drawn where they are few, by a network where they are many."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._drawn: Numbers | None = None
        if size < FEW:
            drawn = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
            self._drawn = drawn.numpy().astype(np.uint16)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: Tensor) -> Tensor:
        return torch.from_numpy(self.at(places.numpy()))

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at these places."""
        if self._drawn is not None:
            return self._drawn[places].astype(np.int64)
        return _permute_with_network(places, self._size, self._seed)


def _permute_with_network(places: Numbers, size: int, seed: int) -> Numbers:
    """Permute numbers below `size` with an unbalanced Feistel network: both halves are added to, modulo their sizes."""
    # The halves multiply to `size` or a little more; what comes out beyond `size` goes through the network again.
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    a, b = np.uint64(left_size), np.uint64(right_size)
    keys = [_mix_bits(np.array([(seed + _GOLDEN * (one + 1)) & _ALL_BITS], np.uint64)) for one in range(_ROUNDS)]
    found = places.astype(np.uint64)
    todo = np.arange(len(found))
    while len(todo):
        left, right = np.divmod(found[todo], b)
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + _mix_bits(left ^ key) % b) % b
            else:
                left = (left + _mix_bits(right ^ key) % a) % a
        found[todo] = left * b + right
        todo = todo[found[todo] >= size]
    return found.astype(np.int64)


def _mix_bits(numbers: Numbers) -> Numbers:
    """Return 64 well mixed bits of each number: the finalizer of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))


class FeistelOrder(Order):
    """The whole set in a new order in each epoch; of few samples the order that `Order` draws."""

    def numbers(self, epoch: int) -> Permutation:
        """Return each number once, on demand."""
        return Permutation(self.size, derive_seed(self.seed, "order", epoch))


# -- windows ----------------------------------------------------------------------------------------------------------


def choose_usual_lanes(size: int, batch: int, chunk: int, window: int) -> int:
    """Return the lanes of an order that does not have a number of them."""
    lanes = math.gcd(MOST_LANES, batch)
    while lanes > 1 and (lanes > window or size < lanes * chunk):
        lanes //= 2
    return lanes


class WindowOrder(Order):
    """Windows of chunks: `chunk` samples in each, and about `window` of them open at once over all lanes."""

    has_lanes = True

    def __init__(self, size: int, seed: int, batch: int, chunk: int, window: int, lanes: int = 0) -> None:
        super().__init__(size, seed)
        self.batch, self.chunk = batch, chunk
        self.lanes = math.gcd(lanes, batch) if lanes else choose_usual_lanes(size, batch, chunk, window)
        self.open = max(1, window // self.lanes)
        """Chunks that a lane has open at once."""
        self.by_run = Permutation(size // chunk, derive_seed(seed, "chunks"))

    def mixing(self, classes: int) -> float:
        """Return how well a step mixes a set that is sorted by class: the expected z of chi-square of its classes.

        It is 0 if they are drawn from the whole set.
        """
        slots, samples = self.batch // self.lanes, self.open * self.chunk
        if samples * self.lanes >= self.size:
            return 0.0
        # An open chunk has one class: each pair of slots of a lane that takes the same chunk adds to chi-square.
        more = (slots - 1) * (self.chunk - 1) / max(samples - 1, 1)
        return float(((1 + more) ** (1 / 3) - 1) / math.sqrt(2 / (9 * max(classes - 1, 1))))

    def numbers(self, epoch: int) -> EpochWindows:
        """Return the samples of an epoch by position, on demand; they are as many as the steps have slots."""
        return EpochWindows(self, epoch)

    def openings(self, epoch: int, share: RankShare, first: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the chunks to be read: at first those of the window that a lane is in; then those of the next one, a
        few with each step.
        """
        per, per_lane = self.batch // share.size, self.batch // self.lanes
        lanes = range(share.rank * per // per_lane, -(-(share.rank + 1) * per // per_lane))
        mine = [_Lane(self, number, epoch) for number in lanes]
        done = [lane.first_chunk(lane.window_at(first * per_lane)) for lane in mine]
        for step in range(first, -(-self.size // self.batch)):
            opened: list[tuple[int, int]] = []
            for number, lane in enumerate(mine):
                at = min(step * per_lane, lane.size - 1)
                window = lane.window_at(at)
                start, stop = lane.bounds(window)
                after, later = lane.first_chunk(window + 1), lane.first_chunk(window + 2)
                until = after + -(-(later - after) * (at - start) // (stop - start))
                opened += [lane.chunk(chunk) for chunk in range(done[number], until)]
                done[number] = max(done[number], until)
            yield opened


class EpochWindows:
    """The samples of an epoch, by step and slot."""

    def __init__(self, order: WindowOrder, epoch: int) -> None:
        self.order, self.epoch = order, epoch
        self._per_lane = order.batch // order.lanes
        # A lane is within one window for many steps.
        self._lane = lru_cache(order.lanes)(lambda number: _Lane(order, number, epoch))
        self._window = lru_cache(2 * order.lanes)(self._make_window)

    def __len__(self) -> int:
        return -(-self.order.size // self.order.batch) * self.order.batch

    def __getitem__(self, places: Tensor) -> Tensor:
        steps, slots = np.divmod(places.numpy(), self.order.batch)
        lanes, slots = np.divmod(slots, self._per_lane)
        found = np.empty(len(lanes), np.int64)
        for number in np.unique(lanes).tolist():
            mine, lane = lanes == number, self._lane(number)
            # The last step is filled from the beginning of the lane.
            at = (steps[mine] * self._per_lane + slots[mine]) % lane.size
            found[mine] = lane.samples(self._permute_in_windows(lane, at))
        return torch.from_numpy(found)

    def _permute_in_windows(self, lane: _Lane, places: Numbers) -> Numbers:
        """Permute places of a lane within their windows."""
        found, windows = np.empty_like(places), lane.windows_of(places)
        for window in np.unique(windows).tolist():
            mine, (start, stop) = windows == window, lane.bounds(window)
            found[mine] = start + self._window(lane.number, window, stop - start).at(places[mine] - start)
        return found

    def _make_window(self, lane: int, window: int, size: int) -> Permutation:
        return Permutation(size, derive_seed(self.order.seed, "window", self.epoch, lane, window))


class _Lane:
    """The samples of a lane in an epoch: the end of a chunk, whole chunks, and the beginning of another one."""

    def __init__(self, order: WindowOrder, number: int, epoch: int) -> None:
        self._order, self.number = order, number
        self.begin, end = (order.size * one // order.lanes for one in (number, number + 1))
        self.size, chunk = end - self.begin, order.chunk
        self.head = min(-self.begin % chunk, self.size)
        self.whole = (self.size - self.head) // chunk
        self.windows = max(1, -(-self.whole // order.open))
        self._by_epoch = Permutation(self.whole, derive_seed(order.seed, "chunks", epoch, number))

    def first_chunk(self, window: int) -> int:
        """Return the number in this lane of the first whole chunk of a window."""
        return self.whole * min(window, self.windows) // self.windows

    def bounds(self, window: int) -> tuple[int, int]:
        """Return the first place of a window, and the first after it; no chunk is in two windows."""
        start = self.head + self.first_chunk(window) * self._order.chunk if window else 0
        stop = self.head + self.first_chunk(window + 1) * self._order.chunk if window + 1 < self.windows else self.size
        return start, stop

    def window_at(self, place: int) -> int:
        return int(self.windows_of(np.array([min(place, self.size - 1)]))[0])

    def windows_of(self, places: Numbers) -> Numbers:
        """Return the window of each place."""
        chunks = np.clip((places - self.head) // self._order.chunk, 0, max(self.whole - 1, 0))
        return np.asarray((self.windows * (chunks + 1) - 1) // max(self.whole, 1))

    def samples(self, places: Numbers) -> Numbers:
        """Return the samples at these places of the lane, before they are permuted within windows."""
        chunk = self._order.chunk
        chunks, rest = np.divmod(places - self.head, chunk)
        inside = (chunks >= 0) & (chunks < self.whole)
        moved = places.copy()
        moved[inside] = self.head + self._by_epoch.at(chunks[inside]) * chunk + rest[inside]
        # From places of the lane to those of the run, whose whole chunks are permuted once.
        chunks, rest = np.divmod(self.begin + moved, chunk)
        full = chunks < len(self._order.by_run)
        chunks[full] = self._order.by_run.at(chunks[full])
        return np.asarray(chunks * chunk + rest)

    def chunk(self, number: int) -> tuple[int, int]:
        """Return the first sample of a whole chunk, and one past its last."""
        first = int(self.samples(np.array([self.head + number * self._order.chunk]))[0])
        return first, first + self._order.chunk
