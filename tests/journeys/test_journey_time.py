"""How long a person waits: for a line, for a step, for something to look at."""

from __future__ import annotations

import time

import pytest

from tests.journeys.desk import Desk, crowding
from tests.journeys.terminal import Terminal

pytestmark = pytest.mark.full

RUN = "runs/segmentation_tiny"
COUNTED = 3_000_000
ON_AN_IDLE_CORE = 0.15
"""CPU seconds that `slowness` takes on the machine that the bounds were written for."""


def slowness() -> float:
    """How much slower a core counts here and now, 1 at least: neighbors share its caches and its clock."""
    began, total = time.process_time(), 0
    for number in range(COUNTED):
        total += number
    return max(1.0, (time.process_time() - began) / ON_AN_IDLE_CORE)


def test_the_first_minute(desk: Desk) -> None:
    slow = slowness()
    with desk.type("train", "segmentation_tiny") as terminal:
        first_step = moment(terminal, lambda: bool(desk.events(RUN, "step")), "the first step")
        first_result = moment(terminal, lambda: bool(desk.events(RUN, "epoch")), "the first result")
        assert terminal.finish(100) == 0
        end = terminal.seconds
    assert terminal.first_line is not None
    for what, (wall, cpu) in zip(
        ("line", "step", "result"), (terminal.first_line, first_step, first_result), strict=True
    ):
        print(f"first {what}: {cpu:.2f} s of CPU, {wall:.2f} s of wall time")
    print(f"whole run: {end:.1f} s of wall time; slowness {slow:.2f}, crowding {crowding():.2f}")
    assert terminal.first_line[1] <= 0.5 * slow
    assert terminal.first_line[0] <= 1.0 * slow * crowding()
    assert first_step[1] <= 6.0 * slow


def moment(terminal: Terminal, true: object, what: str) -> tuple[float, float]:
    terminal.wait_until(true, 60, what)  # type: ignore[arg-type]
    return terminal.seconds, terminal.cpu_seconds()
