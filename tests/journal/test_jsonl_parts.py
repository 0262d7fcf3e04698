"""A journal in several files is one journal: read, cut back and gone on with across them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfstep.errors import Unsafe
from halfstep.journal import jsonl
from halfstep.journal.events import Event
from halfstep.journal.jsonl import (
    JOURNAL,
    LOG,
    JsonLinesListener,
    format_event_line,
    iterate_saved_events,
    read_events,
    read_journal_sizes,
    read_last_time,
    truncate_journal,
)
from halfstep.train.run_folder import _refuse_links
from tests.journal.told import start, step

LARGEST = 1000
EVENTS = [start(notes=["x" * 1500]), *(step(number) for number in range(1, 31))]
"""The first is longer than a file may be, and the others are shorter."""


def written(path: Path, events: list[Event], largest: float = LARGEST) -> list[int]:
    """Write a journal; the size of all of it after each event."""
    found, listener = [], JsonLinesListener(path, largest)
    for event in events:
        listener.on_event(event)
        found.append(read_journal_sizes(path.parent)[JOURNAL])
    listener.close()
    return found


def earlier(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != JOURNAL)


def test_files_are_bounded_and_together_they_are_the_journal(tmp_path: Path) -> None:
    after = written(tmp_path / JOURNAL, EVENTS)
    assert read_events(tmp_path / JOURNAL) == list(iterate_saved_events(tmp_path / JOURNAL)) == EVENTS
    parts = earlier(tmp_path)
    assert len(parts) > 5
    assert [path for path in parts if path.stat().st_size > LARGEST] == parts[:1], "one line alone may be longer"
    whole = b"".join(path.read_bytes() for path in [*parts, tmp_path / JOURNAL])
    assert whole == b"".join(format_event_line(event).encode() for event in EVENTS)
    assert after[-1] == len(whole)
    assert [int(path.name.split(".")[1]) for path in parts] == [0, *(sum_to(parts, n) for n in range(1, len(parts)))]
    for number, size in enumerate(after, start=1):
        assert list(iterate_saved_events(tmp_path / JOURNAL, size)) == EVENTS[number:]


def sum_to(parts: list[Path], number: int) -> int:
    return sum(path.stat().st_size for path in parts[:number])


@pytest.mark.parametrize("kept", [*range(8), 17, 24, 30, 31])
@pytest.mark.parametrize("more", [0, 5])
def test_a_journal_is_cut_back_across_files_and_goes_on(tmp_path: Path, kept: int, more: int) -> None:
    after = [0, *written(tmp_path / JOURNAL, EVENTS)]
    truncate_journal(tmp_path, {JOURNAL: after[kept] + more, LOG: 0})
    assert read_events(tmp_path / JOURNAL) == EVENTS[:kept]
    assert read_journal_sizes(tmp_path)[JOURNAL] == after[kept]
    assert read_last_time(tmp_path / JOURNAL) == (EVENTS[kept - 1]["time"] if kept else 0.0)
    assert written(tmp_path / JOURNAL, EVENTS[kept:]) == after[kept + 1 :]
    assert read_events(tmp_path / JOURNAL) == EVENTS


@pytest.mark.parametrize("kept", [0, 4, 12, 18])
def test_a_launch_killed_while_it_cuts_or_begins_a_file_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    after = [0, *written(tmp_path / JOURNAL, EVENTS)]
    (tmp_path / JOURNAL).rename(tmp_path / f"journal.{after[-1] - (tmp_path / JOURNAL).stat().st_size:015d}.jsonl")
    assert read_events(tmp_path / JOURNAL) == EVENTS, "killed between the rename and the new file"
    renames = iter(range(2))

    def killed(one: Path, other: Path) -> None:
        if next(renames, None) is None:
            raise KeyboardInterrupt
        os.rename(one, other)

    with monkeypatch.context() as patched:
        patched.setattr(jsonl.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            truncate_journal(tmp_path, {JOURNAL: after[kept], LOG: 0})
    read = read_events(tmp_path / JOURNAL)
    assert read == EVENTS[: len(read)]
    assert len(read) >= kept
    truncate_journal(tmp_path, {JOURNAL: after[kept], LOG: 0})
    assert read_events(tmp_path / JOURNAL) == EVENTS[:kept]


def test_files_that_a_user_took_away_move_nothing(tmp_path: Path) -> None:
    after = written(tmp_path / JOURNAL, EVENTS)
    gone, *_ = earlier(tmp_path)
    gone.unlink()
    assert read_events(tmp_path / JOURNAL) == EVENTS[1:]
    truncate_journal(tmp_path, {JOURNAL: after[20], LOG: 0})
    assert read_events(tmp_path / JOURNAL) == EVENTS[1:21]


def test_a_file_that_cannot_be_renamed_is_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(jsonl.os, "replace", refused)
    written(tmp_path / JOURNAL, EVENTS)
    assert read_events(tmp_path / JOURNAL) == EVENTS
    assert earlier(tmp_path) == []


@pytest.mark.wording
def test_a_link_in_place_of_a_part_is_neither_read_nor_cut(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.write_text(format_event_line(step(1)))
    (run / JOURNAL).write_text(format_event_line(step(2)))
    (run / "journal.000000000000000.jsonl").symlink_to(other)
    assert [event["attempt"] for event in read_events(run / JOURNAL)] == [2]
    with pytest.raises(Unsafe, match="a link"):
        _refuse_links(run)
    truncate_journal(run, {})
    assert other.read_text() == format_event_line(step(1))
