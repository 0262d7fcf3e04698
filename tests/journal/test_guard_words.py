"""What the guard says, on a terminal and in plain lines, and the last words of a run that gave up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from halfstep.journal.console import LiveConsole
from halfstep.journal.events import Event
from halfstep.journal.guide import GuideLog, GuideScreen
from halfstep.journal.latest import LatestEvents
from halfstep.journal.plain import PlainListener
from halfstep.journal.text import describe_ending
from tests.journal.screen import Screen
from tests.journal.told import start, step

SENTENCE = "precision: up3.conv2 (aten.convolution) makes 71,204 in fp16, whose largest number is 65,504"
DO = "halfstep train unet guard=repair"


def said(**changes: Any) -> Event:
    facts: Event = {"event": "guard", "time": 3.0, "kind": "verdict", "level": "warning", "text": SENTENCE, "facts": {}}
    return {**facts, **changes}


def gave_up(**changes: Any) -> Event:
    facts: Event = {
        "event": "end",
        "time": 9.0,
        "reason": "gave_up",
        "metrics": {},
        "best": {"metric": "iou", "value": None, "epoch": None},
        "seconds": 9.0,
        "steps": 7,
        "skipped": {"loss_not_finite": 5},
        "remedies": [],
        "error": f"{SENTENCE}. 5 steps in a row were skipped",
        "checkpoint_note": "the last good checkpoint is step-00000005.0001, of step 5: the run continues from it",
        "do": DO,
    }
    return {**facts, **changes}


def plain(*events: Event) -> list[str]:
    stream = io.StringIO()
    listener = PlainListener(stream, GuideLog())
    for event in events:
        listener.on_event(event)
    return stream.getvalue().splitlines()


def on_screen(width: int, *events: Event) -> list[str]:
    stream = io.StringIO()
    console = LiveConsole(Console(file=stream, force_terminal=True, width=width, color_system=None), GuideScreen())
    for event in events:
        console.on_event(event)
    console.close()
    screen = Screen(width).feed(stream.getvalue())
    assert screen.wrapped == 0
    return screen.lines()


def test_a_verdict_is_a_line_with_its_evidence_below() -> None:
    assert plain(said()) == [f"guard: {SENTENCE}"]
    assert plain(said(text="it was this\n  because of that\n\nand of this")) == [
        "guard: it was this",
        "  because of that",
        "  and of this",
    ]
    assert plain(said(text="")) == ["guard: "]


def test_nothing_in_it_moves_a_cursor() -> None:
    assert plain(said(text="a\x1b[2Jb\x07c")) == [r"guard: a\x1b[2Jb\x07c"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("level", ["info", "warning", "error", "unheard of"])
def test_a_terminal_has_every_word_of_it(width: int, level: str) -> None:
    lines = on_screen(width, start(), step(1), said(level=level), gave_up())
    told = " ".join(" ".join(lines).split())
    assert f"guard: {SENTENCE}" in told
    assert DO in told


@pytest.mark.parametrize(
    "changes", [{}, {"do": None}, {"error": None, "checkpoint_note": None}, {"remedies": ["up3 computes in fp32"]}]
)
def test_the_last_line_is_what_to_type(changes: dict[str, Any]) -> None:
    lines = describe_ending(gave_up(**changes), LatestEvents())
    assert lines[0] == "Gave up after 9 s: 7 steps applied, 5 skipped (loss_not_finite)"
    assert all(line.strip() for line in lines)
    assert (lines[-1].strip() == f"do: {DO}") == (changes.get("do", DO) is not None)
    assert any("remedy of the guard: up3 computes in fp32" in line for line in lines) == ("remedies" in changes)


def test_an_end_without_those_fields_has_no_such_words() -> None:
    older = {
        key: value for key, value in gave_up().items() if key not in ("error", "checkpoint_note", "do", "remedies")
    }
    assert len(describe_ending({**older, "reason": "finished"}, LatestEvents())) == 1


def test_a_long_command_is_not_broken_by_a_narrow_terminal() -> None:
    stream = io.StringIO()
    console = LiveConsole(Console(file=stream, force_terminal=True, width=40, color_system=None), GuideScreen())
    for event in (start(), gave_up(do=f"{DO} {' '.join(f'key{n}=value' for n in range(9))}")):
        console.on_event(event)
    assert f"do: {DO} key0=value key1=value key2=value key3=value" in stream.getvalue()
