"""Signals that ask a run to stop: noted, shared between inside and outside, and given back afterwards."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from halfstep.errors import NotBegun
from halfstep.host_memory import pause_gc
from halfstep.train import signals
from halfstep.train.signals import HEARD, StopSignalHandler

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A KeyboardInterrupt that meets a callback of the garbage collector is lost."""
    with pause_gc():
        yield


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A signal that is not caught ends the tests: then at least this one is named."""
    before = {number: signal.getsignal(number) for number in HEARD}
    yield
    assert {number: signal.getsignal(number) for number in HEARD} == before
    assert signals._active is None


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", HEARD)
def test_a_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    with StopSignalHandler() as run:
        assert run.asked is None
        send(number)
        assert run.asked == number.name
    assert run.asked == number.name


OTHERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("number", OTHERS)
def test_signals_of_terminals_and_schedulers_are_as_sigterm(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignalHandler() as run, StopSignalHandler() as inner:
        run.will_stop(signals.AFTER_STEP)
        send(number)
        assert inner.asked == number.name
        _said(capfd, f"{number.name}: stopping after this step\n")
    assert signal.getsignal(number) is signal.SIG_DFL


def test_signals_that_somebody_else_has_stay_theirs(tmp_path: Path) -> None:
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in OTHERS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        with open(tmp_path / "stacks", "w") as stacks:
            faulthandler.register(signal.SIGUSR2, file=stacks)
            try:
                with StopSignalHandler() as run:
                    send(*OTHERS)
                    assert run.asked is None
            finally:
                faulthandler.unregister(signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGUSR1]
    assert "test_signals_that_somebody_else_has" in (tmp_path / "stacks").read_text()


@pytest.mark.parametrize(("when", "expected"), [(signals.BEFORE_STEPS, [75]), (signals.AFTER_STEP, [])])
def test_a_run_that_has_not_begun_leaves_in_time_whatever_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, when: str, expected: list[int]
) -> None:
    monkeypatch.setattr(signals, "UNBEGUN", 0.05)
    ended, recorded = list[int](), list[int]()
    with StopSignalHandler(lambda code, reason: ended.append(code)) as run:
        run.record_leaving(lambda code, reason: recorded.append(code))
        run.will_stop(when)
        send(TERM)
        end = time.monotonic() + (5.0 if expected else 0.3)
        while time.monotonic() < end and not ended:
            time.sleep(0.01)
    assert (ended, recorded) == (expected, expected)


def test_a_second_ctrl_c_ends_a_run_whose_cleanup_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "LEAVING", 0.05)
    ended = threading.Event()
    with StopSignalHandler(lambda code, reason: ended.set() if code == 130 else None):
        send(INT)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert ended.wait(5.0), "it was handled, and nothing left"


def test_further_sigterms_change_nothing() -> None:
    with StopSignalHandler() as run:
        send(*[TERM] * 50)
        assert run.asked == "SIGTERM"
        send(INT)
        assert run.asked == "SIGTERM", "the first one counts"


def test_who_presses_ctrl_c_twice_insists() -> None:
    with StopSignalHandler() as run:
        send(INT)
        send(TERM)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert run.asked == "SIGINT"


def test_a_third_ctrl_c_does_not_end_what_tidies_up_after_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignalHandler():
        send(INT)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        send(INT, INT, INT)
        monkeypatch.setattr(signals, "PATIENCE", 0.0)
        with pytest.raises(KeyboardInterrupt):
            send(INT)


def _fails() -> None:
    with StopSignalHandler():
        send(TERM)
        raise ZeroDivisionError


def test_handlers_are_given_back_after_an_error_too() -> None:
    heard: list[int] = []
    before = signal.signal(TERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(ZeroDivisionError):
            _fails()
        assert heard == []
        send(TERM)
        assert heard == [TERM]
    finally:
        signal.signal(TERM, before)


def test_an_ignored_signal_is_ignored_again() -> None:
    before = signal.signal(INT, signal.SIG_IGN)
    try:
        with StopSignalHandler() as run:
            send(INT)
        assert run.asked == "SIGINT"
        send(INT)
    finally:
        signal.signal(INT, before)


def test_the_inner_one_sees_what_the_outer_one_heard_and_the_other_way_round() -> None:
    with StopSignalHandler() as outer:
        with StopSignalHandler() as first:
            assert first.asked is None
        send(TERM)
        with StopSignalHandler() as second:
            assert second.asked == "SIGTERM"
    with StopSignalHandler() as outer:
        with StopSignalHandler() as inner:
            send(INT)
            assert (inner.asked, outer.asked) == ("SIGINT", "SIGINT")
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert outer.asked == "SIGINT"


def test_one_after_another_begins_anew() -> None:
    one = StopSignalHandler()
    with one:
        send(INT)
    with StopSignalHandler() as run:
        assert run.asked is None
        send(INT)
        assert run.asked == "SIGINT", "the first of this one"
    with one:
        assert one.asked is None


def _in_thread(body: object) -> None:
    thread = threading.Thread(target=body)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_another_thread_installs_nothing() -> None:
    before = {number: signal.getsignal(number) for number in HEARD}
    seen: list[object] = []

    def alone() -> None:
        with StopSignalHandler() as run:
            seen.append({number: signal.getsignal(number) for number in HEARD})
            seen.append(run.asked)
            seen.append(signals._active)

    _in_thread(alone)
    assert seen == [before, None, None]


def test_another_thread_sees_what_the_main_one_heard() -> None:
    seen: list[str | None] = []

    def inside() -> None:
        with StopSignalHandler() as run:
            seen.append(run.asked)
            send(TERM)
            while outer.asked is None:
                pass
            seen.append(run.asked)

    with StopSignalHandler() as outer:
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        assert outer.asked == "SIGTERM"
    assert seen == [None, "SIGTERM"]


def _interrupts(frame: FrameType, event: str, _: object) -> Any:
    if frame.f_code.co_filename not in (signals.__file__, signal.__file__):
        return None
    send(INT, TERM)
    return _interrupts


def test_an_interrupt_at_any_line_of_its_door_leaves_no_handler_behind() -> None:
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in HEARD}
    ours = {number: signal.getsignal(number) for number in HEARD}
    traced, outer, inner = sys.gettrace(), StopSignalHandler(), StopSignalHandler()
    raised = False
    try:
        sys.settrace(_interrupts)
        try:
            with outer, inner:
                pass
        except KeyboardInterrupt:  # would end the tests
            raised = True
        finally:
            sys.settrace(traced)
        found = {number: signal.getsignal(number) for number in HEARD}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == ours
    assert not raised
    assert outer.asked is not None
    assert set(heard) == set(HEARD)


def _said(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What was written to standard error, once all of these words are in it."""
    text, end = "", time.monotonic() + 5.0
    while not all(word in text for word in words):
        assert time.monotonic() < end, f"{words} are not all in {text!r}"
        time.sleep(0.005)
        text += capfd.readouterr().err
    return text


@pytest.mark.parametrize("when", [signals.BEFORE_STEPS, signals.AFTER_STEP, signals.AFTER_BATCH])
def test_ctrl_c_is_acknowledged_with_what_it_leads_to(capfd: pytest.CaptureFixture[str], when: str) -> None:
    with StopSignalHandler() as run:
        run.will_stop(when)
        send(INT)
        _said(capfd, f"stopping {when}; Ctrl-C again to stop now\n")
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        _said(capfd, "stopping now\n")


def test_sigterm_is_acknowledged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignalHandler() as run, StopSignalHandler() as inner:
        inner.will_stop(signals.AFTER_STEP)
        send(TERM)
        assert _said(capfd, "\n") == "SIGTERM: stopping after this step\n"
        send(TERM)
    assert run.asked == "SIGTERM"
    assert capfd.readouterr().err == ""


KERNEL = """
import hashlib, os, signal, threading, time
from halfstep.train.signals import StopSignalHandler, end_process

def press(*pauses):
    for pause in pauses:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)

with StopSignalHandler({last_resort}) as run:
    run.will_stop("after this step")
    threading.Thread(target=press, args=(0.1, 0.3), daemon=True).start()
    try:
        hashlib.pbkdf2_hmac("sha512", b"as long as", b"a kernel", {rounds})  # no instruction of Python's for so long
        os.write(1, b"the kernel is done\\n")  # in one call, which no signal divides
        time.sleep(30)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def _pressed_in_a_kernel(rounds: int, last_resort: str) -> subprocess.CompletedProcess[str]:
    code = KERNEL.format(rounds=rounds, last_resort=last_resort)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_two_in_one_kernel_are_both_acknowledged_and_stop_what_comes_after_it() -> None:
    """Python's own handler runs once, and after the kernel: signals of one kind that wait become one."""
    done = _pressed_in_a_kernel(400_000, "")
    assert done.stderr == "stopping after this step; Ctrl-C again to stop now\nstopping now\n"
    assert done.stdout in ("the kernel is done\ninterrupted\n", "interrupted\n")
    assert done.returncode == 0


def test_a_command_does_not_wait_for_a_long_kernel_twice() -> None:
    done = _pressed_in_a_kernel(1_000_000_000, "end_process")
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("stopped in the middle of a step")
    assert done.stdout == ""


@pytest.mark.parametrize("nested", [False, True])
def test_a_forked_process_ends_on_sigterm(capfd: pytest.CaptureFixture[str], nested: bool) -> None:
    """A pool or a loader ends its workers with SIGTERM: it ends them, and is none of the run's."""
    with StopSignalHandler() as run, StopSignalHandler() if nested else contextlib.nullcontext():
        # The first is sent at once: it may find the child before its first line.
        for wait in (0.0, 0.1):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                while True:
                    signal.pause()
            time.sleep(wait)
            os.kill(child, TERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == TERM
        assert run.asked is None
        send(TERM)
        assert run.asked == "SIGTERM"
    assert "SIGTERM: stopping" in capfd.readouterr().err


def test_a_forked_process_that_leaves_the_block_takes_nothing_from_the_parent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child = -1
    try:
        with StopSignalHandler():
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                send(TERM)
                time.sleep(0.05)
    finally:
        if child == 0:
            os._exit(0)
    assert "SIGTERM: stopping" in capfd.readouterr().err


def test_a_data_worker_outlives_the_first_ctrl_c() -> None:
    """The terminal sends it to every process of the group, and the run still needs its workers for this step."""
    with StopSignalHandler():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.kill(os.getpid(), INT)
            os.write(writer, b"alive")
            while True:
                signal.pause()
        assert os.read(reader, 5) == b"alive"
        os.kill(child, TERM)
        os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)


def test_other_signals_still_reach_an_event_loop() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before, handler = signal.set_wakeup_fd(writer.fileno()), signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with StopSignalHandler():
            send(signal.SIGUSR1, INT)
            reader.settimeout(5.0)
            assert reader.recv(8) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(writer.fileno()) == writer.fileno()
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        reader.close()
        writer.close()


@pytest.mark.wording
def test_asked_before_the_first_step_it_has_not_begun() -> None:
    with StopSignalHandler() as run:
        run.leave_unbegun()
        send(TERM)
        with pytest.raises(NotBegun, match="SIGTERM before the first step"):
            run.leave_unbegun()
