"""What in a batch no model can use: numbers that are not finite, and one sample that is far from all others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep import world
from halfstep.guard.replay.deed import number
from halfstep.observe.finite import INF, MINUS_INF, NAN, all_finite, kinds_of
from halfstep.observe.leaves import leaves
from halfstep.observe.origins import BATCH
from halfstep.step.attempt import Attempt

FAR = 1e3
"""A sample is far from the others where its largest number is this many times the largest of theirs."""


class Spot(NamedTuple):
    """One place in a batch."""

    microbatch: int
    of: int
    """How many micro-batches there are."""
    leaf: str
    """The way to the tensor, as it would be typed."""
    sample: int | None
    """Along its first dimension; None where it has none."""
    value: str
    many: int
    """How many such numbers its tensor has."""
    rank: int = 0

    def __str__(self) -> str:
        batch = f"micro-batch {self.microbatch}" if self.of > 1 else "the batch"
        where = batch + (f"{self.leaf}" if self.leaf else "")
        sample = "" if self.sample is None else f", sample {self.sample}"
        process = f" of rank {self.rank}" if world.size() > 1 else ""
        return f"{where}{sample}{process}"


def not_finite(microbatches: Sequence[Any], name: str | None) -> list[Spot]:
    """Where numbers are not finite, on any process; in the tensor of this name before all others."""
    found = [
        (path_of(index, path) != name, _spot(index, len(microbatches), path, leaf))
        for index, path, leaf in _floating(microbatches)
        if not all_finite(leaf)
    ]
    return _shared([spot for _, spot in sorted(found, key=lambda pair: (pair[0], pair[1].value == MINUS_INF))])


def outlier(microbatches: Sequence[Any]) -> Spot | None:
    """The one sample whose numbers are far from those of all others, on any process."""
    found = [spot for path in dict.fromkeys(path for _, path, _ in _floating(microbatches))
             if (spot := _far(microbatches, path)) is not None]  # fmt: skip
    return next(iter(_shared(found)), None)


def without(attempt: Attempt, spot: Spot) -> Attempt:
    """The same step, in which another sample stands in for this one, where this process has it."""
    if spot.rank != world.rank():
        return attempt
    microbatches = list(attempt.microbatches)
    given = microbatches[spot.microbatch]
    samples = next(leaf for path, leaf in leaves(given) if path == spot.leaf).shape[0]
    if samples == 1:
        # As many as before: a loss function may talk to the other processes in each of them.
        microbatches[spot.microbatch] = microbatches[(spot.microbatch + 1) % len(microbatches)]
        return attempt._replace(microbatches=microbatches)
    other = 0 if spot.sample else 1

    def swapped(leaf: Tensor) -> Tensor:
        if not leaf.ndim or leaf.shape[0] != samples:
            return leaf
        copy = leaf.detach().clone()
        copy[spot.sample] = leaf[other].detach()
        return copy

    microbatches[spot.microbatch] = pytree.tree_map_only(Tensor, swapped, given)
    return attempt._replace(microbatches=microbatches)


def path_of(microbatch: int, path: str) -> str:
    """What the tensor at `path` is called by those who follow numbers that are not finite."""
    return f"{BATCH}[{microbatch}]{path}"


def _floating(microbatches: Sequence[Any]) -> Iterator[tuple[int, str, Tensor]]:
    for index, microbatch in enumerate(microbatches):
        for path, leaf in leaves(microbatch):
            strided = leaf.layout is torch.strided and not leaf.is_meta
            if strided and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex()):
                yield index, path, leaf.detach()


def _spot(index: int, of: int, path: str, leaf: Tensor) -> Spot:
    kinds = kinds_of(leaf)
    value = next(kind for kind in (NAN, INF, MINUS_INF) if kind in kinds)
    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf.float()
    bad = ~torch.isfinite(real)
    meant = real.isnan() if value == NAN else real == float(value)
    sample = int(meant.nonzero()[0, 0].item()) if leaf.ndim else None
    return Spot(index, of, path, sample, value, int(bad.sum().item()), world.rank())


def _far(microbatches: Sequence[Any], path: str) -> Spot | None:
    sizes = [
        (largest, index, sample)
        for index, its_path, leaf in _floating(microbatches)
        if its_path == path and leaf.ndim and leaf.is_floating_point()
        for sample, largest in enumerate(_largest_by_sample(leaf))
    ]
    sizes.sort(reverse=True)
    if len(sizes) < 2 or not 0 < sizes[1][0] * FAR <= sizes[0][0]:
        return None
    largest, index, sample = sizes[0]
    value = f"{number(largest)}, where no other sample exceeds {number(sizes[1][0])}"
    return Spot(index, len(microbatches), path, sample, value, 1, world.rank())


def _largest_by_sample(leaf: Tensor) -> list[float]:
    wide = leaf.float().reshape(leaf.shape[0], -1)
    found: list[float] = torch.where(wide.isfinite(), wide.abs(), 0).amax(1).tolist()
    return found


def _shared(mine: list[Spot]) -> list[Spot]:
    """Those of the first process that has any."""
    everywhere = [json.loads(text) for text in world.from_all(json.dumps(mine))]
    return [Spot(*plain) for plain in next((spots for spots in everywhere if spots), [])]
