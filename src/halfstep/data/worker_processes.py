"""Manage the worker processes of a loader: how they start, what signals mean to them, how long a sample may take."""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawArray, RawValue
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from halfstep.data.dataset import Key, KeyedDataset
from halfstep.stop_signals import POSSIBLE, list_stop_signals

POLL = 1.0
"""Seconds that the trainer waits for a batch before it looks at signals and deadlines."""
PATIENCE = 1.0
"""Seconds that workers have to finish a sample that is no longer needed."""
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG, from linux/prctl.h."""


class WorkerInitializer:
    """The initialization of a worker: the trainer decides what a signal means, and the worker never outlives it."""

    def __init__(self, workers: int) -> None:
        self.trainer = os.getpid()
        # Not an Event: its lock would deadlock where one signal handler interrupts another.
        self.closing: Any = RawValue("b", 0)
        self.at: Any = RawArray("q", 2 * workers)
        """For each worker the number of its current sample, and the count of samples started."""

    def __call__(self, worker: int) -> None:
        # Ctrl-C goes to the whole process group; the trainer alone handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in list_stop_signals():
            signal.signal(number, self._pass_on)
            # Python removes its handlers at exit: a SIGTERM would then kill the worker.
            multiprocessing.util.Finalize(None, signal.signal, (number, signal.SIG_IGN), exitpriority=100)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, POSSIBLE)
        _end_worker_with_trainer()
        if self._is_orphan():
            os._exit(0)
        # Several workers with a thread per core each would compete for the same cores.
        torch.set_num_threads(1)
        samples: Any = get_worker_info().dataset  # type: ignore[union-attr]  # this is a worker
        samples.begin = functools.partial(self._note, worker)

    def _note(self, worker: int, number: int) -> None:
        self.at[2 * worker] = number
        self.at[2 * worker + 1] += 1

    def close(self) -> bool:
        """Mark the workers as closing, in the trainer; return False if that was done, or in a forked process."""
        if self.closing.value or os.getpid() != self.trainer:
            return False
        self.closing.value = 1
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the trainer: it is meant for the run, unless the trainer itself ends the worker."""
        if self.closing.value or self._is_orphan():
            os._exit(0)
        try:
            os.kill(self.trainer, number)
        except ProcessLookupError:
            os._exit(0)

    def _is_orphan(self) -> bool:
        # Not "the parent is 1": in a container, the trainer may be process 1.
        return not _has_fork_server() and os.getppid() != self.trainer


class SentKeys:
    """The keys on their way to the workers, so that the last batch is recognized, and lost ones can be sent again."""

    def __init__(self, keys: Iterator[list[Key]]) -> None:
        self._keys, self._sent, self._ended = keys, deque[list[Key]](), False

    def __iter__(self) -> Iterator[list[Key]]:
        for key in self._keys:
            self._sent.append(key)
            yield key
        self._ended = True

    def came_back(self) -> None:
        """Note that the next batch was read; they come back in order."""
        self._sent.popleft()

    def are_back(self) -> bool:
        """Return whether all batches that were given are back."""
        return self._ended and not self._sent

    def unread(self) -> SentKeys:
        """Return the keys that did not come back, and those that were not sent yet."""
        return SentKeys(chain(self._sent, self._keys))


def iterate_worker_batches(
    loader: Any, given: SentKeys, worker: WorkerInitializer, wait: Callable[[], None]
) -> Iterator[Any]:
    """Yield what the workers of a DataLoader read; they end with the iteration, however it ends.

    `wait` is called every second in which no batch has come, and may raise.
    """
    iterator: Any = None
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    # A process that exits in the middle of an iteration terminates its workers by a signal that they would pass on.
    atexit.register(worker.close)
    try:
        with _block_signals():
            iterator = iter(loader)
        _restore_sigchld_handler(before)
        # Asked for one batch more, torch would end its workers before they know that they are closing.
        while not given.are_back():
            batch = _wait_for_batch(iterator, wait)
            given.came_back()
            yield batch
    finally:
        atexit.unregister(worker.close)
        # Also where the iterator could not be made: workers that were started would pass the signal of their end on.
        if worker.close() and iterator is not None:
            _end_workers(iterator)


def _restore_sigchld_handler(before: Any) -> None:
    """Remove the handler of SIGCHLD with which torch replaced `before`.

    It raises in the code that runs when a worker dies, which may be the middle of an update or of a save. Without it,
    torch detects a dead worker while waiting for its batch, and raises there.
    """
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        is_torchs = before is None or getattr(before, "__module__", "").startswith("torch.utils.data")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs else before)


def _wait_for_batch(iterator: Any, wait: Callable[[], None]) -> Any:
    while True:
        try:
            return next(iterator)
        except RuntimeError as error:
            # torch raises it without a change to the iterator, which can be asked again.
            if not str(error).startswith("DataLoader timed out"):
                raise
            wait()
        except (OSError, EOFError) as error:
            # A batch lies in memory whose descriptor is fetched from its worker, also from one that died since.
            pids = {process.sentinel: process.pid for process in iterator._workers}
            ended = multiprocessing.connection.wait(list(pids), PATIENCE)
            if not ended:
                raise
            dead = pids[ended[0]]
            raise RuntimeError(f"DataLoader worker (pid {dead}) died before its batch was taken over") from error


class SampleTimeout(Exception):
    """A worker does not get done with a sample."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(number, seconds)
        self.number, self.reason = number, f"not read within {seconds:g} s (data.timeout)"


class WorkerDeadline:
    """The time that each worker has been reading its present sample while the trainer waited.

    Counted in seconds of waiting, not by the clock: a process that was stopped and continued would find every sample
    too slow.
    """

    def __init__(self, at: Any, seconds: float) -> None:
        self._at, self._seconds = at, seconds
        self._waited = [(-1, 0.0)] * (len(at) // 2)

    def look(self) -> None:
        """Count a second; raise TooSlow if a worker has been at one sample for too long."""
        for worker, (begun, waited) in enumerate(self._waited):
            number, now = self._at[2 * worker], self._at[2 * worker + 1]
            waited = waited + POLL if now == begun and number != KeyedDataset.IDLE else 0.0
            self._waited[worker] = now, waited
            if 0 < self._seconds <= waited:
                raise SampleTimeout(number, self._seconds)


def _end_workers(iterator: Any) -> None:
    """End the workers, also those in the middle of a long sample."""
    # torch waits 5 s for each worker in turn before it terminates the first busy one. Terminating at once is wrong
    # too: a worker that ends in the middle of a message would block torch's own shutdown forever.
    hurry = threading.Timer(PATIENCE, _terminate_workers, [iterator._workers])
    hurry.start()
    try:
        with suppress(RuntimeError):  # a worker that dies now is no longer needed
            iterator._shutdown_workers()
    finally:
        hurry.cancel()
        hurry.join()
    for process in iterator._workers:
        if process.is_alive():  # stuck in native code, where no Python handler runs
            process.kill()


def _terminate_workers(workers: list[Any]) -> None:
    for process in workers:
        process.terminate()


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block signals until a process started inside has set its handlers."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if multiprocessing.get_start_method() != "fork":
        # Otherwise it starts with the first worker, and unblocks signals when it has.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POSSIBLE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_worker_with_trainer() -> None:
    """End the worker with a trainer that is killed, even while the worker is busy."""
    if sys.platform == "linux" and not _has_fork_server():
        # PDEATHSIG refers to the parent thread: the one that iterates, which lives as long as it needs batches.
        with suppress(OSError, AttributeError):  # no C library: torch polls for its parent every 5 s
            ctypes.CDLL(None).prctl(END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_exit_after_trainer, daemon=True).start()


def _exit_after_trainer() -> None:
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(0)


def _has_fork_server() -> bool:
    """Return whether the parent is a fork server, which outlives the trainer."""
    return multiprocessing.get_start_method(allow_none=True) == "forkserver"
