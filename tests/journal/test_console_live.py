"""The live console, as a terminal shows it."""

from __future__ import annotations

import io
import math
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from halfstep.journal.bars import draw_bars
from halfstep.journal.console import REFRESHES_A_SECOND, LiveConsole
from halfstep.journal.events import Event
from halfstep.journal.guide import GuideScreen
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import GUIDE, ConsoleStyle, RunClocks
from halfstep.journal.listeners import create_console_listener
from halfstep.journal.plain import PlainListener
from halfstep.journal.table import TableConsole
from halfstep.status_line import clear_status_line, show_status
from halfstep.terminal import create_console, display_progress
from tests.journal.screen import Screen
from tests.journal.told import speed, start, step, whole_run

KINDS = ["bf16", "fp16", "nan", "no_val"]


def terminal(width: int = 80, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    return Console(file=stream, force_terminal=True, width=width, height=24, legacy_windows=False), raw


def seen(raw: io.BytesIO, width: int) -> Screen:
    return Screen(width).feed(raw.getvalue().decode())


def heard(events: list[Event]) -> LatestEvents:
    latest = LatestEvents()
    for event in events:
        latest.on_event(event)
    return latest


COPIED = [f"halfstep {word} runs/segmentation_tiny" for word in ("report", "evaluate", "predict", "export")]
COPIED = ["saved in   runs/segmentation_tiny", *(f"  {line}" for line in COPIED)]
COPIED[3] += " FOLDER"
"""The lines of the table's console that are never broken, because they are copied."""


def after_a_run(kind: str, width: int, style: ConsoleStyle, wrapped: int = 0) -> str:
    """What is left on the terminal, which broke so many lines."""
    console, raw = terminal(width)
    live = LiveConsole(console, style)
    for event in whole_run(kind):
        live.on_event(event)
        if event["event"] == "speed":
            live._live.refresh()
    live.close()
    screen = seen(raw, width)
    assert screen.wrapped == wrapped
    assert not screen.cursor_hidden
    return "\n".join(screen.lines())


@pytest.mark.parametrize("width", [40, 80, 120, 140])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_run_a_table_is_left(kind: str, width: int) -> None:
    wrapped = sum((len(line) - 1) // width for line in COPIED)
    text = after_a_run(kind, width, TableConsole(is_live=True), wrapped)
    assert all(line in text for line in COPIED) or wrapped
    assert "━" not in text
    rows = [line for line in text.splitlines() if line.startswith(("   1/2 ", "   2/2 "))]
    assert len(rows) == 2
    assert all(("0.6234 *" if kind != "no_val" else "0.6543 *") in row for row in rows)
    assert text.index("   2/2 ") < text.index("Finished after 12 s")
    assert text.count("skipped attempt") == (4 if kind == "nan" else 0)


@pytest.mark.parametrize("width", [40, 80, 120, 140])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_run_the_page_is_clean(kind: str, width: int) -> None:
    text = after_a_run(kind, width, GuideScreen())
    assert "[Train]" not in text
    assert text.count("Summary:") == 2
    assert text.index("Epoch 2 Summary:") < text.index("Finished after 12 s")
    assert ("Val IoU" in text) == (kind != "no_val")
    assert text.count("skipped attempt") == (10 if kind == "nan" else 0)


def test_while_it_runs_bars_and_numbers_are_at_the_bottom() -> None:
    console, raw = terminal(140)
    live = LiveConsole(console, GuideScreen())
    for event in whole_run("fp16")[:15]:
        live.on_event(event)
    live._live.refresh()
    screen = seen(raw, 140)
    live.close()
    epoch, run, numbers = screen.lines()[-3:]
    assert epoch.startswith(" Epoch 1/2 [Train]  ━")
    assert epoch.endswith("mp: 🚀 fp16, 97 % observed")
    assert run.startswith(" Run                ━")
    assert "12/40" in run
    assert numbers.startswith(" loss 0.5833 · IoU 0.6543 · lr 8.33e-5 · scale 8192 · 2 skipped (gradient_overflow)")
    assert screen.cursor_hidden


@pytest.mark.parametrize("width", [1, 7, 20, 40, 79, 80, 81, 120, 300])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_area_fits_any_width(width: int, encoding: str) -> None:
    gpu = {"utilisation": 0.93, "memory_utilisation": 0.4, "power_watts": 211.3, "temperature": 64.0}
    reasons = [step(n, f"guard:a_long_name_{n}", loss_scale=2.0) for n in range(1, 12)]
    lines = draw_bars(heard([start(), *reasons, speed(gpu=gpu)]), RunClocks(1e6, 30.0, 1e7), width, encoding)
    assert all(line.cell_len <= width for line in lines)
    assert encoding == "utf-8" or all(line.plain.replace("…", "").isascii() for line in lines)


def test_numbers_share_as_few_lines_as_hold_them() -> None:
    latest = heard([start(), step(12), speed()])
    clocks = RunClocks(3.0, 3.0, 95.0)
    assert [len(draw_bars(latest, clocks, width, "utf-8")) for width in (40, 80, 140)] == [4, 3, 3]


def test_the_bars_are_as_long_as_the_work_that_is_done() -> None:
    for attempt, share in ((1, 0.05), (10, 0.5), (20, 1.0)):
        text = draw_bars(heard([start(), step(attempt)]), RunClocks(0.0, 0.0, 0.0), 120, "utf-8")[0].plain
        full, rest = text.count("━"), text.count("─")
        assert full == int((full + rest) * share)


def test_more_steps_than_were_planned_fill_the_bar_and_no_more() -> None:
    lines = draw_bars(heard([start(steps=3, steps_per_epoch=3), step(9)]), RunClocks(1.0, 1.0, 0.0), 80, "utf-8")
    assert all(line.cell_len <= 80 for line in lines)
    assert "─" not in lines[1].plain


def test_an_evaluation_has_the_bar_until_the_next_step() -> None:
    evaluating = {"event": "evaluating", "time": 6.5, "epoch": 1, "done": 3, "total": 4}
    clocks = RunClocks(7.0, 7.0, 10.0)
    first = draw_bars(heard([start(), step(20), evaluating]), clocks, 120, "utf-8")[0].plain
    assert first.startswith(" Epoch 1/2 [Val]  ━")
    assert "3/4  00:07<--:--" in first
    then = draw_bars(heard([start(), step(20), evaluating, step(21, time=7.0)]), clocks, 120, "utf-8")[0].plain
    assert then.startswith(" Epoch 2/2 [Train]  ━")


def test_without_a_step_it_says_what_it_waits_for() -> None:
    lines = draw_bars(LatestEvents(), RunClocks(0.0, 0.0, 0.0), 80, "utf-8")
    assert [line.plain for line in lines] == [" preparing the first step  00:00"]
    stage = {"event": "stage", "time": 0.1, "text": "reading the first 16 samples"}
    lines = draw_bars(heard([start(), stage]), RunClocks(9.0, 9.0, math.nan, stage=8.0), 80, "utf-8")
    assert [line.plain for line in lines] == [" reading the first 16 samples  00:08"]
    assert len(draw_bars(heard([start(), stage, step(1)]), RunClocks(9.0, 9.0, math.nan), 80, "utf-8")) == 3


def test_what_is_left_is_marked_as_rough_until_an_evaluation_was_timed() -> None:
    clocks = RunClocks(3.0, 3.0, 95.0, 20.0, is_rough=True)
    epoch, run = (line.plain for line in draw_bars(heard([start(), step(12)]), clocks, 120, "utf-8")[:2])
    assert "12/20  00:03<00:20" in epoch
    assert "12/40  00:03<~01:35" in run


def test_a_step_is_heard_in_little_time_and_drawn_seldom() -> None:
    console, raw = terminal(120)
    live = LiveConsole(console, GuideScreen())
    live.on_event(start(steps=10**6, steps_per_epoch=10**5))
    events = [step(n, step_in_epoch=n) for n in range(1, 5001)]
    drawn = raw.tell()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for event in events:
            live.on_event(event)
        times.append((time.perf_counter() - began) / len(events))
    written = raw.tell() - drawn
    live.close()
    assert min(times) < 50e-6
    assert REFRESHES_A_SECOND <= 8
    assert written < 2000 * (1 + REFRESHES_A_SECOND * sum(times) * len(events) + 2)


def test_prints_of_others_go_above_the_area(capsys: pytest.CaptureFixture[str]) -> None:
    console, raw = terminal()
    live = LiveConsole(console, GuideScreen())
    live.on_event(start())
    live.on_event(step(1))
    print("a word of another library")
    live._live.refresh()
    lines = seen(raw, 80).lines()
    live.close()
    assert lines.index("a word of another library") < next(n for n, line in enumerate(lines) if "[Train]" in line)
    assert lines[-3].startswith(" Epoch 1/2 [Train]")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_worker_has_the_streams_back() -> None:
    live = LiveConsole(terminal()[0], GuideScreen())
    before = sys.stdout
    live.on_event(start())
    assert sys.stdout is not before
    child = os.fork()
    if child == 0:
        os._exit(0 if sys.stdout is before else 1)
    status = os.waitpid(child, 0)[1]
    live.close()
    assert status == 0
    assert sys.stdout is before


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_an_interruption_gives_the_cursor_back() -> None:
    import pty
    import subprocess

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "tests.journal.told", '{"kind": "fp16"}']
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=root) as process:
        os.close(theirs)
        text, asked = b"", False
        while select.select([ours], [], [], 30)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            text += part
            if not asked and text.count(b"[Train]") >= 2:
                asked = True
                assert Screen(80).feed(text.decode(errors="ignore").replace("\r\n", "\n")).cursor_hidden
                process.send_signal(signal.SIGINT)
            if not part:
                break
        os.close(ours)
    assert asked, text.decode(errors="replace")
    assert text.rfind(b"\x1b[?25h") > text.rfind(b"\x1b[?25l") > 0


def test_where_there_is_no_terminal_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(create_console_listener(Console(file=io.StringIO())), PlainListener)
    assert isinstance(create_console_listener(terminal()[0]), LiveConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(create_console_listener(Console(file=io.StringIO(), force_terminal=True)), PlainListener)


@pytest.mark.parametrize(
    ("name", "value"), [("JPY_PARENT_PID", "1"), ("MPLBACKEND", "module://matplotlib_inline.backend_inline")]
)
def test_a_command_of_a_notebook_cell_draws_nothing_over_its_lines(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as pseudo_terminal:
        for one in ("JPY_PARENT_PID", "MPLBACKEND"):
            monkeypatch.delenv(one, raising=False)
        monkeypatch.setenv("TERM", "xterm-color")
        monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel sets them
        monkeypatch.setattr(sys, "stderr", pseudo_terminal)
        assert isinstance(create_console_listener(create_console(file=pseudo_terminal)), LiveConsole)
        monkeypatch.setenv(name, value)
        assert isinstance(create_console_listener(create_console(file=pseudo_terminal)), PlainListener)
        show_status("reading the recipe")
        with display_progress("getting ready", "samples") as on_progress:
            on_progress(1, 2)
        clear_status_line()
    assert os.read(ours, 1000) == b"reading the recipe\r\n"
    os.close(ours)


def test_in_a_notebook_lines_are_plain() -> None:
    stream = io.StringIO()
    listener = create_console_listener(Console(file=stream, force_jupyter=True, force_terminal=True))
    guided = create_console_listener(Console(file=io.StringIO(), force_jupyter=True), GUIDE)
    assert isinstance(guided, PlainListener)
    for event in whole_run():
        listener.on_event(event)
    listener.close()
    assert "0.2345    0.2567    0.6234 *" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
