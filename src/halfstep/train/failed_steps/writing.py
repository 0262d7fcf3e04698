"""Write a failed step to the run's folder, whole or not at all, without ever failing the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.commit import NotCommitted, RankGather, by_all
from halfstep.checkpoint.packing import pack
from halfstep.checkpoint.paths import Disk, remove
from halfstep.checkpoint.reading import MOST_TENSORS
from halfstep.checkpoint.sealed import Sealed, with_seal, write_sealed
from halfstep.errors import HalfstepError, reason_in
from halfstep.files import LARGEST_JSON
from halfstep.guard.events import FailedStep
from halfstep.safetensors_header import content, header
from halfstep.step.step_inputs import StepInputs
from halfstep.train.environment import environment
from halfstep.train.failed_steps.places import (
    DRAFT,
    FAILED_STEPS,
    RECORD,
    WEIGHTS,
    batch_of,
    leftovers,
    place_of,
    recorded_in,
    refuse_elsewhere,
)
from halfstep.train.failed_steps.reading import read, recipe_digest
from halfstep.train.failed_steps.record import FORMAT, as_plain
from halfstep.train.weights import fleeting

# -- retention --------------------------------------------------------------------------------------------------------
# Retain a few failed steps, and the newest one of each cause.


def retain(run: Path, keep: int, disk: Disk) -> None:
    """Remove failed steps until `keep` are left: unreadable ones first, then the oldest whose cause recurs later."""
    found = [(path, _cause(path)) for path in recorded_in(run)]
    while len(found) > keep:
        causes = [cause for _, cause in found]
        repeated = (n for n, cause in enumerate(causes) if cause in causes[n + 1 :])
        number = causes.index(None) if None in causes else next(repeated, 0)
        path, _ = found.pop(number)
        with contextlib.suppress(OSError):
            # Renamed first, so that a half-removed folder is never taken for a whole one.
            gone = path.with_name(path.name + DRAFT)
            disk.rename(path, gone)
            remove(gone, disk)


def _cause(path: Path) -> str | None:
    try:
        return read(path).verdict.cause
    except HalfstepError:
        return None


# -- writing ----------------------------------------------------------------------------------------------------------


MOST_BYTES = 4 * 2**30
"""Bytes of one failed step, over all ranks."""
MOST_KEPT = 3
"""Failed steps that are retained per run."""
Tell = Callable[[str, str], None]
"""A callback with text and level, `info` or `warning`."""


@dataclass(frozen=True)
class Own:
    """The part of a failed step that one rank writes."""

    plain: Any = None
    """Its micro-batches and their inputs, with names in place of tensors."""
    files: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    without: str = ""
    """Why it has no tensors to record."""

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


def recording(folder: Path, model: nn.Module, tell: Tell) -> Callable[[FailedStep], None]:
    """Return a function that records failed steps in the run's folder. All ranks create and call it together.

    The function never raises: a run goes on without a record, and `tell` gets the reason.
    """
    party = distributed.RankGroup()

    def record(trouble: FailedStep) -> None:
        try:
            write(folder, trouble, model, party=party)
        except Exception as failure:
            # Any error: a record must not end the run.
            tell(f"attempt {trouble.report.attempt:,} was not recorded: {failure}", "warning")
        else:
            tell(f"attempt {trouble.report.attempt:,} is recorded; to run it again: halfstep replay {folder}", "info")

    return record


def write(
    folder: Path,
    trouble: FailedStep,
    model: nn.Module,
    *,
    party: RankGather,
    disk: Disk | None = None,
    most: int = MOST_BYTES,
    keep: int = MOST_KEPT,
) -> Path:
    """Record a failed step on all ranks together; raise NotCommitted on all where one fails."""
    disk, first = disk or Disk(), party.rank == 0
    place = place_of(folder, trouble.report.attempt)
    draft = place.with_name(place.name + DRAFT)
    own = _own(trouble.attempt, model, party.rank)
    # All ranks decide together: a record with the tensors of some ranks cannot be replayed.
    offered = by_all(party, lambda: [own.without, own.bytes])
    without = next((why for why, _ in offered if why), "") or _too_large(sum(size for _, size in offered), most)
    own = Own(without=without) if without else own
    try:
        by_all(party, lambda: _begin(folder, draft, disk) if first else None)
        written = by_all(party, lambda: [_write_files(draft, own, disk), own.plain])
        finish = functools.partial(_finish, folder, trouble, model, written, without, place, disk)
        by_all(party, lambda: finish() if first else None)
    except NotCommitted:
        if first:
            with contextlib.suppress(OSError):
                remove(draft, disk)
        raise
    if first:
        with contextlib.suppress(OSError):
            retain(folder, keep, disk)
    return place


def _own(attempt: StepInputs, model: nn.Module, rank: int) -> Own:
    """Return references; nothing is copied until all ranks agree to write."""
    if any(map(distributed.is_shard, model.parameters())):
        return Own(without="the weights are in pieces on several processes")
    try:
        plain, tensors = pack(_inputs(attempt), "step")
        files: dict[str, Mapping[str, Tensor]] = {batch_of(rank): tensors}
        if rank == 0:
            files[WEIGHTS] = _weights(model)
        for named in files.values():
            header(named, {})  # raises for dtypes that safetensors does not have
    except Exception as error:
        # Any error of a user's batch: the other ranks wait for this one's answer.
        return Own(without=reason_in(error) or type(error).__name__)
    return Own(plain, files)


def _inputs(attempt: StepInputs) -> dict[str, Any]:
    return {
        "microbatches": list(attempt.microbatches),
        "only": attempt.only,
        "generators": list(attempt.generators),
        "factors": {name: list(factor) for name, factor in attempt.factors.items()},
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers; a skipped step left them unchanged."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in own.items()}


def _too_large(size: int, most: int) -> str:
    if size <= most:
        return ""
    return f"weights and batch take {size / 2**30:.2f} GiB, and at most {most / 2**30:.2f} GiB are kept"


def _begin(folder: Path, draft: Path, disk: Disk) -> None:
    refuse_elsewhere(folder)
    if not (folder / FAILED_STEPS).is_dir():
        disk.make_folder(folder / FAILED_STEPS)
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            remove(path, disk)
    disk.make_folder(draft)


def _write_files(draft: Path, own: Own, disk: Disk) -> list[Sealed]:
    for name, tensors in own.files.items():
        if len(tensors) >= MOST_TENSORS:
            raise NotCommitted(f"{len(tensors):,} tensors for {name}: one can be read with at most {MOST_TENSORS:,}")
    return [write_sealed(disk, draft / name, _stream(tensors)) for name, tensors in own.files.items()]


def _stream(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield header(tensors, {"format": "pt"})
    yield from (content(tensor.cpu()) for tensor in tensors.values())


def _finish(
    folder: Path, trouble: FailedStep, model: nn.Module, written: list[Any], without: str, place: Path, disk: Disk
) -> None:
    text = with_seal(
        {
            "format": FORMAT,
            "step": as_plain(trouble),
            "without": without,
            "recipe": recipe_digest(folder),
            "environment": environment(next(model.parameters()).device),
            "files": {name: [size, sha256] for files, _ in written for name, size, sha256 in files},
            "batches": [] if without else [plain for _, plain in written],
            "fleeting": fleeting(model),
        }
    )
    if len(text) > LARGEST_JSON:
        raise NotCommitted(f"{len(text):,} bytes beside the tensors: it can be read with at most {LARGEST_JSON:,}")
    draft = place.with_name(place.name + DRAFT)
    write_sealed(disk, draft / RECORD, [text])
    # The files must be durable before the rename that makes them visible.
    disk.flush_folder(draft)
    old = place.with_name(f"{place.name}.old{DRAFT}")
    if place.is_dir():
        disk.rename(place, old)  # the run was resumed from before this step
    disk.rename(draft, place)
    disk.flush_folder(place.parent)
    with contextlib.suppress(OSError):
        remove(old, disk)
