"""A separate process for requests to a store: the process that trains never uses obstore, and may fork.

Requests and replies are lines of JSON. A request names a function as `module:function`; the reply is its result, or the
kind and the text of its failure. The process ends with the one that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from halfstep.errors import HalfstepError, StoreFailed

LOST = "process-lost"
"""The kind of failure of a call whose process ended."""
BUG = "bug"
MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""For glibc: chunks and parts go back to the system at once. By default each thread keeps those that it has freed."""
LEAVING = 1.0
"""Seconds that an idle process has to end."""
WATCH = 0.5
"""Seconds between two looks at the process that started this one."""


class StoreProcess:
    """A process that calls functions on request, one after the other; it is started again after it was killed."""

    def __init__(self) -> None:
        self._calling = threading.Lock()
        self._child = self._start_process()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._child.pid

    def call(self, function: str, request: Mapping[str, object]) -> Any:
        """Return the result of `module:function` for a request; raise StoreFailed as the function does."""
        with self._calling:
            if self._child.poll() is not None:
                self._close_pipes()
                self._child = self._start_process()
            text = json.dumps({"function": function, "request": request})
            try:
                assert self._child.stdin is not None
                assert self._child.stdout is not None
                self._child.stdin.write(text + "\n")
                self._child.stdin.flush()
                line = self._child.stdout.readline()
            except (OSError, ValueError):
                line = ""
        if not line.endswith("\n"):  # a part of a reply, too
            self._end()
            raise StoreFailed(
                "the process for the object store ended in the middle of a request",
                allowed="a process that is left alone",
                do="repeat the request",
                kind=LOST,
            )
        reply = json.loads(line)
        if "failed" in reply:
            raise StoreFailed(**reply["failed"])
        return reply["done"]

    def close(self) -> None:
        """End the process, also in the middle of a request."""
        self._end()
        # A call in another thread sees the end, and gives the lock back.
        if self._calling.acquire(timeout=LEAVING):
            self._close_pipes()
            self._calling.release()

    def _end(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.kill()  # there is nothing to finish: an upload without its commit does not exist
            self._child.wait(LEAVING)

    def _close_pipes(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _start_process(self) -> subprocess.Popen[str]:
        # A new interpreter and not a fork: threads, locks and memory of this process stay out of it. In a separate
        # session: Ctrl-C in a terminal is for the run, which waits for the last upload.
        return subprocess.Popen(
            [sys.executable, "-c", "from halfstep.store.process import serve; serve()", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env={**MEMORY, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )


def serve() -> None:
    """Answer requests until the pipe is closed or the starting process is gone."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    _allow_many_files()
    # Replies go through a copy of the pipe: a library that prints must not end up between them.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(_answer_store_request(json.loads(line))) + "\n")
        replies.flush()
    os._exit(0)


def _exit_with_parent(parent: int) -> None:
    # Data workers that were forked hold the pipe open, so its end does not tell.
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(0)


def _allow_many_files() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _answer_store_request(asked: Mapping[str, Any]) -> dict[str, object]:
    module, _, name = asked["function"].partition(":")
    try:
        return {"done": getattr(importlib.import_module(module), name)(asked["request"])}
    except HalfstepError as error:
        kind = error.kind if isinstance(error, StoreFailed) else error.id
        return {"failed": {"given": error.given, "allowed": error.allowed, "do": error.do, "kind": kind}}
    except OSError as error:
        return {"failed": {"given": f"a file of the run: {error.strerror or type(error).__name__}", "kind": BUG}}
    except BaseException as error:  # a panic of obstore is no Exception
        # The type alone: texts of libraries may hold addresses and answers of the server.
        return {"failed": {"given": f"{name}: {type(error).__name__}", "kind": BUG}}
