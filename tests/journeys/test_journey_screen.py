"""The reader of the screen itself: what it shows is what a terminal would show."""

from __future__ import annotations

import pytest

from tests.journeys.screen import Screen
from tests.journeys.snippet import printed_python


def shown(data: bytes, pieces: int = 1) -> Screen:
    screen = Screen(columns=10, lines=3)
    for start in range(0, len(data), max(1, len(data) // pieces)):
        screen.feed(data[start : start + max(1, len(data) // pieces)])
    return screen


@pytest.mark.parametrize("pieces", [1, 1000])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\r\ntwo", "one\ntwo"),
        (b"50 %\r100 %", "100 %"),
        (b"a\r\nb\r\nc\r\nd", "a\nb\nc\nd"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"one\r\ntwo\x1b[1A\r\x1b[2Knew", "new\ntwo"),
        (b"abcdefghijkl", "abcdefghij\nkl"),
        (b"\x1b]0;a title\x07plain", "plain"),
        ("漢字 é".encode(), "漢字 é"),
        (b"a\x1b[2Jb", " b"),
    ],
)
def test_the_text_of_the_screen(data: bytes, text: str, pieces: int) -> None:
    assert shown(data, pieces).text() == text


def test_what_a_person_would_not_see_is_kept_apart() -> None:
    assert shown(b"\x1b]0;a title\x07plain").system_commands == ["\x1b]0;a title\x07"]
    assert shown(b"abcdefghijkl").broken_lines == ["abcdefghij"]
    assert shown(b"\x1b[1mbold").system_commands == []


def test_python_is_taken_from_between_sentences() -> None:
    screen = "written: a.onnx\n\n  import numpy\n  x = numpy.sum(\n      [1, 2]\n  )\n\nnext: halfstep predict runs/a\n"
    assert printed_python(screen) == "import numpy\nx = numpy.sum(\n    [1, 2]\n)"
