"""A failed step, written into the run's folder: completely, or not at all, and never at the cost of the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep import world
from halfstep.errors import reason_in
from halfstep.files import LARGEST_JSON
from halfstep.guard.trouble import Trouble
from halfstep.step.attempt import Attempt
from halfstep.tensor_header import content, header
from halfstep.train.black_box.places import (
    DRAFT,
    RECORD,
    TROUBLE,
    WEIGHTS,
    batch_of,
    leftovers,
    place_of,
    refuse_elsewhere,
)
from halfstep.train.black_box.reading import recipe_digest
from halfstep.train.black_box.record import FORMAT, as_plain
from halfstep.train.black_box.retention import retain
from halfstep.train.checkpoint.commit import NotCommitted, Party, by_all, remove
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.manifest import with_seal
from halfstep.train.checkpoint.packing import pack
from halfstep.train.checkpoint.reading import MOST_TENSORS
from halfstep.train.checkpoint.sealed import Sealed, write_sealed
from halfstep.train.environment import environment
from halfstep.train.fleeting import fleeting

MOST_BYTES = 4 * 2**30
"""Of one failed step, all processes together."""
MOST_KEPT = 3
"""Failed steps of one run."""
Tell = Callable[[str, str], None]
"""Told (text, level), where level is `info` or `warning`."""


@dataclass(frozen=True)
class Own:
    """What one process has to write."""

    plain: Any = None
    """Its micro-batches and what they were run with, with names in place of tensors."""
    files: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    without: str = ""
    """Why it has no tensors that could be kept."""

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


def recording(folder: Path, model: nn.Module, tell: Tell) -> Callable[[Trouble], None]:
    """A function that keeps failed steps in the run's folder. Made, and called, by every process at the same moment.

    It never raises: a run goes on without a record, and `tell` hears why there is none.
    """
    party = world.Party()

    def record(trouble: Trouble) -> None:
        try:
            write(folder, trouble, model, party=party)
        except Exception as failure:
            # Whatever it is: the record is for the run, and not the other way round.
            tell(f"attempt {trouble.report.attempt:,} was not recorded: {failure}", "warning")
        else:
            tell(f"attempt {trouble.report.attempt:,} is recorded; to run it again: halfstep replay {folder}", "info")

    return record


def write(
    folder: Path,
    trouble: Trouble,
    model: nn.Module,
    *,
    party: Party,
    disk: Disk | None = None,
    most: int = MOST_BYTES,
    keep: int = MOST_KEPT,
) -> Path:
    """Keep a failed step, on all processes together; NotCommitted on all of them where one could not."""
    disk, first = disk or Disk(), party.rank == 0
    place = place_of(folder, trouble.report.attempt)
    draft = place.with_name(place.name + DRAFT)
    own = _own(trouble.attempt, model, party.rank)
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


def _own(attempt: Attempt, model: nn.Module, rank: int) -> Own:
    """References: nothing is copied before it is known that all of it is to be written."""
    if any(map(world.is_shard, model.parameters())):
        return Own(without="the weights are in pieces on several processes")
    try:
        plain, tensors = pack(_inputs(attempt), "step")
        files: dict[str, Mapping[str, Tensor]] = {batch_of(rank): tensors}
        if rank == 0:
            files[WEIGHTS] = _weights(model)
        for named in files.values():
            header(named, {})  # refuses types that files of tensors do not know
    except Exception as error:
        # Whatever somebody's batch stumbles over: the others wait for this process to say what it has.
        return Own(without=reason_in(error) or type(error).__name__)
    return Own(plain, files)


def _inputs(attempt: Attempt) -> dict[str, Any]:
    return {
        "microbatches": list(attempt.microbatches),
        "only": attempt.only,
        "generators": list(attempt.generators),
        "factors": {name: list(factor) for name, factor in attempt.factors.items()},
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as they are now, which is as they were: a skip changes nothing."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in own.items()}


def _too_large(size: int, most: int) -> str:
    if size <= most:
        return ""
    return f"weights and batch take {size / 2**30:.2f} GiB, and at most {most / 2**30:.2f} GiB are kept"


def _begin(folder: Path, draft: Path, disk: Disk) -> None:
    refuse_elsewhere(folder)
    if not (folder / TROUBLE).is_dir():
        disk.make_folder(folder / TROUBLE)
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
    folder: Path, trouble: Trouble, model: nn.Module, written: list[Any], without: str, place: Path, disk: Disk
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
    disk.flush_folder(draft)
    old = place.with_name(f"{place.name}.old{DRAFT}")
    if place.is_dir():
        disk.rename(place, old)  # the run was taken up again from before this step
    disk.rename(draft, place)
    disk.flush_folder(place.parent)
    with contextlib.suppress(OSError):
        remove(old, disk)
