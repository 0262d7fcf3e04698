"""Ranks of a job as torchrun would start them, forked from a process that has torch loaded: 4 or 256 of them."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import curves
from tests.support.preloaded import server, settle

DEADLINE = 80.0
"""Seconds after which a rank that has not answered has hung. It waits half of that for another rank."""
SHOW_STACK = signal.SIGUSR2
"""Makes a rank write its Python stack down; halfstep itself handles no such signal."""


@dataclass(frozen=True)
class Outcome:
    """What a function came to on one rank."""

    rank: int
    value: Any = None
    failure: str = ""
    """A traceback, `ended by SIGKILL`, or that it hung, with its stack; empty where the function returned."""


class Ranks:
    """Processes of one job. They serve many tests, one function after another; after a failure they are started anew.

    With `backend=None` no process group is made: what runs makes its own from the environment, as under torchrun.
    """

    def __init__(self, processes: int = 2, backend: str | None = "gloo", deadline: float = DEADLINE) -> None:
        self._processes, self._backend, self._deadline = processes, backend, deadline
        self._started: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Return what `function(rank, *arguments)` returned on each rank; raise AssertionError with every traceback."""
        self.begin(function, *arguments, **named)
        found = self.outcomes()
        failed = [f"rank {one.rank}: {one.failure}" for one in found if one.failure]
        assert not failed, "\n".join(failed)
        return [one.value for one in found]

    def begin(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Start a function on each rank, in the folder and the environment that this process has now."""
        if not self._started:
            self._start()
        call = pickle.dumps((function, arguments, named))
        for rank, connection in enumerate(self._connections):
            connection.send((os.getcwd(), {**os.environ, **self._environment(rank)}, call))

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, such as SIGKILL or SIGSTOP while a function runs."""
        pid = self._started[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def outcomes(self) -> list[Outcome]:
        """Wait for every rank and return what became of each. Those that hang are ended, and told with their stacks."""
        until = time.monotonic() + self._deadline
        found: dict[int, Outcome] = {}
        waiting = set(range(self._processes))
        while waiting and (left := until - time.monotonic()) > 0:
            # Of a rank that was killed, its own workers may hold the connection open; its end is told by the sentinel.
            sources = {source: rank for rank in waiting for source in self._sources(rank)}
            for rank in {sources[source] for source in wait(list(sources), left)}:
                found[rank] = self._heard(rank)
                waiting.remove(rank)
        found.update({one.rank: one for one in self._hung(waiting)})
        if any(one.failure for one in found.values()):
            self.stop()
        return [found[rank] for rank in range(self._processes)]

    def stop(self) -> None:
        """End every rank, and after them the process that holds their store."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.join()
        if self._started:
            self._store.kill()
            self._store.join()
            self._alive.close()
            shutil.rmtree(self._stacks)
        for connection in self._connections:
            connection.close()
        self._started, self._connections = [], []

    def _start(self) -> None:
        context = server()
        self._stacks = Path(tempfile.mkdtemp())
        self._alive, theirs = context.Pipe()
        self._store = context.Process(target=_hold_store, args=(theirs,), daemon=True)
        self._store.start()
        theirs.close()
        self._port = self._alive.recv()
        for rank in range(self._processes):
            ours, theirs = context.Pipe()
            arguments = (rank, self._backend, self._deadline / 2, str(self._stack(rank)), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._started.append(process)
            self._connections.append(ours)

    def _environment(self, rank: int) -> dict[str, str]:
        """As torchrun sets it; the store is the agent's."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self._processes),
            "LOCAL_WORLD_SIZE": str(self._processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def _stack(self, rank: int) -> Path:
        return self._stacks / f"rank-{rank}.txt"

    def _sources(self, rank: int) -> tuple[Connection, int]:
        return self._connections[rank], self._started[rank].sentinel

    def _heard(self, rank: int) -> Outcome:
        # It may have answered and then ended: what it said counts.
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._connections[rank].poll():
                good, said = pickle.loads(self._connections[rank].recv_bytes())
                return Outcome(rank, said) if good else Outcome(rank, failure=said)
        process = self._started[rank]
        process.join()
        code = process.exitcode or 0
        return Outcome(rank, failure=f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}")

    def _hung(self, ranks: Iterable[int]) -> list[Outcome]:
        for rank in ranks:
            self.send_signal(rank, SHOW_STACK)
            self.send_signal(rank, signal.SIGCONT)  # one that was stopped has a stack too
        until = time.monotonic() + 5.0
        while any(not self._stack(rank).stat().st_size for rank in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        hung = f"hung for {self._deadline:.0f} s, here:\n"
        return [Outcome(rank, failure=hung + self._stack(rank).read_text()) for rank in ranks]


def _hold_store(connection: Connection) -> None:
    """Hold the store in a process that outlives every rank, as torchrun's agent does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    # The other end is closed where the test's process is gone.
    with contextlib.suppress(EOFError):
        connection.recv()


def _serve(rank: int, backend: str | None, patience: float, stack: str, connection: Connection) -> None:
    """Call what arrives, and answer with its value or its traceback, until the other end is closed."""
    torch.set_num_threads(1)
    curves.leave_out()
    with open(stack, "w") as file, contextlib.suppress(EOFError):
        faulthandler.register(SHOW_STACK, file=file, all_threads=True)
        while True:
            folder, environment, call = connection.recv()
            try:
                settle(folder, environment)
                if backend is not None and not dist.is_initialized():
                    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience))
                function, arguments, named = pickle.loads(call)
                answer = pickle.dumps((True, function(rank, *arguments, **named)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)
