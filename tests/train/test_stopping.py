"""Signals that ask a run to stop: noted, shared between inside and outside, and given back afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from halfstep.train import stopping
from halfstep.train.stopping import HEARD, Stopping

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A signal that is not caught ends the tests: then at least this one is named."""
    before = {number: signal.getsignal(number) for number in HEARD}
    yield
    assert {number: signal.getsignal(number) for number in HEARD} == before
    assert stopping._active is None


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", HEARD)
def test_a_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    with Stopping() as run:
        assert run.asked is None
        send(number)
        assert run.asked == number.name
    assert run.asked == number.name


def test_further_sigterms_change_nothing() -> None:
    with Stopping() as run:
        send(*[TERM] * 50)
        assert run.asked == "SIGTERM"
        send(INT)
        assert run.asked == "SIGTERM", "the first one counts"


def test_who_presses_ctrl_c_twice_insists() -> None:
    with Stopping() as run:
        send(INT)
        send(TERM)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert run.asked == "SIGINT"


def _fails() -> None:
    with Stopping():
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
        with Stopping() as run:
            send(INT)
        assert run.asked == "SIGINT"
        send(INT)
    finally:
        signal.signal(INT, before)


def test_the_inner_one_sees_what_the_outer_one_heard_and_the_other_way_round() -> None:
    with Stopping() as outer:
        with Stopping() as first:
            assert first.asked is None
        send(TERM)
        with Stopping() as second:
            assert second.asked == "SIGTERM"
    with Stopping() as outer:
        with Stopping() as inner:
            send(INT)
            assert (inner.asked, outer.asked) == ("SIGINT", "SIGINT")
        with pytest.raises(KeyboardInterrupt):
            send(INT)
        assert outer.asked == "SIGINT"


def test_one_after_another_begins_anew() -> None:
    one = Stopping()
    with one:
        send(INT)
    with Stopping() as run:
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
        with Stopping() as run:
            seen.append({number: signal.getsignal(number) for number in HEARD})
            seen.append(run.asked)
            seen.append(stopping._active)

    _in_thread(alone)
    assert seen == [before, None, None]


def test_another_thread_sees_what_the_main_one_heard() -> None:
    seen: list[str | None] = []

    def inside() -> None:
        with Stopping() as run:
            seen.append(run.asked)
            send(TERM)
            while outer.asked is None:
                pass
            seen.append(run.asked)

    with Stopping() as outer:
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        assert outer.asked == "SIGTERM"
    assert seen == [None, "SIGTERM"]


def _interrupts(frame: FrameType, event: str, _: object) -> Any:
    if frame.f_code.co_filename not in (stopping.__file__, signal.__file__):
        return None
    send(INT, TERM)
    return _interrupts


def test_an_interrupt_at_any_line_of_its_door_leaves_no_handler_behind() -> None:
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in HEARD}
    ours = {number: signal.getsignal(number) for number in HEARD}
    traced, outer, inner = sys.gettrace(), Stopping(), Stopping()
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
