"""Ctrl-C at five moments: a sign within a second, the exit code of the table, and the same command goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.journeys.desk import Desk, crowding
from tests.journeys.terminal import Terminal

pytestmark = pytest.mark.full

RUN = "runs/segmentation_tiny"
TINY = ("train", "segmentation_tiny", "--fp32", "--pictures", "0")
ACKNOWLEDGED = r"stopping|stopped|interrupted"
STOPPED, AT_ONCE = 75, 130

Moment = Callable[[Desk, Terminal], bool]


def started(desk: Desk, terminal: Terminal) -> bool:
    return bool(terminal.text)


def training(desk: Desk, terminal: Terminal) -> bool:
    return bool(desk.events(RUN, "start"))


def evaluating(desk: Desk, terminal: Terminal) -> bool:
    return bool(desk.events(RUN, "evaluating"))


def saving(desk: Desk, terminal: Terminal) -> bool:
    return any((desk.folder / RUN / "checkpoints").glob("*.tmp"))


LONG_EVALUATION = ("--samples", "1500", "--val", "0.95", "--steps", "4", "--size", "64", "--crop", "64")
LARGE_MODEL = ("--width", "48", "--depth", "4", "--samples", "16", "--steps", "8", "--every_steps", "2")
MOMENTS = {
    "start-up": (("--steps", "12"), started),
    "first step": (("--steps", "12"), training),
    "evaluation": (LONG_EVALUATION, evaluating),
    "save": ((*LARGE_MODEL, "--batch_size", "2"), saving),
}


def interrupt(terminal: Terminal) -> float:
    """Presses Ctrl-C, and returns after how many seconds something was said about it."""
    terminal.press_ctrl_c()
    return terminal.wait_for(ACKNOWLEDGED, 30)


@pytest.mark.parametrize("name", MOMENTS)
def test_ctrl_c_is_acknowledged_and_the_run_goes_on(desk: Desk, name: str) -> None:
    settings, moment = MOMENTS[name]
    with desk.type(*TINY, *settings) as terminal:
        terminal.wait_until(lambda: moment(desk, terminal), 60, name)
        sign = interrupt(terminal)
        code = terminal.finish(60)
    print(f"{name}: acknowledged after {sign:.2f} s, ended with {code}")
    assert sign <= 1.0 * crowding()
    assert code in {STOPPED, AT_ONCE} if name == "start-up" else code == STOPPED
    assert "Traceback" not in terminal.text
    again = desk.run(*TINY, *settings)
    assert len({event["attempt"] for event in desk.events(RUN, "step")}) == int(settings[settings.index("--steps") + 1])
    if code == STOPPED and name != "start-up":
        assert again.shows(r"resumed at step"), again.text


def test_a_slow_step_is_left_at_the_second_press(desk: Desk) -> None:
    slow = ("--size", "256", "--crop", "256", "--width", "32", "--batch_size", "8", "--samples", "20", "--steps", "3")
    with desk.type(*TINY, *slow) as terminal:
        terminal.wait_until(lambda: training(desk, terminal), 60, "training")
        time.sleep(0.5)
        sign = interrupt(terminal)
        assert terminal.shows(r"again to stop now"), terminal.text
        terminal.press_ctrl_c()
        pressed = time.monotonic()
        code = terminal.finish(30)
    left = time.monotonic() - pressed
    print(f"slow step: acknowledged after {sign:.2f} s, left {left:.2f} s after the second press with {code}")
    assert (sign <= 1.0 * crowding(), left <= 5.0 * crowding(), code) == (True, True, AT_ONCE)
    assert not desk.events(RUN, "step")
    assert "Traceback" not in terminal.text


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_ctrl_c_anywhere_in_start_up(desk: Desk, seconds: float) -> None:
    with desk.type(*TINY, "--steps", "40") as terminal:
        terminal.wait_until(lambda: bool(terminal.text), 30, "the first line")
        until = time.monotonic() + seconds
        terminal.wait_until(lambda: time.monotonic() > until, seconds + 1, "waiting")
        sign = interrupt(terminal)
        code = terminal.finish(60)
    print(f"{seconds} s after the first line: acknowledged after {sign:.2f} s, ended with {code}")
    assert sign <= 1.0 * crowding()
    assert code in {STOPPED, AT_ONCE}
    assert "Traceback" not in terminal.text
