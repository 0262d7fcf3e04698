"""Commit a checkpoint atomically: after a crash at any point, either all of it exists or none of it.

The files are written to a folder with a draft name, which readers ignore. Each rank writes its own two files; then rank
0 writes the manifest with the digests of all files. Everything is fsynced, and the folder is renamed to its final name.
The rename is the commit. Old generations are removed only after it, so an interrupted save never costs an earlier one.
`CheckpointSaver` does all of this in a separate thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep import distributed
from halfstep.checkpoint.chunks import ChunkedTensor
from halfstep.checkpoint.paths import (
    BAD,
    CheckpointDir,
    Disk,
    list_generations,
    name_generation,
    name_next_generation,
    remove_checkpoint_folder,
    remove_old_set_aside,
)
from halfstep.checkpoint.sealed import (
    MANIFEST,
    MOST_TENSORS,
    Manifest,
    SealedFile,
    name_state_file,
    name_tensors_file,
    read_manifest,
    write_sealed,
)
from halfstep.errors import FolderLost, HalfstepError, OtherForm
from halfstep.files import LARGEST_JSON
from halfstep.out_of_memory import is_out_of_memory
from halfstep.ownership import find_ownership
from halfstep.safetensors_header import content, encode_header

LENGTH = 8
"""The bytes in front of a safetensors header that hold its length."""
MADE_WITH_A_RUN = 3
"""The parent folders that may be as new as the checkpoints: the run's, the one of all runs, and its parent."""
LEAVING = 30.0
"""Seconds that the end of a run waits for the parts of other ranks; torchrun kills them 30 s after one has died."""
Ruined = Callable[[int], bool]
"""A function that returns whether the weights after an attempt were unusable, judging by the losses."""


class RankGather(Protocol):
    """All ranks of a run; see `halfstep.distributed.RankGroup`."""

    rank: int
    size: int

    def decide(self, text: str, conclude: Callable[[list[str]], str]) -> str:
        """Return on every rank what `conclude` makes of the texts of all ranks; every rank must call this."""
        ...

    def leave(self, seconds: float) -> None:
        """Wait for other ranks only so many seconds more."""
        ...


class NotCommitted(Exception):
    """A save that was not committed on any rank; its text is the reason."""

    def __init__(
        self,
        reason: str,
        *,
        is_nonfinite: bool = False,
        lacks_memory: bool = False,
        folder_lost: FolderLost | None = None,
    ) -> None:
        super().__init__(reason)
        self.is_nonfinite, self.lacks_memory = is_nonfinite, lacks_memory
        """Whether the reason is non-finite values, or exhausted host memory, and not the disk."""
        self.folder_lost = folder_lost
        """The error of a run whose folder is gone or another run's: no later save can succeed."""


@dataclass(frozen=True)
class RankSnapshot:
    """The state that one rank saves."""

    attempt: int
    plain: Any
    """The state as plain JSON, with names instead of tensors."""
    tensors: Mapping[str, Tensor]
    """The tensors that this rank writes, by name; one that is on a device is copied to the host as it is written."""
    finite: Collection[str] = ()
    """The names of tensors that must be finite."""
    not_nan: Collection[str] = ()
    """The names of tensors that must contain no NaN; they may contain infinities, as an attention mask does."""
    environment: Mapping[str, object] = field(default_factory=dict)
    chunks: Mapping[str, ChunkedTensor] = field(default_factory=dict)
    """How the sharded tensors of all ranks are cut; `tensors` has the chunks that this rank writes."""
    failure: str = ""
    """Why this rank has nothing to save, or empty. It is shared with the other ranks, so that they do not wait."""


def commit_checkpoint(
    folder: Path, snapshot: RankSnapshot, *, keep: int | None, disk: Disk, party: RankGather
) -> CheckpointDir:
    """Save the snapshots of all ranks as one checkpoint and return its generation.

    Every rank must call this. Raises NotCommitted on all ranks if any rank fails; earlier checkpoints then stay as they
    are. Older generations beyond the newest `keep` are removed after the commit; None keeps all.
    """
    generation, owner = name_generation(folder, snapshot.attempt, 0), find_ownership(folder)
    launch = owner.token if owner is not None else None
    try:
        # Each decision is a barrier: no rank writes before the draft folder exists, and no manifest is written before
        # every file is on the disk, on every rank.
        number = decide_on_all_ranks(
            party, lambda: _prepare_save(snapshot), lambda attempts: _create_draft(folder, attempts, disk)
        )
        generation = name_generation(folder, snapshot.attempt, number)
        decide_on_all_ranks(
            party,
            lambda: _write_rank_files(generation.draft, snapshot, disk, party.rank),
            lambda sealed: _commit_draft(generation, _build_manifest(snapshot, sealed, launch), disk),
        )
    except NotCommitted:
        if party.rank == 0:
            with contextlib.suppress(OSError, FolderLost):
                remove_checkpoint_folder(generation.draft, disk)
        raise
    if party.rank == 0 and keep is not None:
        # The commit stands even if removing old generations fails: that only costs space, and the next save tries
        # again.
        with contextlib.suppress(OSError):
            remove_old_generations(folder, keep, disk)
    return generation


def decide_on_all_ranks(party: RankGather, do: Callable[[], Any], conclude: Callable[[list[Any]], Any]) -> Any:
    """Run `do` on every rank, then `conclude` on rank 0 with all results; return what it returns, on every rank.

    The results are plain JSON. Raises NotCommitted on all ranks where one of them fails.
    """
    # Every exception is sent: a rank that raised here alone would leave the others waiting for it.
    own = json.dumps(_capture_outcome(do))
    decision = party.decide(own, lambda texts: json.dumps(_capture_outcome(lambda: conclude(_parse_results(texts)))))
    return _unwrap_outcome(json.loads(decision))


def _capture_outcome(do: Callable[[], Any]) -> dict[str, object]:
    try:
        return {"done": do()}
    except NotCommitted as failure:
        lost = failure.folder_lost
        return {
            "failed": str(failure),
            "is_nonfinite": failure.is_nonfinite,
            "lacks_memory": failure.lacks_memory,
            **({"folder_lost": _convert_lost_folder(lost)} if lost is not None else {}),
        }
    except FolderLost as lost:
        return {
            "failed": lost.given,
            "is_nonfinite": False,
            "lacks_memory": False,
            "folder_lost": _convert_lost_folder(lost),
        }
    except Exception as failure:
        words = getattr(failure, "strerror", None) or f"{type(failure).__name__}: {failure}"
        return {"failed": words, "is_nonfinite": False, "lacks_memory": is_out_of_memory(failure)}


def _convert_lost_folder(lost: FolderLost) -> dict[str, object]:
    return {"given": lost.given, "allowed": lost.allowed, "do": lost.do, "exit_code": lost.exit_code}


def _parse_results(texts: list[str]) -> list[Any]:
    where = [f" (rank {rank})" if len(texts) > 1 else "" for rank in range(len(texts))]
    return [_unwrap_outcome(json.loads(text), at) for text, at in zip(texts, where, strict=True)]


def _unwrap_outcome(outcome: dict[str, Any], where: str = "") -> Any:
    if "failed" in outcome:
        facts = {key: outcome[key] for key in ("is_nonfinite", "lacks_memory")}
        lost = FolderLost(**outcome["folder_lost"]) if "folder_lost" in outcome else None
        raise NotCommitted(f"{outcome['failed']}{where}", **facts, folder_lost=lost)
    return outcome["done"]


def _prepare_save(snapshot: RankSnapshot) -> int:
    """Return the step that is saved."""
    if snapshot.failure:
        raise NotCommitted(snapshot.failure, lacks_memory=True)
    _require_finite(snapshot)
    return snapshot.attempt


def _create_draft(folder: Path, attempts: list[int], disk: Disk) -> int:
    """Create the draft folder, and return the number of the save; raise NotCommitted for ranks at different steps."""
    if len(set(attempts)) > 1:
        raise NotCommitted(f"the processes are at different steps: {', '.join(map(str, attempts))}")
    generation = name_next_generation(folder, attempts[0])
    if not folder.is_dir():
        disk.make_folder(folder)
    # Later saves need no flush of the parents: their names have been on the disk since the first one.
    if not list_generations(folder):
        _flush_parent_folders(folder, disk)
    disk.make_folder(generation.draft)
    return generation.number


def _flush_parent_folders(folder: Path, disk: Disk) -> None:
    """Flush the names of the parent folders to the disk."""
    # A file's fsync does not make the names above it durable. After a power loss the first checkpoint could be
    # complete, in a run folder that no longer exists.
    run, *above = folder.absolute().parents[:MADE_WITH_A_RUN]
    disk.flush_folder(run)
    for path in above:
        # These may belong to another user and be unreadable; then they existed before this run.
        with contextlib.suppress(OSError):
            disk.flush_folder(path)


def _require_finite(snapshot: RankSnapshot) -> None:
    """Raise NotCommitted if a tensor of the model has gone non-finite."""
    # Such a checkpoint could not be resumed from, and retention would remove a good one to make room for it.
    for name, tensor in snapshot.tensors.items():
        infinite = name in snapshot.finite and not bool(torch.isfinite(tensor).all())
        if infinite or (name in snapshot.not_nan and bool(tensor.isnan().any())):
            raise NotCommitted(f"not finite: {name}", is_nonfinite=True)


def _write_rank_files(draft: Path, snapshot: RankSnapshot, disk: Disk, rank: int) -> list[SealedFile]:
    table = encode_header(snapshot.tensors, {"format": "pt"})
    text = json.dumps(snapshot.plain, allow_nan=False, separators=(",", ":")).encode()
    # The reader counts the header's `__metadata__` entry as one more.
    _refuse_more_than(MOST_TENSORS - 1, len(snapshot.tensors), "tensors of one process")
    _refuse_more_than(LARGEST_JSON, len(table) - LENGTH, "bytes for the table of tensors")
    _refuse_more_than(LARGEST_JSON, len(text), "bytes of state without tensors")
    contents: Iterator[bytes | memoryview] = (content(tensor.cpu()) for tensor in snapshot.tensors.values())
    tensors = write_sealed(disk, draft / name_tensors_file(rank), itertools.chain([table], contents))
    return [tensors, write_sealed(disk, draft / name_state_file(rank), [text])]


def _refuse_more_than(most: int, count: int, what: str) -> None:
    """Raise NotCommitted if a limit of the reader is exceeded.

    A checkpoint that cannot be read must not replace one that can.
    """
    if count > most:
        raise NotCommitted(f"{count:,} {what}: a checkpoint can be read with at most {most:,}")


def _build_manifest(snapshot: RankSnapshot, sealed: list[Any], launch: str | None) -> Manifest:
    files = tuple(SealedFile(*entry) for own in sealed for entry in own)
    return Manifest(snapshot.attempt, len(sealed), files, snapshot.environment, snapshot.chunks, launch)


def _commit_draft(generation: CheckpointDir, manifest: Manifest, disk: Disk) -> None:
    text = manifest.text()
    _refuse_more_than(LARGEST_JSON, len(text), "bytes of manifest")
    # The manifest comes last: a folder without one, or with a torn one, is never accepted as a checkpoint.
    write_sealed(disk, generation.draft / MANIFEST, [text])
    # fsync of a file does not cover its name. All names must be on the disk before the rename; otherwise a power loss
    # could keep the committed folder and lose files in it.
    disk.flush_folder(generation.draft)
    # The commit. A rename within one folder is atomic, and the new name was never used, so nothing is replaced.
    disk.rename(generation.draft, generation.path)
    # Without this a power loss could undo the rename after the save was reported as committed. Retention runs only
    # after it, so the old checkpoints are still there until the new one is durable.
    disk.flush_folder(generation.path.parent)


def remove_old_generations(folder: Path, keep: int, disk: Disk) -> None:
    """Remove the generations that are older than the newest `keep`; damaged ones do not count towards `keep`.

    Only to be called after a commit. A generation that cannot be removed is left in place without an error.
    """
    left = keep
    for one in list_generations(folder):
        if left > 0:
            left -= _has_all_files(one)
            continue
        with contextlib.suppress(OSError):
            remove_generation(one, disk)


def remove_generation(generation: CheckpointDir, disk: Disk) -> None:
    """Remove a committed generation."""
    # Rename first, and make that durable: a crash during the removal then leaves a draft, which readers ignore, and not
    # a committed name with some of its files gone.
    try:
        disk.rename(generation.path, generation.draft)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # An overlay file system renames no folder of a lower layer, as of a container's image. Without its manifest the
        # folder is no checkpoint either.
        disk.remove(generation.path / MANIFEST)
        disk.flush_folder(generation.path)
        remove_checkpoint_folder(generation.path, disk)
        return
    disk.flush_folder(generation.path.parent)
    remove_checkpoint_folder(generation.draft, disk)


def _has_all_files(generation: CheckpointDir) -> bool:
    """Return whether all files exist with the right size."""
    # Sizes only: hashing the old checkpoints at every save would cost more than the save itself.
    try:
        manifest = read_manifest(generation)
        return all((generation.path / sealed.name).lstat().st_size == sealed.size for sealed in manifest.files)
    except OtherForm:
        # Another version wrote it; it is complete as far as this one can tell, and must not be removed as damaged.
        return True
    except (OSError, ValueError, HalfstepError):
        return False


def set_aside_checkpoints(folder: Path, attempt: int, ruined: Ruined = lambda attempt: False) -> CheckpointDir | None:
    """Set aside all checkpoints from this attempt on, and those that are `ruined`; return the newest one left.

    Returns None if no other exists; then nothing is set aside. Every rank must call this; rank 0 decides for all.
    """
    left = distributed.run_on_rank_zero(lambda: _rename_to_set_aside(folder, attempt, ruined))
    return None if left is None else CheckpointDir(folder / left[0], *left[1:])


def _rename_to_set_aside(folder: Path, attempt: int, ruined: Ruined) -> list[str | int] | None:
    found, disk = list_generations(folder), Disk()
    good = (n for n, one in enumerate(found) if one.attempt < attempt and not ruined(one.attempt))
    newest = next(good, None)
    if newest is None:
        return None
    for one in found[:newest]:
        # A failed rename loses nothing: that checkpoint is merely newer than the one that is used.
        with contextlib.suppress(OSError):
            disk.rename(one.path, one.path.with_name(one.name + BAD))
    remove_old_set_aside(folder, disk)
    left = found[newest]
    return [left.name, left.attempt, left.number]


# -- saving in the background -----------------------------------------------------------------------------------------
# Training waits for a copy of the state, not for the disk.


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save."""

    attempt: int
    generation: CheckpointDir | None
    """The committed generation, or None if the save failed."""
    failure: NotCommitted | None
    seconds: float
    """The time from the request to the commit."""
    blocked: float
    """The part of `seconds` in which training was blocked."""
    bytes: int


class CheckpointSaver:
    """A writer of checkpoints with at most one save in flight; `results` returns failures, and none is lost."""

    def __init__(
        self, folder: Path, *, keep: int, party: RankGather, background: bool = True, disk: Disk | None = None
    ) -> None:
        self._folder, self._keep, self._party, self._disk = folder, keep, party, disk or Disk()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._buffers: dict[str, Tensor] = {}
        self._running: list[Future[SaveResult]] = []
        self._done: list[SaveResult] = []

    def save(self, snapshot: RankSnapshot) -> None:
        """Save a snapshot; with a background thread, return as soon as the state is copied.

        Waits for the previous save first. Failures are not raised here: `results` and `finish` return them.
        """
        began = time.perf_counter()
        # One save at a time: the copy below overwrites the buffers that the previous save is still writing from.
        self._wait()
        copied = self._copied(snapshot)
        if self._thread is None:
            saved = self._commit_snapshot(copied, began)
            self._done.append(replace(saved, blocked=saved.seconds))
            return
        blocked = time.perf_counter() - began
        self._running.append(self._thread.submit(self._commit_snapshot, copied, began, blocked))

    def results(self) -> list[SaveResult]:
        """Return the outcomes of saves that have ended since the last call, without waiting.

        With several ranks an outcome is returned only after the next save has started, or by `finish`.
        """
        # With several ranks, each would see the end of the save at a different step. After a failed save all of them
        # must stop at the same step.
        if self._party.size == 1 and self._running and self._running[0].done():
            self._wait()
        ended, self._done = self._done, []
        return ended

    def finish(self) -> list[SaveResult]:
        """Wait for the save in flight, and return the outcomes since the last call."""
        self._wait()
        return self.results()

    def close(self, seconds: float = LEAVING) -> None:
        """Wait for the save in flight and release the thread and the buffers; for other ranks only so many seconds.

        A run also ends because another rank is gone.
        """
        self._party.leave(seconds)
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._wait()
        self._buffers.clear()

    def _wait(self) -> None:
        self._done += [future.result() for future in self._running]
        self._running = []

    def _commit_snapshot(self, snapshot: RankSnapshot, began: float, blocked: float = 0.0) -> SaveResult:
        generation, failure = None, None
        try:
            generation = commit_checkpoint(self._folder, snapshot, keep=self._keep, disk=self._disk, party=self._party)
        except NotCommitted as error:
            failure = error
        except FolderLost as error:
            failure = NotCommitted(error.given, folder_lost=error)
        except TimeoutError as error:
            failure = NotCommitted(str(error))
        except Exception as error:
            # Every exception becomes a failed save: the Future would raise it in the training loop instead.
            failure = NotCommitted(f"{type(error).__name__}: {error}")
        size = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.tensors.values())
        return SaveResult(snapshot.attempt, generation, failure, time.perf_counter() - began, blocked, size)

    def _copied(self, snapshot: RankSnapshot) -> RankSnapshot:
        """Return the snapshot with its tensors in host memory.

        If memory is exhausted, return one that fails on all ranks.
        """
        try:
            if self._thread is None:
                return replace(snapshot, tensors={name: tensor.cpu() for name, tensor in snapshot.tensors.items()})
            return replace(snapshot, tensors=self._copies(snapshot))
        except (MemoryError, RuntimeError) as error:
            # torch reports exhausted host memory as a RuntimeError, not as a MemoryError.
            self._buffers.clear()
            # Not raised here: the other ranks would wait for this rank's part of the save.
            reason = str(error).strip().partition("\n")[0]
            return replace(snapshot, tensors={}, failure=f"no memory for a copy of the state: {reason}")

    def _copies(self, snapshot: RankSnapshot) -> dict[str, Tensor]:
        """Copy the tensors as they are now into buffers that the next save reuses."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in snapshot.tensors.items()}
        waiting = False
        for name, tensor in snapshot.tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
            waiting = waiting or not tensor.is_cpu
        # A non-blocking copy from a device returns before the data has arrived, and the writer would read too early.
        if waiting:
            torch.accelerator.synchronize()
        return dict(self._buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype):
            return buffer
        # In the layout of the original, so that the copy is one sequential pass; the writer makes it contiguous.
        like = torch.empty_like(tensor, device=torch.empty(0).device)
        # Only a copy from a device to pinned memory is asynchronous.
        return like if tensor.is_cpu else like.pin_memory()
