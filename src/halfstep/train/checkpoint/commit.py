"""A save, from an empty folder to a committed checkpoint: completely, or not at all.

A new folder is filled under a name that nobody reads: each process writes its own two files, then comes the manifest
with the digests of all of them. Everything is flushed to the disk; then the folder gets its real name. That rename is
the commit, and only after it are old generations removed. Whatever stops this in the middle leaves the previous
checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.errors import HalfstepError
from halfstep.files import LARGEST_JSON
from halfstep.tensor_header import content, header
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.generation import Generation, following, generations, leftovers, named
from halfstep.train.checkpoint.manifest import MANIFEST, Manifest, NewerFormat, read_manifest, state_of, tensors_of
from halfstep.train.checkpoint.reading import MOST_TENSORS
from halfstep.train.checkpoint.sealed import Sealed, write_sealed

NOT_FINITE = "not finite: "
"""How the reason begins where a save was refused for what it would have kept."""
LENGTH = 8
"""Bytes before a table of tensors, which say how long it is."""
MADE_WITH_A_RUN = 3
"""Folders that hold the checkpoints and may be as new as they are: the run's, the one of all runs, and that one's."""


class Party(Protocol):
    """All processes of a run; see `world.Party`."""

    rank: int
    size: int

    def share(self, text: str) -> list[str]: ...


class NotCommitted(Exception):
    """A save that did not happen, on every process, and why."""

    @property
    def for_its_numbers(self) -> bool:
        """Whether the disk is not to blame."""
        return str(self).startswith(NOT_FINITE)


@dataclass(frozen=True)
class Snapshot:
    """What one process saves."""

    attempt: int
    plain: Any
    """The state as JSON can hold it, with names in place of tensors."""
    tensors: Mapping[str, Tensor]
    """Those of them that this process writes, in main memory."""
    finite: Collection[str] = ()
    """Names of tensors that must be finite to be worth keeping."""
    numbers: Collection[str] = ()
    """Names of those that may be infinite, as a mask is, and must hold no NaN."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Why this process has nothing to save, where that is so: the others are told, instead of left waiting."""


def commit(folder: Path, snapshot: Snapshot, *, keep: int, disk: Disk, party: Party) -> Generation:
    """Save, on all processes together; NotCommitted on all of them where one could not."""
    first = party.rank == 0
    generation = named(folder, snapshot.attempt, 0)
    try:
        told = by_all(party, lambda: _number(folder, snapshot, first))
        generation = named(folder, snapshot.attempt, told[0][1])
        _refuse_other_steps([attempt for attempt, _ in told])
        by_all(party, lambda: _begin(generation, disk) if first else None)
        sealed = by_all(party, lambda: _write_own(generation.draft, snapshot, disk, party.rank))
        files = tuple(Sealed(*entry) for own in sealed for entry in own)
        manifest = Manifest(snapshot.attempt, party.size, files, snapshot.environment)
        by_all(party, lambda: _finish(generation, manifest, disk) if first else None)
    except NotCommitted:
        if first:
            with contextlib.suppress(OSError):
                remove(generation.draft, disk)
        raise
    if first:
        # What is committed stays so, whatever becomes of the old ones.
        with contextlib.suppress(OSError):
            retain(folder, keep, disk)
    return generation


def by_all(party: Party, do: Callable[[], Any]) -> list[Any]:
    """What each process made of its part; a failure of one is everyone's."""
    try:
        own = {"done": do()}
    except Exception as failure:
        # Whatever it is: a process that left the others waiting here would stop them all.
        own = {"failed": str(failure) if isinstance(failure, NotCommitted) else _in_words(failure)}
    told = [json.loads(text) for text in party.share(json.dumps(own))]
    for rank, one in enumerate(told):
        if "failed" in one:
            raise NotCommitted(one["failed"] if party.size == 1 else f"{one['failed']} (rank {rank})")
    return [one["done"] for one in told]


def _in_words(failure: Exception) -> str:
    strerror = getattr(failure, "strerror", None)
    return f"{strerror}" if strerror else f"{type(failure).__name__}: {failure}"


def _number(folder: Path, snapshot: Snapshot, first: bool) -> tuple[int, int]:
    """The step that is saved, and the number of the save, which is rank 0's to choose."""
    if snapshot.failure:
        raise NotCommitted(snapshot.failure)
    _all_finite(snapshot)
    return snapshot.attempt, following(folder, snapshot.attempt).number if first else 0


def _refuse_other_steps(attempts: list[int]) -> None:
    """On every process alike: a checkpoint of two different moments is of no run."""
    if len(set(attempts)) > 1:
        raise NotCommitted(f"the processes are at different steps: {', '.join(map(str, attempts))}")


def _begin(generation: Generation, disk: Disk) -> None:
    folder = generation.path.parent
    if not folder.is_dir():
        disk.make_folder(folder)
    if not generations(folder):
        _flush_the_way_to(folder, disk)
    disk.make_folder(generation.draft)


def _flush_the_way_to(folder: Path, disk: Disk) -> None:
    """Before the first commit: a checkpoint on the disk is of no use in a folder that is not."""
    run, *above = folder.absolute().parents[:MADE_WITH_A_RUN]
    disk.flush_folder(run)
    for path in above:
        # These may be another's, which this user cannot open; then they were there before.
        with contextlib.suppress(OSError):
            disk.flush_folder(path)


def _all_finite(snapshot: Snapshot) -> None:
    """A state that has gone wrong is not worth the place of one that has not."""
    for name, tensor in snapshot.tensors.items():
        infinite = name in snapshot.finite and not bool(torch.isfinite(tensor).all())
        if infinite or (name in snapshot.numbers and bool(tensor.isnan().any())):
            raise NotCommitted(f"{NOT_FINITE}{name}")


def _write_own(draft: Path, snapshot: Snapshot, disk: Disk, rank: int) -> list[Sealed]:
    table = header(snapshot.tensors, {"format": "pt"})
    text = json.dumps(snapshot.plain, allow_nan=False, separators=(",", ":")).encode()
    # The reader counts what the table says of itself as one more.
    _refuse_more_than(MOST_TENSORS - 1, len(snapshot.tensors), "tensors of one process")
    _refuse_more_than(LARGEST_JSON, len(table) - LENGTH, "bytes for the table of tensors")
    _refuse_more_than(LARGEST_JSON, len(text), "bytes of state beside the tensors")
    tensors = write_sealed(disk, draft / tensors_of(rank), _stream(table, snapshot.tensors))
    return [tensors, write_sealed(disk, draft / state_of(rank), [text])]


def _refuse_more_than(most: int, count: int, what: str) -> None:
    """What no reader would take back is no checkpoint, and must not push out one that is."""
    if count > most:
        raise NotCommitted(f"{count:,} {what}: a checkpoint can be read with at most {most:,}")


def _stream(table: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield table
    yield from (content(tensor) for tensor in tensors.values())


def _finish(generation: Generation, manifest: Manifest, disk: Disk) -> None:
    text = manifest.text()
    _refuse_more_than(LARGEST_JSON, len(text), "bytes of manifest")
    write_sealed(disk, generation.draft / MANIFEST, [text])
    disk.flush_folder(generation.draft)
    disk.rename(generation.draft, generation.path)
    disk.flush_folder(generation.path.parent)


def retain(folder: Path, keep: int, disk: Disk) -> None:
    """Remove all that are older than the newest `keep`, after a commit. What is damaged is not counted among these.

    An old one loses its name first, so that nobody takes the half of it for it. What cannot be removed stays: that is
    no reason to give up a save that is committed.
    """
    left = keep
    for one in generations(folder):
        if left > 0:
            left -= _seems_whole(one)
            continue
        with contextlib.suppress(OSError):
            disk.rename(one.path, one.draft)
            disk.flush_folder(folder)
            remove(one.draft, disk)


def _seems_whole(generation: Generation) -> bool:
    """As far as can be told without reading it: to hash old checkpoints at every save would cost more than saving."""
    try:
        manifest = read_manifest(generation)
        return all((generation.path / sealed.name).lstat().st_size == sealed.size for sealed in manifest.files)
    except NewerFormat:
        return True
    except (OSError, ValueError, HalfstepError):
        return False


def sweep(folder: Path, disk: Disk) -> None:
    """Remove what earlier saves left behind, as far as that can be. Only for whoever holds the lock of the run."""
    for path in leftovers(folder):
        with contextlib.suppress(OSError):
            remove(path, disk)


def remove(path: Path, disk: Disk) -> None:
    """A flat folder and the files in it."""
    if path.is_dir() and not path.is_symlink():
        for file in sorted(path.iterdir()):
            disk.remove(file)
        disk.remove_folder(path)
