"""How far a long job is: a bar on a terminal, and a line now and then in a log."""

from __future__ import annotations

import pytest

from halfstep import terminal as module
from halfstep.terminal import display_progress


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, which stands still until its hand is moved."""
    hand = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: hand[0])
    return hand


def test_a_log_hears_of_a_long_job_now_and_then(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with display_progress("getting ready", "samples") as tell:
        for done in range(0, 4001, 10):
            seconds[0] = done * 0.1
            tell(done, 4000)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"getting ready: {done:,} of 4,000 samples, about {left} min left"
        for done, left in [(600, 6), (1200, 5), (1800, 4), (2400, 3), (3000, 2), (3600, 1)]
    ]


def test_a_short_job_leaves_no_line(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with display_progress("sampling", "steps") as tell:
        seconds[0] = 59.0
        tell(9, 10)
        tell(10, 10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("done", "of", "line"), [(0, 10, ""), (7, 0, "planning: 7 s\n"), (11, 10, "less than a minute left")]
)
def test_what_is_not_known_is_not_said(
    done: int, of: int, line: str, seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with display_progress("planning", "s") as tell:
        seconds[0] = 100.0
        tell(done, of)
    said = capsys.readouterr().err
    assert line in said
    assert bool(said) == bool(line)


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with display_progress("sampling", "steps") as tell:
        tell(3, 10)
    said = capsys.readouterr().err
    assert "sampling" in said
    assert "3/10" in said
