"""Saves that the training hardly waits for: the state is copied into kept buffers, and written from them beside it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from halfstep.train.checkpoint.commit import NotCommitted, Party, Snapshot, commit
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.checkpoint.generation import Generation


@dataclass(frozen=True)
class Saved:
    """What became of a save."""

    attempt: int
    generation: Generation | None
    """None where nothing was committed."""
    failure: NotCommitted | None
    seconds: float
    """From the request to the commit."""
    blocked: float
    """Of these, the seconds in which the training stood still."""
    bytes: int


class Saver:
    """One save at a time. What became of it is asked for at the next step: a failure is never lost."""

    def __init__(
        self, folder: Path, *, keep: int, party: Party, background: bool = True, disk: Disk | None = None
    ) -> None:
        self._folder, self._keep, self._party, self._disk = folder, keep, party, disk or Disk()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._kept: dict[str, Tensor] = {}
        self._running: list[Future[Saved]] = []
        self._done: list[Saved] = []

    def save(self, snapshot: Snapshot) -> None:
        """Returns when the training may go on: with a background, as soon as the state is copied."""
        began = time.perf_counter()
        self._wait()
        copied = self._copied(snapshot)
        if self._thread is None:
            saved = self._committed(copied, began)
            self._done.append(replace(saved, blocked=saved.seconds))
            return
        blocked = time.perf_counter() - began
        self._running.append(self._thread.submit(self._committed, copied, began, blocked))

    def news(self) -> list[Saved]:
        """What became of saves since this was last asked. Waits for nothing.

        Several processes hear of a save when the next one begins, or with `finish`: they would see it come to its end
        at different steps, and where it failed they must stop at the same one.
        """
        if self._party.size == 1 and self._running and self._running[0].done():
            self._wait()
        told, self._done = self._done, []
        return told

    def finish(self) -> list[Saved]:
        """The same, when the save that is under way has come to its end."""
        self._wait()
        return self.news()

    def close(self) -> None:
        """At the end of a run: nothing is under way any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._wait()
        self._kept.clear()

    def _wait(self) -> None:
        self._done += [future.result() for future in self._running]
        self._running = []

    def _committed(self, snapshot: Snapshot, began: float, blocked: float = 0.0) -> Saved:
        generation, failure = None, None
        try:
            generation = commit(self._folder, snapshot, keep=self._keep, disk=self._disk, party=self._party)
        except NotCommitted as error:
            failure = error
        except Exception as error:
            # Whatever it is: in this thread nobody else would hear of it.
            failure = NotCommitted(f"{type(error).__name__}: {error}")
        size = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.tensors.values())
        return Saved(snapshot.attempt, generation, failure, time.perf_counter() - began, blocked, size)

    def _copied(self, snapshot: Snapshot) -> Snapshot:
        """The state in main memory. Where that has no room left, a save that fails as it would with a full disk."""
        try:
            if self._thread is None:
                return replace(snapshot, tensors={name: tensor.cpu() for name, tensor in snapshot.tensors.items()})
            return replace(snapshot, tensors=self._copies(snapshot))
        except (MemoryError, RuntimeError) as error:
            self._kept.clear()
            # Not raised here: the other processes would wait for this one's part of the save.
            reason = str(error).strip().partition("\n")[0]
            return replace(snapshot, tensors={}, failure=f"no memory for a copy of the state: {reason}")

    def _copies(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """The numbers as they are now, in buffers that are used again by the next save."""
        self._kept = {name: self._buffer(name, tensor) for name, tensor in snapshot.tensors.items()}
        waiting = False
        for name, tensor in snapshot.tensors.items():
            self._kept[name].copy_(tensor, non_blocking=True)
            waiting = waiting or not tensor.is_cpu
        if waiting:
            torch.accelerator.synchronize()
        return dict(self._kept)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        # In the layout of the original, which makes the copy one sweep through memory; the writer puts it in order.
        like = torch.empty_like(tensor, device=torch.empty(0).device)
        return like if tensor.is_cpu else like.pin_memory()
