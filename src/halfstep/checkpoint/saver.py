"""Save checkpoints in the background: training waits for a copy of the state, not for the disk."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from halfstep.checkpoint.commit import NotCommitted, RankGather, RankSnapshot, commit
from halfstep.checkpoint.paths import CheckpointDir, Disk


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


class Saver:
    """A writer of checkpoints with at most one save in flight; failures are returned by `news` and are never lost."""

    def __init__(
        self, folder: Path, *, keep: int, party: RankGather, background: bool = True, disk: Disk | None = None
    ) -> None:
        self._folder, self._keep, self._party, self._disk = folder, keep, party, disk or Disk()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._kept: dict[str, Tensor] = {}
        self._running: list[Future[SaveResult]] = []
        self._done: list[SaveResult] = []

    def save(self, snapshot: RankSnapshot) -> None:
        """Save a snapshot; with a background thread, return as soon as the state is copied.

        Waits for the previous save first. Failures are not raised here: `news` and `finish` return them.
        """
        began = time.perf_counter()
        # One save at a time: the copy below overwrites the buffers that the previous save is still writing from.
        self._wait()
        copied = self._copied(snapshot)
        if self._thread is None:
            saved = self._committed(copied, began)
            self._done.append(replace(saved, blocked=saved.seconds))
            return
        blocked = time.perf_counter() - began
        self._running.append(self._thread.submit(self._committed, copied, began, blocked))

    def news(self) -> list[SaveResult]:
        """Return the outcomes of saves that have ended since the last call, without waiting.

        With several ranks an outcome is returned only after the next save begins, or by `finish`.
        """
        # With several ranks, each would see the end of the save at a different step. After a failed save all of them
        # must stop at the same step.
        if self._party.size == 1 and self._running and self._running[0].done():
            self._wait()
        told, self._done = self._done, []
        return told

    def finish(self) -> list[SaveResult]:
        """Wait for the save in flight, and return the outcomes since the last call."""
        self._wait()
        return self.news()

    def close(self) -> None:
        """Wait for the save in flight and release the thread and the buffers."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._wait()
        self._kept.clear()

    def _wait(self) -> None:
        self._done += [future.result() for future in self._running]
        self._running = []

    def _committed(self, snapshot: RankSnapshot, began: float, blocked: float = 0.0) -> SaveResult:
        generation, failure = None, None
        try:
            generation = commit(self._folder, snapshot, keep=self._keep, disk=self._disk, party=self._party)
        except NotCommitted as error:
            failure = error
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
            self._kept.clear()
            # Not raised here: the other ranks would wait for this rank's part of the save.
            reason = str(error).strip().partition("\n")[0]
            return replace(snapshot, tensors={}, failure=f"no memory for a copy of the state: {reason}")

    def _copies(self, snapshot: RankSnapshot) -> dict[str, Tensor]:
        """Copy the tensors as they are now into buffers that the next save reuses."""
        self._kept = {name: self._buffer(name, tensor) for name, tensor in snapshot.tensors.items()}
        waiting = False
        for name, tensor in snapshot.tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)
            waiting = waiting or not tensor.is_cpu
        # A non-blocking copy from a device returns before the data has arrived, and the writer would read too early.
        if waiting:
            torch.accelerator.synchronize()
        return dict(self._kept)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        # In the layout of the original, so that the copy is one sequential pass; the writer makes it contiguous.
        like = torch.empty_like(tensor, device=torch.empty(0).device)
        # Only a copy from a device to pinned memory is asynchronous.
        return like if tensor.is_cpu else like.pin_memory()
