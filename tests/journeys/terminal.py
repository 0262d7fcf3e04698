"""A person at a terminal of 80 × 24: types a command, reads the screen, presses Ctrl-C, and looks at the clock."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from tests.journeys.screen import Screen

COMMAND = [sys.executable, "-m", "halfstep"]
LINES, COLUMNS = 24, 80
INTERRUPT = b"\x03"


class Late(AssertionError):
    """Raised where the screen does not show in time what it should, with what it shows."""


class Terminal:
    """One command in a pseudo-terminal. Seconds count from its start; CPU seconds are those of all of its processes."""

    def __init__(
        self,
        words: list[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.screen = Screen(COLUMNS, LINES)
        self.raw = b""
        self.first_line: tuple[float, float] | None = None
        """Wall and CPU seconds until there was something to read."""
        self._ended = False
        self._cpu: dict[int, float] = {}
        own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._file = own
        self._started = time.monotonic()

        def controlling() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal, as it does for people
            if before is not None:
                before()

        self._process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=surroundings(environment),
            preexec_fn=controlling,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._file)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return self.screen.text()

    @property
    def words(self) -> str:
        """The text without its line breaks: sentences are found however they were wrapped."""
        return " ".join(self.text.split())

    @property
    def letters(self) -> str:
        """The text without any space: paths are found however they were folded."""
        return "".join(self.text.split())

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.words, re.IGNORECASE) is not None

    def wait_until(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Reads on until something is true, and returns how long that took."""
        began = time.monotonic()
        while not true():
            passed = time.monotonic() - began
            if passed > seconds or self._ended:
                raise Late(f"{what}: not after {passed:.1f} s{' (ended)' * self._ended}; the screen:\n{self.text}")
            self._read(0.02)
        return time.monotonic() - began

    def wait_for(self, pattern: str, seconds: float) -> float:
        return self.wait_until(lambda: self.shows(pattern), seconds, f"/{pattern}/")

    def finish(self, seconds: float) -> int:
        """Reads until the command ends, and returns its exit code."""
        began = time.monotonic()
        while not self._ended:
            if time.monotonic() - began > seconds:
                raise Late(f"still running after {seconds:.0f} s; the screen:\n{self.text}")
            over = self._process.poll() is not None
            if not self._read(0.1) and over:
                self._ended = True  # a process that it left behind may hold the terminal open
        return self._process.wait()

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._file, 65536)
        except OSError:  # Linux says EIO where the last process has closed its side
            data = b""
        if not data:
            self._ended = True
            return False
        passed, cpu = self.seconds, 0.0 if self.first_line else self.cpu_seconds()
        self.raw += data
        self.screen.feed(data)
        if self.first_line is None and self.text:
            self.first_line = (passed, cpu)
        return True

    # -- doing and measuring ------------------------------------------------------------------------------------------

    def press_ctrl_c(self) -> None:
        os.write(self._file, INTERRUPT)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def cpu_seconds(self) -> float:
        """User and system time so far, with that of children, the ended ones included."""
        try:
            process = psutil.Process(self._process.pid)
            for one in [process, *process.children(recursive=True)]:
                times = one.cpu_times()
                self._cpu[one.pid] = times.user + times.system
        except psutil.NoSuchProcess:
            pass
        return sum(self._cpu.values())


TELL_IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
"""An environment in which Python tells every module that it loads, for `imported`."""


def imported(terminal: Terminal) -> set[str]:
    lines = re.findall(r"import time:[^|\r\n]*\|[^|\r\n]*\|([^|\r\n]*)\r?\n", terminal.raw.decode(errors="replace"))
    assert len(lines) > 20, "the command does not run in an environment that tells imports"
    return {name.strip() for name in lines}


def surroundings(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a person at a terminal, and not that of a test."""
    of_tests = ("PYTEST_", "COV_", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    return {**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(extra or {})}
