"""Processes that talk over gloo and run what they are given, one function after another."""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.preloaded import PRELOADED

WAIT = datetime.timedelta(seconds=40)
"""A rank that waits longer than this for another one has hung."""


class Ranks:
    """Starting a process costs seconds, so the same ones serve many tests; after a failure they are started anew."""

    def __init__(self, processes: int = 2) -> None:
        self._processes = processes
        self._started: list[Any] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """`function(rank, *arguments)` on each rank, and what each returned (plain data); raises what any raised."""
        return self.some(self._processes, function, *arguments, **named)

    def some(self, those: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """The same, where only the first of the ranks live long enough to say what they found."""
        if not self._started:
            self._start()
        for inbox in self._inboxes:
            inbox.put((function, arguments, named))
        try:
            found = dict(self._outbox.get(timeout=2 * WAIT.total_seconds()) for _ in range(those))
            failed = [f"rank {rank}: {value}" for rank, (good, value) in found.items() if not good]
            assert not failed, "\n".join(failed)
        except BaseException:
            self.stop()
            raise
        return [found[rank][1] for rank in range(those)]

    def stop(self) -> None:
        for process in self._started:
            process.kill()
            process.join()
        self._started = []

    def _start(self) -> None:
        # One process that has loaded torch, and forks into as many as are needed: 4 ranks start as fast as one.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = str(Path(tempfile.mkdtemp()) / "store")
        self._inboxes = [context.SimpleQueue() for _ in range(self._processes)]
        self._outbox = context.Queue()
        for rank, inbox in enumerate(self._inboxes):
            arguments = (rank, self._processes, store, inbox, self._outbox)
            self._started.append(context.Process(target=_serve, args=arguments, daemon=True))
        for process in self._started:
            process.start()


def _serve(rank: int, processes: int, store: str, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, processes)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=processes, timeout=WAIT)
    while True:
        function, arguments, named = inbox.get()
        try:
            outbox.put((rank, (True, function(rank, *arguments, **named))))
        except BaseException:
            outbox.put((rank, (False, traceback.format_exc())))
