"""Waits for other ranks: a result that is there counts, and a timeout is not a failure."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfstep import distributed
from tests.support.ranks import Ranks


class Collective:
    """A collective of gloo, seen by a thread that gets its turn late: it completes after the timeout of `wait`."""

    def __init__(self, error: str = "", completes_after: int = 1) -> None:
        self._error, self._completes_after = error, completes_after
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if timeout is not None and self.waits <= self._completes_after:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return self.waits >= self._completes_after


@pytest.mark.parametrize("completes_after", [0, 1, 2, 5])
@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_collective_that_completes_after_the_timeout_is_done(completes_after: int, limit: float | None) -> None:
    looks: list[None] = []
    until = None if limit is None else time.monotonic() + limit
    distributed.wait_for_collective(Collective(completes_after=completes_after), lambda: looks.append(None), until)
    assert len(looks) == max(completes_after - 1, 0)


@pytest.mark.parametrize("completes_after", [0, 1, 2])
def test_a_collective_that_failed_raises_its_own_error(completes_after: int) -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        distributed.wait_for_collective(Collective("Connection closed by peer", completes_after), lambda: None)


def test_a_collective_that_is_done_is_done_after_the_deadline() -> None:
    distributed.wait_for_collective(Collective(completes_after=0), until=time.monotonic() - 1.0)
    distributed.wait_for_collective(Collective(completes_after=1), until=time.monotonic() - 1.0)
    with pytest.raises(TimeoutError):
        distributed.wait_for_collective(Collective(completes_after=99), until=time.monotonic() - 1.0)


def test_a_collective_of_a_device_is_waited_for_without_a_timeout() -> None:
    # NCCL aborts its communicators after the timeout of a `wait`.
    work = Collective(completes_after=99)
    distributed.finish_collective(work, torch.empty(1, device="meta"), lambda: pytest.fail("the host waits"))
    assert work.waits == 1


@contextmanager
def busy_threads(number: int) -> Iterator[None]:
    """Threads that hold the interpreter as often as they get it."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(5000))

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def meet_late(rank: int, times: int, threads: int, look: float) -> dict[str, Any]:
    """Sum with a rank that comes about when the other looks for the first time."""
    spread, failed, sums = 0.002 + 0.012 * threads, [], []
    with pytest.MonkeyPatch.context() as patched, busy_threads(threads if rank == 0 else 0):
        patched.setattr(distributed, "LOOK", timedelta(seconds=look))
        for _ in range(times):
            dist.barrier()
            number = torch.ones(4)
            if rank:
                time.sleep(max(look - 0.002 + random.random() * spread, 0.0))
            work = dist.all_reduce(number, async_op=True)
            try:
                distributed.wait_for_collective(work)
            except RuntimeError as error:
                failed.append(str(error))
                work.wait()
            sums.append(float(number[0]))
    return {"failed": failed, "right": sums == [2.0] * times}


@pytest.mark.ranks
def test_right_collectives_next_to_busy_threads(on_ranks: Ranks, request: pytest.FixtureRequest) -> None:
    is_full = request.config.getoption("--full")
    look = distributed.LOOK.total_seconds() if is_full else 0.05
    for threads in (1, 5, 20) if is_full else (1,):
        # In parts: each call has its own deadline.
        for _ in range(20 if is_full else 3):
            found = on_ranks(meet_late, 10, threads, look)
            assert found == [{"failed": [], "right": True}] * 2, threads
