"""Compare what several ranks hold copies of, so that a flipped bit on one of them ends the run and is not saved.

Ranks average gradients, never weights: a weight that differs on one rank stays different, and every rank trains on with
its own. Gradient norms do not show it, and rank 0 saves its copy for all.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.errors import ReplicasDiffer
from halfstep.train.state import RunObjects, State

FIRST, LEAST = 10, 50
"""Steps of a launch before the first comparison, and the fewest between two."""
MOST_SHARE = 0.005
"""The share of the training time that comparing may take."""
MOST_NAMED = 3
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """The copies of a run's weights, averages and optimizer state on several ranks. Every rank calls each method."""

    def __init__(self, live: RunObjects) -> None:
        self._live = live
        self._next = live.progress.attempts + FIRST

    def check_if_due(self, per_step: float) -> None:
        """Compare after as many steps as keep the cost below half a percent of the training."""
        attempt = self._live.progress.attempts
        if distributed.count_ranks() == 1 or attempt < self._next:
            return
        began = time.perf_counter()
        self.check(State.of(self._live))
        took = time.perf_counter() - began
        every = max(LEAST, math.ceil(took / max(MOST_SHARE * per_step, 1e-9)))
        # Clocks differ between the ranks, and all must compare at the same step.
        self._next = attempt + int(distributed.broadcast_text(str(every)))

    def check(self, state: State) -> None:
        """Raise ReplicasDiffer on every rank where the copies in `state` differ on any."""
        if distributed.count_ranks() == 1:
            return
        differing = [one for group, tensors in _group_copies(state) for one in _list_differing_tensors(group, tensors)]
        if distributed.sum_tensor_over_ranks(torch.tensor([len(differing)])).item():
            raise self._error(differing)

    def _error(self, differing: list[str]) -> ReplicasDiffer:
        found = [json.loads(text) for text in distributed.gather_texts(json.dumps(differing[:MOST_NAMED]))]
        lines = list(dict.fromkeys(line for lines in found for line in lines))
        more = "; ..." if len(lines) > MOST_NAMED else ""
        return ReplicasDiffer(
            f"after step {self._live.progress.attempts:,} the ranks differ: {'; '.join(lines[:MOST_NAMED])}{more}",
            allowed="bitwise equal weights and optimizer state on every rank that has a copy",
            do="check that machine, and run the same command again: it continues from a checkpoint equal on all ranks",
        )


def _group_copies(state: State) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Yield the tensors that are copies of one another on the ranks of a process group, with the group."""
    everywhere: dict[str, Tensor] = {}
    shards: dict[str, Tensor] = {}
    group = None
    for name, tensor in _iterate_copies(state):
        if not distributed.is_dtensor_shard(tensor):
            everywhere[name] = tensor
        elif (found := distributed.find_replica_group(tensor)) is not None:
            shards[name], group = distributed.unwrap_local_tensor(tensor), found
    yield None, everywhere
    if shards:
        yield group, shards


def _iterate_copies(state: State) -> Iterator[tuple[str, Tensor]]:
    # Buffers are left out: batch statistics differ by design, and under DDP rank 0 sends all of them at every step.
    yield from ((f"the weight {name}", tensor) for name, tensor in state.weights["parameters"].items())
    averages = state.ema["averages"] if state.ema is not None else {}
    yield from ((f"the average of {name}", tensor) for name, tensor in averages.items())
    for optimizer in state.optimizers.values():
        names = [name for group in optimizer["param_names"] for name in group]
        for number, kept in optimizer["state"].items():
            for key, value in kept.items():
                # A state in 8 bits is a dict of its parts.
                parts = (
                    {f"{key}.{part}": held for part, held in value.items()} if isinstance(value, dict) else {key: value}
                )
                found = ((f"{part} of {names[number]}", held) for part, held in parts.items())
                yield from ((part, held) for part, held in found if isinstance(held, Tensor))


def _list_differing_tensors(group: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Return a line for each tensor that is not the same on all ranks of a group."""
    if not tensors:
        return []
    here = next(iter(tensors.values())).device
    # An optimizer may keep its step count on the host while the weights are on a device.
    sums = torch.stack([_compute_checksum(tensor).to(here, non_blocking=True) for tensor in tensors.values()])
    same = distributed.compare_across_ranks(sums, group)
    # The one read of the device where all is well.
    if bool(same.all()):
        return []
    ranks, by_rank = distributed.gather_rank_numbers(sums, group)
    places = (~same).nonzero().flatten().tolist()
    names = list(tensors)
    return [f"{names[place]} {_describe_differing_ranks(ranks, [one[place] for one in by_rank])}" for place in places]


def _describe_differing_ranks(ranks: list[int], sums: list[int]) -> str:
    """Return which ranks differ from most of them; two ranks cannot tell which of them is wrong."""
    (usual, many), *_ = Counter(sums).most_common(1)
    if many * 2 <= len(sums):
        return f"differs between ranks {', '.join(map(str, ranks))}"
    other = [rank for rank, value in zip(ranks, sums, strict=True) if value != usual]
    return f"is another one on rank {', '.join(map(str, other))}"


def _compute_checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits as integers, modulo 2**64: a single flipped bit always changes it."""
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
