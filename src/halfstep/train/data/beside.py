"""Processes that read samples beside the one that trains: how they begin, what signals mean to them, how they end."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

import torch

from halfstep.train.data.samples import Key

PATIENCE = 1.0
"""Seconds that workers have for the sample they are at, when nobody waits for it any more."""
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG, as linux/prctl.h has it."""
ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


class Worker:
    """How a process that reads samples begins: the process that trains decides what a signal means, and outlives it."""

    def __init__(self) -> None:
        self.trainer = os.getpid()
        # Not an Event: that has a lock, and a signal that arrives while another one is handled would wait for it.
        self.closing: Any = RawValue("b", 0)

    def __call__(self, worker: int) -> None:
        # Ctrl-C goes to the whole process group.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._pass_on)
        # An interpreter that ends takes its handlers away first, and would die of a signal that says what it does.
        ignore = (signal.SIGTERM, signal.SIG_IGN)
        multiprocessing.util.Finalize(None, signal.signal, ignore, exitpriority=100)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_TO_END)
        _end_with_trainer()
        if self._is_orphan():
            os._exit(0)
        torch.set_num_threads(1)

    def close(self) -> bool:
        """In the trainer, before it ends the workers. False where others did, or will: they are a fork's parent's."""
        if self.closing.value or os.getpid() != self.trainer:
            return False
        self.closing.value = 1
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Whoever asks a worker to end means the run; but for the trainer itself, which has no more use for it."""
        if self.closing.value or self._is_orphan():
            os._exit(0)
        try:
            os.kill(self.trainer, number)
        except ProcessLookupError:
            os._exit(0)

    def _is_orphan(self) -> bool:
        # Not "the parent is 1": in a container, the trainer may be.
        return not _is_served() and os.getppid() != self.trainer


class Given:
    """Keys on their way to the workers, counted, so that the last batch is known when it comes back."""

    def __init__(self, keys: Iterator[list[Key]]) -> None:
        self._keys, self._count, self._ended = keys, 0, False

    def __iter__(self) -> Iterator[list[Key]]:
        for key in self._keys:
            self._count += 1
            yield key
        self._ended = True

    def are_back(self, batches: int) -> bool:
        return self._ended and batches == self._count


def from_workers(loader: Any, given: Given, worker: Worker) -> Iterator[Any]:
    """What a DataLoader's workers read; they end with the iteration, wherever that ends."""
    iterator: Any = None
    back = 0
    # A process that ends with an iteration half done ends its workers too, by a signal that they would pass on.
    atexit.register(worker.close)
    try:
        with _signals_wait():
            iterator = iter(loader)
        # Asked for one more than there are, torch would end its workers before they know that they are closed.
        while not given.are_back(back):
            yield next(iterator)
            back += 1
    finally:
        atexit.unregister(worker.close)
        if iterator is not None and worker.close():
            _end(iterator)


def _end(iterator: Any) -> None:
    """End the workers, also those that are in the middle of a long sample."""
    # torch waits 5 s for each worker, one after the other, before it ends the first one that is busy. Not at once: it
    # first has to part from them, and a worker that ends in the middle of a message would hold it up for ever.
    hurry = threading.Timer(PATIENCE, _hurry, [iterator._workers])
    hurry.start()
    try:
        with suppress(RuntimeError):  # a worker that is killed now, and missed by nobody
            iterator._shutdown_workers()
    finally:
        hurry.cancel()
        hurry.join()
    for process in iterator._workers:
        if process.is_alive():  # in foreign code that never comes back, where no handler of Python's runs
            process.kill()


def _hurry(workers: list[Any]) -> None:
    for process in workers:
        process.terminate()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A process that is started inside hears no signal before it knows what to do with it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if multiprocessing.get_start_method() != "fork":
        # Begins with the first worker otherwise, and lets signals through when it has.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_trainer() -> None:
    """No worker outlives a trainer that is killed, also where it is busy and does not look for it."""
    if sys.platform == "linux" and not _is_served():
        # The parent that this means is a thread: the one that iterates, which lives as long as it wants batches.
        with suppress(OSError, AttributeError):  # a C library that cannot be reached: torch looks every 5 s
            ctypes.CDLL(None).prctl(END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_outlived, daemon=True).start()


def _outlived() -> None:
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(0)


def _is_served() -> bool:
    """Whether the parent is a fork server, which trains nothing, and lives as long as its children."""
    return multiprocessing.get_start_method(allow_none=True) == "forkserver"
