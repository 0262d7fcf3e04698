"""`python WORDS`, forked where torch is loaded: what `subprocess` would start, without the wait for an interpreter.

For tests whose promise is not about the interpreter. `forked_python` of tests/conftest.py gives it to halfstep itself.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from halfstep.cli import _out_of_memory
from halfstep.measure import worker_process
from tests.support.preloaded import ROOT, server, settle


class ForkedPython:
    """`subprocess.Popen([sys.executable, *words], text=True)` with three pipes; other arguments make no difference."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        **_: object,
    ) -> None:
        assert command[0] == sys.executable, command
        self.args = command
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = os.pipe(), os.pipe(), os.pipe()
        theirs = [Connection(their_in, writable=False)]
        theirs += [Connection(end, readable=False) for end in (their_out, their_err)]
        folder, variables = str(cwd or os.getcwd()), dict(os.environ if env is None else env)
        arguments = ([str(word) for word in command[1:]], folder, variables, start_new_session, theirs)
        self._process = server().Process(target=_be_python, args=arguments, daemon=True)
        self._process.start()
        for end in theirs:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = os.fdopen(our_in, "w", encoding="utf-8")
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8", errors="replace") for end in (our_out, our_err))

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()


def run(
    command: Sequence[str],
    *,
    input: str = "",
    timeout: float | None = None,
    check: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **_: object,
) -> subprocess.CompletedProcess[str]:
    """Be `subprocess.run(..., capture_output=True, text=True)`."""
    child = ForkedPython(command, cwd=cwd, env=env)
    with child.stdin, child.stdout, child.stderr, ThreadPoolExecutor(2) as readers:
        printed = [readers.submit(stream.read) for stream in (child.stdout, child.stderr)]
        try:
            child.stdin.write(input)
            child.stdin.close()
            code = child.wait(timeout)
        finally:
            child.kill()
        out, err = (each.result() for each in printed)
    done = subprocess.CompletedProcess(command, code, out, err)
    if check:
        done.check_returncode()
    return done


SUBPROCESS = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPython, "run": run})
"""Stands in for the module `subprocess` where it starts Python alone."""
STARTING_PYTHON = [_out_of_memory, worker_process]
if importlib.util.find_spec("PIL"):  # an environment with the core alone runs the tests of the step
    STARTING_PYTHON.append(importlib.import_module("halfstep.runs.printed_code"))


def fork_processes() -> None:
    """Let the Python processes that halfstep starts be forked where torch is loaded."""
    for module in STARTING_PYTHON:
        module.subprocess = SUBPROCESS  # type: ignore[attr-defined]


def run_words(words: Sequence[str]) -> None:
    """Be `python WORDS` in this process: a module, a text or a file."""
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [*words]
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def _be_python(words: list[str], folder: str, variables: dict[str, str], own_session: bool, ends: list[Any]) -> None:
    if own_session:
        os.setsid()
    for descriptor, end in enumerate(ends):
        os.dup2(end.fileno(), descriptor)
        end.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    settle(folder, {**variables, "PYTHONPATH": os.pathsep.join([variables.get("PYTHONPATH", ""), str(ROOT)])})
    torch.set_num_threads(1)
    run_words(words)
