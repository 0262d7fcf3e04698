"""`halfstep` as a process of its own, forked where torch is loaded: exit codes, signals and words without the wait."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import torch

from halfstep.cli.main import main
from tests.support.preloaded import server, settle

PATIENCE = 100.0
"""Seconds after which a command that should end has hung."""


class Command:
    """`halfstep WORDS`, begun at once in the current folder. Its output goes into files, as under a batch system.

    `before` is called in the new process first; it is a function of a module.
    """

    def __init__(
        self,
        *words: object,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp()
        typed = [str(word) for word in words]
        arguments = (typed, os.getcwd(), {**os.environ, **(environment or {})}, self._folder, before)
        self._process = server().Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the command has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    def ended(self, within: float = PATIENCE) -> tuple[int, str, str]:
        """Wait for the end and return the exit code, stdout and stderr; raise AssertionError where there is none."""
        self._process.join(within)
        code = self.code
        if code is None:
            self._process.kill()
            self._process.join()
        out, err = ((Path(self._folder) / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        assert code is not None, f"still running after {within:.0f} s\n{out}\n{err}"
        return code, out, err


def typed(rank: int, *words: str) -> tuple[int, str, str]:
    """Run `halfstep WORDS` on one of `Ranks(..., backend=None)`; return its exit code, stdout and stderr."""
    before, sys.argv = sys.argv, ["halfstep", *words]
    code, out, err = 0, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def _run(
    words: list[str], folder: str, environment: dict[str, str], output: str, before: Callable[[], object] | None
) -> None:
    """Be the command: what a shell gives a new process, and then its entry point."""
    sys.stdout, sys.stderr = (_into(Path(output) / name, number) for number, name in ((1, "out"), (2, "err")))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    settle(folder, environment)
    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["halfstep", *words]
    main()


def _into(path: Path, descriptor: int) -> TextIO:
    """Make a file of a standard stream, for what writes past Python too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, descriptor)
    os.close(file)
    return os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)
