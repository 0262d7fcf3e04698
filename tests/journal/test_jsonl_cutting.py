"""Cutting the journal and the log back to where they were when a checkpoint was taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import FolderTaken, StateMismatch
from halfstep.journal.events import FORMAT, Event, Journal
from halfstep.journal.jsonl import (
    JOURNAL,
    LOG,
    check_journal_format,
    format_event_line,
    iterate_saved_events,
    read_events,
    read_journal_sizes,
    read_last_time,
    truncate_journal,
)
from halfstep.journal.listeners import create_listeners
from tests.journal.told import start, step, whole_run


def folder_with(path: Path, journal: bytes, log: bytes) -> Path:
    (path / JOURNAL).write_bytes(journal)
    (path / LOG).write_bytes(log)
    return path


def test_a_folder_without_files_has_sizes_and_stays_empty(tmp_path: Path) -> None:
    assert read_journal_sizes(tmp_path) == {JOURNAL: 0, LOG: 0}
    assert read_journal_sizes(tmp_path / "none") == {JOURNAL: 0, LOG: 0}
    truncate_journal(tmp_path / "none", {JOURNAL: 7, LOG: 0})
    truncate_journal(tmp_path, {JOURNAL: 7, LOG: 0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", range(1, 50, 6))
def test_sizes_at_any_moment_of_a_run_bring_that_moment_back(tmp_path: Path, at: int) -> None:
    journal = Journal(create_listeners(tmp_path, tracker="none", console=None))
    events = whole_run("nan")
    then: dict[str, int] = {}
    before: dict[str, bytes] = {}
    for told, event in enumerate(events, start=1):
        journal.emit(**{name: value for name, value in event.items() if name != "time"})
        if told == at:
            then = read_journal_sizes(tmp_path)
            before = {name: (tmp_path / name).read_bytes() for name in then}
    journal.close()
    assert len(read_events(tmp_path / JOURNAL)) == len(events)
    truncate_journal(tmp_path, then)
    assert {name: (tmp_path / name).read_bytes() for name in then} == before
    assert len(read_events(tmp_path / JOURNAL)) == at


@pytest.mark.parametrize(
    ("size", "left"),
    [(0, b""), (1, b""), (2, b""), (3, b"ab\n"), (4, b"ab\n"), (6, b"ab\ncd\n"), (7, b"ab\ncd\n"), (8, b"ab\ncd\n")],
)
def test_a_size_inside_a_line_moves_back_to_its_beginning(tmp_path: Path, size: int, left: bytes) -> None:
    truncate_journal(folder_with(tmp_path, b"ab\ncd\nef", b"ab\ncd\nef"), {JOURNAL: size, LOG: size})
    assert (tmp_path / JOURNAL).read_bytes() == (tmp_path / LOG).read_bytes() == left


def test_a_shorter_file_loses_a_cut_line_and_no_more(tmp_path: Path) -> None:
    truncate_journal(folder_with(tmp_path, b"ab\ncd", b"ab\n"), {JOURNAL: 10**30, LOG: 10**6})
    assert (tmp_path / JOURNAL).read_bytes() == b"ab\n"
    assert (tmp_path / LOG).read_bytes() == b"ab\n"


def test_zeros_that_a_loss_of_power_left_are_cut_off(tmp_path: Path) -> None:
    line = format_event_line(step(1)).encode()
    truncate_journal(folder_with(tmp_path, line + bytes(100_000), b""), {JOURNAL: len(line) + 90_000, LOG: 0})
    assert (tmp_path / JOURNAL).read_bytes() == line


def test_lines_longer_than_a_block(tmp_path: Path) -> None:
    long = b"x" * 200_000 + b"\n"
    truncate_journal(folder_with(tmp_path, long + long, long), {JOURNAL: 400_001, LOG: 200_000})
    assert (tmp_path / JOURNAL).read_bytes() == long
    assert (tmp_path / LOG).read_bytes() == b""


def test_a_file_without_a_size_was_not_there(tmp_path: Path) -> None:
    truncate_journal(folder_with(tmp_path, b"ab\n", b"cd\n"), {LOG: 3})
    assert read_journal_sizes(tmp_path) == {JOURNAL: 0, LOG: 3}


@pytest.mark.wording
@pytest.mark.parametrize(
    "bad",
    [
        {"../a": 0},
        {"best.safetensors": 0},
        {"": 0},
        {JOURNAL: -1},
        {JOURNAL: True},
        {LOG: 1.0},
        {LOG: "3"},
        {LOG: None},
    ],
)
def test_other_names_and_sizes_are_refused_before_anything_is_cut(tmp_path: Path, bad: dict[str, Any]) -> None:
    (tmp_path / "run").mkdir()
    folder = folder_with(tmp_path / "run", b"ab\n", b"cd\n")
    (tmp_path / "a").write_bytes(b"mine\n")
    with pytest.raises(StateMismatch, match=r"journal\.jsonl and train\.log"):
        truncate_journal(folder, {JOURNAL: 0, **bad})
    assert read_journal_sizes(folder) == {JOURNAL: 3, LOG: 3}
    assert (tmp_path / "a").read_bytes() == b"mine\n"


@pytest.mark.wording
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_file_that_cannot_be_cut_says_what_to_do(tmp_path: Path) -> None:
    (folder_with(tmp_path, b"ab\n", b"") / JOURNAL).chmod(0o444)
    with pytest.raises(FolderTaken, match=r"run\.dir"):
        truncate_journal(tmp_path, {})


@pytest.mark.parametrize(
    ("content", "time"),
    [
        (b"", 0.0),
        (b"\n", 0.0),
        (b'{"event":"note","time":4.5}', 0.0),
        (b'{"event":"note","time":4.5}\n', 4.5),
        (b'{"event":"note","time":4.5}\n{"event":"note","time":7}\n{"event":"no', 7.0),
        (b'{"event":"note","time":4.5,"text":"' + b"x" * 200_000 + b'"}\n', 4.5),
        (b'{"event":"note"}\n', 0.0),
        (b'{"event":"note","time":"NaN"}\n', 0.0),
        (b'{"event":"note","time":"Infinity"}\n', 0.0),
        (b'{"event":"note","time":-3}\n', 0.0),
        (b'{"event":"note","time":null}\n', 0.0),
        (b"[1]\n", 0.0),
    ],
)
def test_the_last_time(tmp_path: Path, content: bytes, time: float) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    assert read_last_time(tmp_path / JOURNAL) == time


def test_without_a_journal_time_begins_at_zero_and_nothing_is_kept(tmp_path: Path) -> None:
    assert read_last_time(tmp_path / JOURNAL) == 0.0
    assert list(iterate_saved_events(tmp_path / JOURNAL)) == []


def test_a_damaged_line_is_passed_over_when_a_run_goes_on(tmp_path: Path) -> None:
    lines = [
        format_event_line(step(1)).encode(),
        b"\x00\xff{\n",
        b"[]\n",
        format_event_line(step(2)).encode(),
        b'{"event"',
    ]
    (tmp_path / JOURNAL).write_bytes(b"".join(lines))
    assert [event["attempt"] for event in iterate_saved_events(tmp_path / JOURNAL)] == [1, 2]


def old_start() -> Event:
    """A start of the first form, which had other names and did not say its form."""
    fields = start()
    return {"repeats": fields.pop("repeated_samples")} | {key: fields[key] for key in fields if key != "format"}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (old_start(), "written in form 1 by an earlier halfstep"),
        (start(format=FORMAT + 1), f"written in form {FORMAT + 1} by a later halfstep"),
    ],
)
def test_a_journal_of_another_form_is_refused(tmp_path: Path, first: Event, said: str) -> None:
    path = tmp_path / JOURNAL
    path.write_text(format_event_line(first) + format_event_line(step(1)))
    for read in (read_events, check_journal_format, lambda path: list(iterate_saved_events(path))):
        with pytest.raises(StateMismatch, match=said):
            read(path)


@pytest.mark.parametrize("form", [FORMAT, 0, "2", None])
def test_a_journal_of_this_form_or_a_damaged_one_is_read(tmp_path: Path, form: Any) -> None:
    path = tmp_path / JOURNAL
    path.write_text(format_event_line(start(format=form)) + format_event_line(step(1)))
    check_journal_format(path)
    assert [event["event"] for event in read_events(path)] == ["start", "step"]
