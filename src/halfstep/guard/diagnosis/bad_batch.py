"""Find unusable values in a batch: non-finite numbers, and one sample that is far from all others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep import distributed
from halfstep.guard.diagnosis.describe_op import number
from halfstep.observe.nonfinite_origin import BATCH, INF, MINUS_INF, NAN, all_finite, kinds_of
from halfstep.observe.reachable import leaves
from halfstep.step.step_inputs import StepInputs

UNUSUAL, ABSURD = 1e4, 1e6
"""The size of values above which a batch may not be normalized: after finite steps, and in the first step."""
FAR = 1e3
"""The ratio to the largest value of all other samples above which a sample is far from them."""


class Spot(NamedTuple):
    """One place in a batch."""

    microbatch: int
    of: int
    """The number of micro-batches."""
    leaf: str
    """The path to the tensor, as it would be typed."""
    sample: int | None
    """The index along the first dimension; None for a scalar."""
    value: str
    many: int
    """The number of such values in the tensor."""
    rank: int = 0

    def __str__(self) -> str:
        batch = f"micro-batch {self.microbatch}" if self.of > 1 else "the batch"
        where = batch + (f"{self.leaf}" if self.leaf else "")
        sample = "" if self.sample is None else f", sample {self.sample}"
        process = f" of rank {self.rank}" if distributed.size() > 1 else ""
        return f"{where}{sample}{process}"


def not_finite(microbatches: Sequence[Any], name: str | None) -> list[Spot]:
    """Return the places with non-finite values, on any rank; the tensor of this name comes first."""
    found = [
        (path_of(index, path) != name, _spot(index, len(microbatches), path, leaf))
        for index, path, leaf in _floating(microbatches)
        if not all_finite(leaf)
    ]
    # -inf comes last: masks contain it on purpose.
    return _shared([spot for _, spot in sorted(found, key=lambda pair: (pair[0], pair[1].value == MINUS_INF))])


def outlier(microbatches: Sequence[Any]) -> Spot | None:
    """Return the one sample whose values are far from those of all others, on any rank, or None."""
    found = [spot for path in dict.fromkeys(path for _, path, _ in _floating(microbatches))
             if (spot := _far(microbatches, path)) is not None]  # fmt: skip
    return next(iter(_shared(found)), None)


def far_from_one(microbatches: Sequence[Any], limit: float) -> list[Spot]:
    """Return the tensors with values above a limit, on any rank, the largest first."""
    found = []
    for path in dict.fromkeys(path for _, path, _ in _floating(microbatches)):
        sizes = _sizes(microbatches, path)
        if sizes and sizes[0][0] > limit:
            largest, index, sample = sizes[0]
            found.append(
                (largest, Spot(index, len(microbatches), path, sample, number(largest), 1, distributed.rank()))
            )
    return _shared([spot for _, spot in sorted(found, key=lambda pair: -pair[0])])


def normalised(attempt: StepInputs, spot: Spot) -> StepInputs:
    """Return the same step with the tensor at this place divided by its root mean square."""

    def ordinary(microbatch: Any) -> Any:
        target = next((leaf for path, leaf in leaves(microbatch) if path == spot.leaf), None)
        if target is None or not target.is_floating_point():
            return microbatch
        return pytree.tree_map_only(Tensor, lambda leaf: _by_spread(leaf) if leaf is target else leaf, microbatch)

    return attempt._replace(microbatches=[ordinary(microbatch) for microbatch in attempt.microbatches])


def _by_spread(leaf: Tensor) -> Tensor:
    wide = leaf.detach().double()
    size = wide.square().mean().sqrt()
    return (wide / size if float(size) > 0 else wide).to(leaf.dtype)


def without(attempt: StepInputs, spot: Spot) -> StepInputs:
    """Return the same step with another sample in place of this one, on the rank that has it."""
    if spot.rank != distributed.rank():
        return attempt
    microbatches = list(attempt.microbatches)
    given = microbatches[spot.microbatch]
    samples = next(leaf for path, leaf in leaves(given) if path == spot.leaf).shape[0]
    if samples == 1:
        # The number of micro-batches must stay the same: a loss function may communicate with other ranks in each of
        # them.
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
    """Return the name of the tensor at `path` as the search for the origin uses it."""
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
    return Spot(index, of, path, sample, value, int(bad.sum().item()), distributed.rank())


def _far(microbatches: Sequence[Any], path: str) -> Spot | None:
    sizes = _sizes(microbatches, path)
    if len(sizes) < 2 or not 0 < sizes[1][0] * FAR <= sizes[0][0]:
        return None
    largest, index, sample = sizes[0]
    value = f"{number(largest)}, where no other sample exceeds {number(sizes[1][0])}"
    return Spot(index, len(microbatches), path, sample, value, 1, distributed.rank())


def _sizes(microbatches: Sequence[Any], path: str) -> list[tuple[float, int, int]]:
    """Return (largest value, micro-batch, sample) of a tensor's samples, the largest first."""
    found = [
        (largest, index, sample)
        for index, its_path, leaf in _floating(microbatches)
        if its_path == path and leaf.ndim and leaf.is_floating_point()
        for sample, largest in enumerate(_largest_by_sample(leaf))
    ]
    return sorted(found, reverse=True)


def _largest_by_sample(leaf: Tensor) -> list[float]:
    wide = leaf.float().reshape(leaf.shape[0], -1)
    found: list[float] = torch.where(wide.isfinite(), wide.abs(), 0).amax(1).tolist()
    return found


def _shared(mine: list[Spot]) -> list[Spot]:
    """Return the places of the first rank that has any."""
    everywhere = [json.loads(text) for text in distributed.from_all(json.dumps(mine))]
    return [Spot(*plain) for plain in next((spots for spots in everywhere if spots), [])]
