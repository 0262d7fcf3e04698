"""The journal on disk: strict, whole, and readable after anything."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.errors import BadData, FolderTaken
from halfstep.journal import jsonl
from halfstep.journal.events import Event, Journal
from halfstep.journal.jsonl import JsonLinesListener, format_event_line, read_events
from tests.journal.told import step, whole_run
from tests.support.room import files_of_at_most


def test_every_line_has_the_date_and_the_time_of_day(tmp_path: Path) -> None:
    journal = Journal([JsonLinesListener(tmp_path / "journal.jsonl")])
    before = datetime.now(UTC)
    journal.note("now", "info")
    journal.close()
    [event] = read_events(tmp_path / "journal.jsonl")
    said = datetime.fromisoformat(event["utc"])
    assert before - timedelta(milliseconds=1) <= said <= datetime.now(UTC)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def written(path: Path, events: list[Event]) -> Path:
    lines = JsonLinesListener(path)
    for event in events:
        lines.on_event(event)
    lines.close()
    return path


@pytest.mark.parametrize("kind", ["bf16", "fp16", "nan", "no_val"])
def test_every_line_is_strict_json_and_nothing_is_lost(tmp_path: Path, kind: str) -> None:
    events = whole_run(kind)
    path = written(tmp_path / "runs" / "journal.jsonl", events)
    strict = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert strict == read_events(path)
    assert [e["event"] for e in strict] == [e["event"] for e in events]
    assert [e.get("attempt") for e in strict] == [e.get("attempt") for e in events]


def test_numbers_that_json_lacks_are_words_that_float_reads() -> None:
    event = step(loss=math.nan, lr=-math.inf, extra={"deep": [math.inf, 1.5]})
    read = json.loads(format_event_line(event), parse_constant=refuse)
    assert (read["loss"], read["lr"], read["extra"]) == ("NaN", "-Infinity", {"deep": ["Infinity", 1.5]})
    assert math.isnan(float(read["loss"]))
    assert float(read["lr"]) == -math.inf


def test_numbers_of_other_libraries_and_paths_are_written() -> None:
    event = step(loss=torch.tensor(2.5), lr=np.float32(math.nan), file=Path("a/b"), ids=torch.ones(3))
    read = json.loads(format_event_line(event), parse_constant=refuse)
    assert (read["loss"], read["lr"], read["file"]) == (2.5, "NaN", "a/b")


def test_text_cannot_break_a_line() -> None:
    line = format_event_line({"event": "note", "text": "a\nb\x1b[31m\ud800"})
    assert line.count("\n") == 1
    assert b"\n" not in line.encode("utf-8", "replace")[:-1]


def test_each_event_is_on_disk_before_the_next(tmp_path: Path) -> None:
    lines = JsonLinesListener(tmp_path / "journal.jsonl")
    for attempt in range(1, 4):
        lines.on_event(step(attempt))
        assert len(read_events(tmp_path / "journal.jsonl")) == attempt
    lines.close()


def test_a_killed_run_loses_nothing_that_it_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from halfstep.journal.jsonl import JsonLinesListener\n"
        "lines = JsonLinesListener(Path(sys.argv[1]))\n"
        "for n in range(500): lines.on_event({'event': 'step', 'attempt': n})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=60)
    assert result.returncode == -9
    assert [e["attempt"] for e in read_events(path)] == list(range(500))


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_cut_last_line_is_left_out_and_removed_by_the_next_run(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "journal.jsonl", [step(1), step(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [e["attempt"] for e in read_events(path)] == [1]
    written(path, [step(3)])
    assert [e["attempt"] for e in read_events(path)] == [1, 3]


def test_a_file_that_is_one_long_cut_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 200_000)
    assert read_events(path) == []
    written(path, [step(1)])
    assert [e["attempt"] for e in read_events(path)] == [1]


@pytest.mark.wording
def test_empty_and_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_events(tmp_path / "empty") == []
    with pytest.raises(BadData, match="cannot read"):
        read_events(tmp_path / "missing")


@pytest.mark.wording
@pytest.mark.parametrize("line", ["{not json}", "[1, 2]", '{"no": "event"}', "[" * 100_000])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(format_event_line(step(1)) + line + "\n" + format_event_line(step(2)))
    with pytest.raises(BadData, match="line 2"):
        read_events(path)


@pytest.mark.wording
def test_a_folder_that_is_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(FolderTaken, match=r"run\.dir"):
        JsonLinesListener(tmp_path / "taken" / "journal.jsonl")


class EventList:
    def __init__(self, fails_at: int = -1) -> None:
        self.events: list[Event] = []
        self.fails_at, self.closed = fails_at, 0

    def on_event(self, event: Event) -> None:
        if len(self.events) == self.fails_at:
            raise OSError(28, "No space left on device")
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def test_a_listener_that_fails_is_left_out_and_the_others_are_told() -> None:
    well, ill = EventList(), EventList(fails_at=1)
    journal = Journal([ill, well])
    for attempt in range(3):
        journal.emit("step", attempt=attempt)
    journal.close()
    assert [e["event"] for e in ill.events] == ["step"]
    assert [e["event"] for e in well.events] == ["step", "note", "step", "step"]
    assert "No space left" in well.events[1]["text"]
    assert (ill.closed, well.closed) == (1, 1)


def test_a_disk_that_fills_up_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no device that is always full")
    well = EventList()
    journal = Journal([JsonLinesListener(Path("/dev/full")), well])
    journal.emit("step", attempt=1)
    journal.emit("step", attempt=2)
    assert [e.get("attempt") for e in well.events] == [1, 2]
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "told at every event"
    assert "/dev/full cannot be written: No space left on device" in said
    journal.close()
    assert "/dev/full ends without its last 2 lines" in capsys.readouterr().err


@pytest.mark.parametrize("room", [0, 1, 10])
def test_lines_wait_for_a_disk_that_gets_room_again(
    tmp_path: Path, room: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal([JsonLinesListener(path)])
    journal.emit("step", attempt=1)
    before = path.read_bytes()
    with files_of_at_most(len(before) + room):
        for attempt in (2, 3, 4):
            journal.emit("step", attempt=attempt)
            assert path.read_bytes() == before, "half a line is left"
    journal.emit("step", attempt=5)
    assert [e["attempt"] for e in read_events(path)] == [1, 2, 3, 4, 5]
    journal.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{path} cannot be written: File too large" in said


def test_half_a_line_that_cannot_be_removed_is_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = JsonLinesListener(path)
    lines._file.close()

    class Kept(io.FileIO):
        def truncate(self, size: int | None = None) -> int:
            raise OSError(errno.EPERM, "Operation not permitted")

    lines._file = Kept(path, "ab")
    with files_of_at_most(10):
        lines.on_event(step(1))
        lines.on_event(step(2))
        assert path.stat().st_size == 10
    lines.close()
    assert [e["attempt"] for e in read_events(path)] == [1, 2]


def test_what_waits_is_bounded_and_a_hole_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_WAITING", 5)
    path = tmp_path / "journal.jsonl"
    lines = JsonLinesListener(path)
    with files_of_at_most(0):
        for attempt in range(1, 101):
            lines.on_event(step(attempt))
            assert len(lines._waiting) <= 6
    lines.on_event(step(101))
    lines.close()
    events = read_events(path)
    assert [e.get("attempt") for e in events] == [1, None, 98, 99, 100, 101]
    assert "no room for 96 lines" in events[1]["text"]


def test_an_interruption_passes_through() -> None:
    class Interrupted(EventList):
        def on_event(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Journal([Interrupted()]).emit("step")
