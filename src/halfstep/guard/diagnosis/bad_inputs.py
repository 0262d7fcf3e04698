"""Find unusable values that came into a step: in its batch, or in weights and statistics since an earlier step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep import distributed
from halfstep.formats import widest_dtype
from halfstep.guard.diagnosis.trials import TrialOutcome
from halfstep.guard.verdict import ProposedRemedy
from halfstep.numbers import format_number
from halfstep.observe.identities import identify_storage, strip_compile_wrappers
from halfstep.observe.nonfinite_origin import (
    BATCH,
    INF,
    MINUS_INF,
    NAN,
    extract_local_tensor,
    find_nonfinite_kinds,
    is_all_finite,
)
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.step.experiment.rerun import ATTRIBUTE, HeldTensors
from halfstep.step.step_inputs import StepInputs, list_batch_versions

UNUSUAL, ABSURD = 1e4, 1e6
"""The size of values above which a batch may not be normalized: after finite steps, and in the first step."""
FAR = 1e3
"""The ratio to the largest value of all other samples above which a sample is far from them."""


class BatchSpot(NamedTuple):
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
    written: bool = False
    """Whether the step wrote to the tensor, so that its values are not those that it came with."""

    def __str__(self) -> str:
        batch = f"micro-batch {self.microbatch}" if self.of > 1 else "the batch"
        where = batch + (f"{self.leaf}" if self.leaf else "")
        sample = "" if self.sample is None else f", sample {self.sample}"
        process = f" of rank {self.rank}" if distributed.count_ranks() > 1 else ""
        return f"{where}{sample}{process}"


def find_nonfinite_spots(
    microbatches: Sequence[Any], name: str | None, written: frozenset[int] = frozenset()
) -> list[BatchSpot]:
    """Return the places with non-finite values, on any rank; the tensor of this name comes first.

    `written` are the storages that `find_written_storages` returned before the reruns.
    """
    found = [
        (
            f"{BATCH}[{index}]{path}" != name,
            _build_spot(index, len(microbatches), path, leaf)._replace(written=identify_storage(leaf) in written),
        )
        for index, path, leaf in _iterate_floating_leaves(microbatches)
        if not is_all_finite(leaf)
    ]
    # -inf comes last: masks contain it on purpose.
    return _share_spots([spot for _, spot in sorted(found, key=lambda pair: (pair[0], pair[1].value == MINUS_INF))])


def find_written_storages(attempt: StepInputs) -> frozenset[int]:
    """Return the storages of the batch that were written to since the step began; all of them if that is not known."""
    found = [leaf for microbatch in attempt.microbatches for _, leaf in iterate_tensor_leaves(microbatch)]
    versions = list_batch_versions(attempt.microbatches)
    known = len(versions) == len(attempt.versions) == len(found)
    before: Sequence[int | None] = attempt.versions if known else [None] * len(found)
    changed = zip(found, before, versions if known else before, strict=True)
    return frozenset(
        identify_storage(leaf)
        for leaf, then, now in changed
        if (then is None or then != now) and leaf.layout is torch.strided and not leaf.is_meta
    )


@contextmanager
def replace_written_tensors(attempt: StepInputs, written: frozenset[int], *, zeros: bool) -> Iterator[None]:
    """Replace non-finite tensors that the step may have written by numbers from 0.25 to 0.75, until the block ends.

    With `zeros`, non-finite values become 0. Finite ones are replaced as well: they are results of the first write.
    """
    chance = torch.Generator().manual_seed(0)
    kept = [
        (leaf, leaf.clone())
        for _, _, leaf in _iterate_floating_leaves(attempt.microbatches)
        if identify_storage(leaf) in written
        and not leaf.is_inference()
        and leaf.itemsize > 1
        and not is_all_finite(leaf)
    ]
    for leaf, copy in kept:
        ordinary = (0.25 + 0.5 * torch.rand(copy.shape, generator=chance)).to(copy)
        leaf.copy_(torch.where(copy.isfinite(), ordinary, 0.0) if zeros else ordinary)
    try:
        yield
    finally:
        for leaf, copy in kept:
            leaf.copy_(copy)


def find_outlier_sample(microbatches: Sequence[Any]) -> BatchSpot | None:
    """Return the one sample whose values are far from those of all others, on any rank, or None."""
    found = [spot for path in dict.fromkeys(path for _, path, _ in _iterate_floating_leaves(microbatches))
             if (spot := _find_far_sample(microbatches, path)) is not None]  # fmt: skip
    return next(iter(_share_spots(found)), None)


def find_large_tensors(microbatches: Sequence[Any], limit: float) -> list[BatchSpot]:
    """Return the tensors with values above a limit, on any rank, the largest first."""
    found = []
    for path in dict.fromkeys(path for _, path, _ in _iterate_floating_leaves(microbatches)):
        sizes = _list_sample_maxima(microbatches, path)
        if sizes and sizes[0][0] > limit:
            largest, index, sample = sizes[0]
            found.append(
                (
                    largest,
                    BatchSpot(index, len(microbatches), path, sample, format_number(largest), 1, distributed.rank()),
                )
            )
    return _share_spots([spot for _, spot in sorted(found, key=lambda pair: -pair[0])])


def normalize_spot(attempt: StepInputs, spot: BatchSpot) -> StepInputs:
    """Return the same step with the tensor at this place divided by its root mean square."""

    def ordinary(microbatch: Any) -> Any:
        target = next((leaf for path, leaf in iterate_tensor_leaves(microbatch) if path == spot.leaf), None)
        if target is None or not target.is_floating_point():
            return microbatch
        wide = target.detach().to(widest_dtype(target.device))
        size = wide.square().mean().sqrt()
        by_spread = (wide / size if float(size) > 0 else wide).to(target.dtype)
        return pytree.tree_map_only(Tensor, lambda leaf: by_spread if leaf is target else leaf, microbatch)

    return attempt._replace(microbatches=[ordinary(microbatch) for microbatch in attempt.microbatches])


def replace_sample(attempt: StepInputs, spot: BatchSpot) -> StepInputs:
    """Return the same step with another sample instead of this one, on the rank that has it."""
    if spot.rank != distributed.rank():
        return attempt
    microbatches = list(attempt.microbatches)
    given = microbatches[spot.microbatch]
    samples = next(leaf for path, leaf in iterate_tensor_leaves(given) if path == spot.leaf).shape[0]
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


def _iterate_floating_leaves(microbatches: Sequence[Any]) -> Iterator[tuple[int, str, Tensor]]:
    for index, microbatch in enumerate(microbatches):
        for path, leaf in iterate_tensor_leaves(microbatch):
            strided = leaf.layout is torch.strided and not leaf.is_meta
            if strided and leaf.numel() and (leaf.is_floating_point() or leaf.is_complex()):
                yield index, path, leaf.detach()


def _build_spot(index: int, of: int, path: str, leaf: Tensor) -> BatchSpot:
    kinds = find_nonfinite_kinds(leaf)
    value = next(kind for kind in (NAN, INF, MINUS_INF) if kind in kinds)
    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf.float()
    bad = ~torch.isfinite(real)
    meant = real.isnan() if value == NAN else real == float(value)
    sample = int(meant.nonzero()[0, 0].item()) if leaf.ndim else None
    return BatchSpot(index, of, path, sample, value, int(bad.sum().item()), distributed.rank())


def _find_far_sample(microbatches: Sequence[Any], path: str) -> BatchSpot | None:
    sizes = _list_sample_maxima(microbatches, path)
    if len(sizes) < 2 or not 0 < sizes[1][0] * FAR <= sizes[0][0]:
        return None
    largest, index, sample = sizes[0]
    value = f"{format_number(largest)}, and no other sample exceeds {format_number(sizes[1][0])}"
    return BatchSpot(index, len(microbatches), path, sample, value, 1, distributed.rank())


def _list_sample_maxima(microbatches: Sequence[Any], path: str) -> list[tuple[float, int, int]]:
    """Return (largest value, micro-batch, sample) of a tensor's samples, the largest first."""
    found = [
        (largest, index, sample)
        for index, its_path, leaf in _iterate_floating_leaves(microbatches)
        if its_path == path and leaf.ndim and leaf.is_floating_point()
        for sample, largest in enumerate(_compute_sample_maxima(leaf))
    ]
    return sorted(found, reverse=True)


def _compute_sample_maxima(leaf: Tensor) -> list[float]:
    wide = leaf.float().reshape(leaf.shape[0], -1)
    found: list[float] = torch.where(wide.isfinite(), wide.abs(), 0).amax(1).tolist()
    return found


def _share_spots(mine: list[BatchSpot]) -> list[BatchSpot]:
    """Return the places of the first rank that has any."""
    everywhere = [json.loads(text) for text in distributed.gather_texts(json.dumps(mine))]
    return [BatchSpot(*plain) for plain in next((spots for spots in everywhere if spots), [])]


WEIGHT, BUFFER = "weight ", "buffer "
"""The prefixes of the names of a model's tensors."""
_SHOWN = 5
_VARIANCES = ("running_var", "moving_var", "running_variance", "moving_variance")
"""The usual names of buffers that cannot be negative."""


@dataclass(frozen=True)
class PriorSteps:
    """The run before the step, as far as it is known."""

    applied: int | None = None
    """The number of steps applied before."""
    checkpoint: str = ""
    """The name of the checkpoint that the run resumed from."""
    resumed_at: int = 0
    """The number of steps applied when that checkpoint was written."""
    skipped: int | None = None
    """The first attempt that was skipped since then, for another cause; None if there is none."""
    cause_then: str | None = None
    """The tensor that brought non-finite values into that attempt, or None for an operation."""

    def left_by_skip(self, name: str) -> int | None:
        """Return the skipped attempt that left a bad value in a tensor which no skip restores, or None."""
        # Weights and buffers are restored, and the same tensor was the cause then, too.
        restored = name.startswith((WEIGHT, BUFFER)) or name == self.cause_then
        return None if restored else self.skipped

    @property
    def came_with_checkpoint(self) -> bool:
        return bool(self.checkpoint) and self.applied in (None, self.resumed_at)

    def since(self, looked_up: bool) -> str:
        """Return since when a tensor is bad; `looked_up`: a step may have succeeded without using it."""
        if self.came_with_checkpoint:
            return f"it came with the checkpoint {self.checkpoint}"
        if not self.applied:
            return "" if self.applied is None else "it was already bad before the first step"
        after = f", after resuming from {self.checkpoint}" if self.checkpoint else ""
        good = f"step {self.applied}, the last that was applied, was finite{after}"
        return f"{good}{', or did not use it' if looked_up else ', so its update or later code wrote it'}"

    def remedy_of_update(self, fault: str) -> ProposedRemedy:
        """Return what to do about an update that writes non-finite weights."""
        return ProposedRemedy(
            "restore", f"continue from a checkpoint before step {self.applied}, and change the optimizer: {fault}", None
        )

    def remedy(self, name: str) -> ProposedRemedy:
        """Return what to do about the bad tensor of this name."""
        if self.applied and not name.startswith((WEIGHT, BUFFER)):
            return ProposedRemedy("fix_code", f"find the code that wrote {name}, which no checkpoint contains", None)
        if self.came_with_checkpoint:
            return ProposedRemedy(
                "restore", f"continue from a checkpoint before {self.checkpoint}: {name} is bad in it", None
            )
        if not self.applied:
            return ProposedRemedy(
                "restore", f"check the code that builds or loads {name}: it was bad before the first step", None
            )
        return ProposedRemedy(
            "restore",
            f"continue from a checkpoint before step {self.applied}, and find the code that wrote {name}",
            None,
        )


@contextmanager
def zero_nonfinite_values(tensor: Tensor) -> Iterator[None]:
    """Replace the non-finite values of a tensor by zeros, until the block ends."""
    plain = tensor.detach()
    kept = plain.clone()
    plain.copy_(torch.where(kept.isfinite(), kept, 0))
    try:
        yield
    finally:
        plain.copy_(kept)


def is_module_tensor(name: str) -> bool:
    """Return whether a tensor of this name belongs to a module."""
    return name.startswith((WEIGHT, BUFFER, ATTRIBUTE))


def is_embedding_weight(name: str, model: nn.Module) -> bool:
    """Return whether a weight is looked up row by row, so that steps can succeed without using a bad row."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    paths = {strip_compile_wrappers(path) for path, module in model.named_modules() if isinstance(module, tables)}
    return name.removeprefix(WEIGHT).rpartition(".")[0] in paths


def find_named_tensor(name: str, model: nn.Module, held: HeldTensors) -> Tensor | None:
    """Return the tensor of this name, or None."""
    if name in held.tensors:
        return held.tensors[name]
    ours: dict[str, Tensor] = {
        f"{WEIGHT}{strip_compile_wrappers(path)}": weight for path, weight in model.named_parameters()
    }
    ours |= {f"{BUFFER}{strip_compile_wrappers(path)}": buffer for path, buffer in model.named_buffers()}
    return ours.get(name)


def describe_bad_rows(tensor: Tensor | None) -> str:
    """Return the non-finite rows of a tensor; empty if there are none, or all are bad."""
    if tensor is None or tensor.ndim < 2:
        return ""
    mine = extract_local_tensor(tensor)
    bad = [int(row) for row in (~torch.isfinite(mine).flatten(1).all(1)).nonzero().flatten().tolist()]
    if not bad or len(bad) == len(mine):
        return ""
    shown = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    return f"row {shown}" if len(bad) == 1 else f"rows {shown}, {len(bad)} of {len(mine)}"


def find_negative_variance(model: nn.Module, held: HeldTensors, outcome: TrialOutcome) -> str:
    """Return the name of a negative variance in the module that failed, on any rank; empty if there is none."""
    # Every rank must reach this call: an early return on one of them would leave the others waiting.
    return next(filter(None, distributed.gather_texts(_find_local_negative_variance(model, held, outcome))), "")


def _find_local_negative_variance(model: nn.Module, held: HeldTensors, outcome: TrialOutcome) -> str:
    culprit = outcome.culprit
    if culprit is None or culprit.outside is not None:
        return ""
    modules = [(strip_compile_wrappers(path), module) for path, module in model.named_modules()]
    for holder, top in held.modules:
        modules += [(".".join(filter(None, (holder, path))), module) for path, module in top.named_modules()]
    # Modules outside the model have no path in it, so the failing one is not known: all of them are checked.
    beside = {path for path, _ in modules[len(list(model.modules())) :]}
    for path, module in modules:
        if path == culprit.module or path in beside:
            buffers = dict(module.named_buffers(recurse=False))
            for name in _VARIANCES:
                variance = buffers.get(name)
                if variance is not None and bool((extract_local_tensor(variance) < 0).any()):
                    return f"{BUFFER}{path}.{name}" if path else f"{BUFFER}{name}"
    return ""


def describe_optimizer_evidence(
    parameter: Tensor | None, optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[str, ...]:
    """Return which state of an optimizer is bad for this parameter."""
    # Worth reporting: bad moments would corrupt the parameter again after it was restored.
    found = []
    for optimizer in optimizers:
        for key, value in (optimizer.state.get(parameter, {}) if parameter is not None else {}).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
                if not is_all_finite(value):
                    found.append(f"the optimizer's {key} of it is not finite either")
                elif key.endswith("_sq") and bool((extract_local_tensor(value) < 0).any()):
                    found.append(f"the optimizer's {key} of it is negative")
    return tuple(found)
