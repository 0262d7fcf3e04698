"""Stop a run on a signal: acknowledge it at once, and end the run at the next safe point."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from halfstep.deadline import run_within_deadline
from halfstep.errors import INTERRUPTED, TRY_AGAIN, NotBegun
from halfstep.stop_signals import list_stop_signals

OnSignal = Callable[[int, int], None]
ENDED = 0
"""A byte that is no signal number; it ends the thread."""


class SignalThread:
    """A thread that calls `callback(number, nth)` for each of these signals. Created and closed in the main thread.

    The C handler writes the number of each signal to a socket before Python's handlers run. Other signals are passed on
    to the previous wakeup descriptor, such as that of an event loop.
    """

    def __init__(self, numbers: Collection[int], callback: OnSignal) -> None:
        self._numbers, self._callback = numbers, callback
        self._reader, self._writer = socket.socketpair()
        # set_wakeup_fd requires it: a full socket must never block the C handler.
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="halfstep signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous wakeup descriptor, and end the thread."""
        signal.set_wakeup_fd(self._before)
        # A byte ends the thread; closing alone would not while a forked process holds the socket open.
        with contextlib.suppress(OSError):
            self._writer.send(bytes([ENDED]))
        self._writer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def send_again(self) -> None:
        """Make Python run its SIGINT handler once more, from the thread; pending signals are merged into one."""
        if hasattr(signal, "pthread_kill"):  # also interrupts a blocking call of the main thread
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main(signal.SIGINT)
        self._reader.recv(1)  # this signal is written to the socket too

    def _listen(self) -> None:
        counts: Counter[int] = Counter()
        with self._reader:
            while numbers := self._reader.recv(64):
                for number in numbers:
                    if number == ENDED:
                        return
                    if number in self._numbers:
                        counts[number] += 1
                        self._callback(number, counts[number])
                    elif self._before >= 0:
                        with contextlib.suppress(OSError):
                            os.write(self._before, bytes([number]))


def print_on_rank_zero(text: str) -> None:
    """Print a line to stderr, from any thread; only rank 0 prints."""
    # From the environment: a signal may arrive before the process group exists.
    if os.environ.get("RANK", "0") != "0":
        return
    # The terminal has printed ^C on the current line.
    begin = "\n" if sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty() else ""
    with contextlib.suppress(Exception):
        print(f"{begin}{text}", file=sys.stderr, flush=True)


HEARD = (signal.SIGTERM, signal.SIGINT)
"""Caught in every process; see `list_stop_signals` for the others."""
PATIENCE = 30.0
"""Seconds that a run has to exit after a KeyboardInterrupt before another Ctrl-C raises again."""
BEFORE_STEPS, AFTER_STEP = "before the first step", "after this step"
AFTER_BATCH, AFTER_PICTURES = "after this batch of the evaluation", "after the pictures"
SAVED = "when the last state is saved"
GRACE = 2.0
"""Seconds that Python has to handle a second Ctrl-C before the process is ended without it."""
LEAVING = 8.0
"""Seconds that a run has to leave after a second Ctrl-C was handled: its disk may not answer."""
UNBEGUN = 15.0
"""Seconds that a run has to leave where it was asked to stop before its first step: there is nothing to save."""
TOLD = 1.0
"""Seconds for the last words of a process that is ended; its disk or its terminal may not answer."""
SHOW_CURSOR = "\x1b[?25h"


@dataclass
class _SignalState:
    first: str | None = None
    interrupts: int = 0
    """How often Python ran its handler for Ctrl-C."""
    raised: float | None = None
    """The time of the last KeyboardInterrupt."""
    when: str = BEFORE_STEPS
    """When a run that gets a signal now will stop."""
    at_once: bool = False
    """Whether a signal raises NotBegun if it arrives."""
    on_leaving: Callable[[int, str], object] = lambda code, reason: None
    """Records the exit code and the reason where the process is ended from a thread."""


_active: _SignalState | None = None
"""The state of the main thread's Stopping; a nested one shares it."""
_outermost: StopSignalHandler | None = None
"""The Stopping that holds the handlers from before the run."""


class StopSignalHandler:
    """A context in which SIGTERM and Ctrl-C only set `asked`; a second Ctrl-C raises KeyboardInterrupt at once.

    SIGHUP, SIGUSR1 and SIGUSR2 are as SIGTERM where `list_stop_signals` has them. A nested context has the same
    `asked`, also where it was set before. Other threads cannot receive signals; there it shows the state of the main
    thread's.

    Python handles signals between two bytecode instructions, and a kernel may delay that for minutes. So a thread
    acknowledges them, and calls `last_resort` with an exit code and a reason where the second Ctrl-C, or a signal
    before the first step, does not end the run in time.
    """

    def __init__(self, last_resort: Callable[[int, str], None] | None = None) -> None:
        self._received = _SignalState()
        self._outer: _SignalState | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._last_resort = last_resort
        self._hearing: SignalThread | None = None
        self.heard: list[signal.Signals] = []
        """The signals that ask to stop, besides Ctrl-C."""

    @property
    def asked(self) -> str | None:
        """The name of the first signal that requested a stop."""
        return self._received.first

    def will_stop(self, when: str) -> None:
        """Set when a run that gets a signal from now on will stop; shown in the acknowledgment."""
        self._received.when = when

    def record_leaving(self, record: Callable[[int, str], object]) -> None:
        """Call `record` with the exit code and the reason where the process is ended from a thread."""
        self._received.on_leaving = record

    def leave_unbegun(self) -> None:
        """Raise NotBegun if a stop was requested before the first step: there is nothing to save."""
        if self.asked is not None:
            raise build_not_begun_error(self.asked)

    def __enter__(self) -> StopSignalHandler:
        global _active, _outermost
        self._received = _active or _SignalState()
        if threading.current_thread() is threading.main_thread():
            self._outer, _active = _active, self._received
            # A nested one takes over what the outer one caught.
            heard = [signal.SIGINT, *(list_stop_signals() if _outermost is None else _outermost.heard)]
            self.heard = [number for number in heard if number != signal.SIGINT]
            if self._outer is None:
                _outermost = self
                self._hearing = SignalThread(heard, self._acknowledge)
            for number in heard:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active, _outermost
        if self._hearing is not None:
            hearing, self._hearing = self._hearing, None
            _outermost = None
            hearing.close()  # first: it may be about to repeat a Ctrl-C
        if self._before:
            _active = self._outer
        while self._before:
            _restore_handler(*self._before.popitem())

    def leave_to_parent(self) -> None:
        """Give a forked process its own signals back: the socket, and a request to stop, are the parent's.

        SIGINT stays as it is: Ctrl-C reaches data workers too, and the parent needs them for its last step.
        """
        self._hearing = None
        signal.set_wakeup_fd(-1)
        for number in self.heard:
            _restore_handler(number, self._before[number])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        received = self._received
        received.first = received.first or signal.Signals(number).name
        if number == signal.SIGINT:
            received.interrupts += 1
            # A third Ctrl-C would interrupt the cleanup of the second.
            is_leaving = received.raised is not None and time.monotonic() - received.raised < PATIENCE
            # An exception in __enter__ or __exit__ would leave handlers installed.
            if received.interrupts > 1 and not is_leaving and not _is_entering_or_leaving(frame):
                received.raised = time.monotonic()
                raise KeyboardInterrupt
        if received.at_once and not _is_entering_or_leaving(frame):
            received.at_once = False
            raise build_not_begun_error(received.first)

    # -- in the thread that acknowledges ------------------------------------------------------------------------

    def _acknowledge(self, number: int, nth: int) -> None:
        """Print at once what the nth signal of this kind leads to."""
        if nth == 1:
            self._leave_unbegun_soon(signal.Signals(number).name)
        if number != signal.SIGINT:
            if nth == 1:
                print_on_rank_zero(f"{signal.Signals(number).name}: stopping {self._received.when}")
        elif nth == 1:
            print_on_rank_zero(f"stopping {self._received.when}; Ctrl-C again to stop now")
        elif nth == 2:
            print_on_rank_zero("stopping now")
            self._see_to_it()
        else:
            print_on_rank_zero("already stopping")

    def _see_to_it(self) -> None:
        """Enforce a second Ctrl-C: Python merges two that arrive in one kernel, and a long kernel may still run."""
        end = time.monotonic() + GRACE
        while (hearing := self._hearing) is not None and self._received.raised is None:
            hearing.send_again()
            time.sleep(GRACE / 10)
            if time.monotonic() > end and self._received.raised is None:
                self._end(INTERRUPTED, IN_A_STEP)
        # It was handled, and the run leaves; what it waits for may not answer.
        self._later(LEAVING, lambda: self._end(INTERRUPTED, IN_A_STEP))

    def _leave_unbegun_soon(self, name: str) -> None:
        """Make a run that is asked to stop before its first step exit, even if it is blocked."""

        def leave() -> None:
            if self._received.when == BEFORE_STEPS:
                self._end(TRY_AGAIN, build_not_begun_error(name).given)

        if self._received.when == BEFORE_STEPS:
            self._later(UNBEGUN, leave)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` in a thread after so many seconds, unless the run has left by then."""
        hearing = self._hearing

        def call() -> None:
            if self._hearing is not None and self._hearing is hearing:
                then()

        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()

    def _end(self, code: int, reason: str) -> None:
        if self._last_resort is None:
            return
        run_within_deadline(TOLD, lambda: self._received.on_leaving(code, reason))
        self._last_resort(code, reason)


def _restore_handler(number: signal.Signals, handler: Any) -> None:
    # None stands for a handler that was not set from Python, and cannot be set again from Python.
    signal.signal(number, signal.SIG_DFL if handler is None else handler)


IN_A_STEP = "stopped in the middle of a step; the same command continues from the last checkpoint, if there is one"


def end_process(code: int, reason: str) -> None:
    """End this process from any thread, at any point; checkpoints are whole at every moment."""
    run_within_deadline(TOLD, lambda: _print_last_reason(reason))
    # Not sys.exit, which only ends the calling thread.
    os._exit(code)


def _print_last_reason(reason: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(SHOW_CURSOR, end="", file=sys.__stderr__, flush=True)
    print_on_rank_zero(reason)


def find_stop_signal() -> str | None:
    """Return the name of the signal that requested a stop; for long work without its own Stopping."""
    return None if _active is None else _active.first


def build_not_begun_error(signal: str) -> NotBegun:
    """Return the error of a run that was asked to stop before its first step."""
    error = NotBegun(
        f"stopped by {signal} before the first step, so nothing was saved",
        do="start it again with the same command",
    )
    error.signal = signal
    return error


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Let a signal raise NotBegun inside, wherever it arrives; for long reading before the first step.

    Only this rank may get the signal: others that would wait for it have to hear of it.
    """
    if _active is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = _active
    received.at_once = True
    try:
        if received.first is not None:
            raise build_not_begun_error(received.first)
        yield
    finally:
        received.at_once = False


_DOOR = (StopSignalHandler.__enter__.__code__, StopSignalHandler.__exit__.__code__)


def _is_entering_or_leaving(frame: FrameType | None) -> bool:
    """Return whether a Stopping is being entered or left: an exception would leave its handlers installed."""
    while frame is not None:
        if frame.f_code in _DOOR:
            return True
        frame = frame.f_back
    return False


_masks = threading.local()
"""The signal mask of each thread that is forking."""


def _hold_signals() -> None:
    """Hold signals back while a process forks: one that reached the child too early would look like the parent's."""
    if _outermost is None:
        _masks.before = None
    else:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *_outermost.heard])


def _let_signals_through() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset_forked_child() -> None:
    if _outermost is not None:
        _outermost.leave_to_parent()
    _let_signals_through()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_through, after_in_child=_reset_forked_child)
