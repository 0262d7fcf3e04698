"""The console of a notebook: what the two outputs of a cell contain, and how often they are replaced."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from halfstep.journal import notebook
from halfstep.journal.events import Event
from halfstep.journal.notebook import PROGRESS, TABLE, NotebookListener
from tests.journal.told import epoch, note, resumed, speed, start, step, until, whole_run


class Cell:
    """The outputs of a cell, by name, and how often each was shown."""

    def __init__(self) -> None:
        self.html: dict[str, str] = {}
        self.text: dict[str, str] = {}
        self.shown: list[str] = []

    def __call__(self, name: str, html: str, text: str) -> None:
        self.html[name], self.text[name] = html, text
        self.shown.append(name)


def cell_of(events: list[Event], history: list[Event] | None = None) -> Cell:
    cell = Cell()
    listener = NotebookListener(cell)
    for event in history or []:
        listener.restore_event(event)
    assert cell.shown == [], "what was told before is told again"
    for event in events:
        listener.on_event(event)
    listener.close()
    return cell


def test_a_run_is_one_progress_bar_one_table_and_one_curve() -> None:
    cell = cell_of(whole_run())
    assert set(cell.html) == {PROGRESS, TABLE}
    assert cell.html[PROGRESS].count("<progress ") == 1
    assert 'value="1.0000"' in cell.html[PROGRESS]
    assert "<progress" not in cell.html[TABLE]
    assert cell.html[TABLE].count('<svg class="chart"') == 1
    assert cell.html[TABLE].count("<table") == 1
    assert "<figcaption>IoU</figcaption>" in cell.html[TABLE]
    lines = cell.text[PROGRESS].splitlines()
    assert lines[0] == "halfstep train segmentation_tiny: 7.76 M parameters on here"
    assert lines[5] == "Finished after 12 s: best IoU 0.6234 in epoch 2, 40 steps, none skipped"
    assert cell.text[TABLE].count("*") == 2, "the head, and the best row alone"


def test_only_the_best_row_is_marked_and_the_table_grows() -> None:
    events = [start(epochs=3), step(1), epoch(1), epoch(2), epoch(3, val=None, is_best=False)]
    assert cell_of(events[:3]).html[TABLE].count("<tr>") == 2
    cell = cell_of(events)
    assert cell.html[TABLE].count("<tr>") == 4
    assert cell.html[TABLE].count("* best") == 1
    assert [("*" in row) for row in cell.text[TABLE].splitlines()] == [True, False, True, False]


@pytest.mark.parametrize("kind", ["fp16", "nan", "no_val"])
def test_any_run_is_well_formed(kind: str) -> None:
    cell = cell_of(whole_run(kind))
    ElementTree.fromstring(cell.html[PROGRESS])
    assert ("skipped attempt 1: loss_not_finite" in cell.html[TABLE]) == (kind == "nan")
    assert cell.html[TABLE].count("skipped attempt") == (4 if kind == "nan" else 0)


def test_progress_is_replaced_once_a_second_and_the_curve_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    cell, steps = Cell(), 1000
    listener = NotebookListener(cell)
    listener.on_event(start(steps=steps, steps_per_epoch=steps))
    for attempt in range(1, steps + 1):
        now[0] += 0.01
        listener.on_event(step(attempt, step_in_epoch=attempt))
    assert 8 <= cell.shown.count(PROGRESS) <= 12
    assert cell.shown.count(TABLE) == 0
    assert f"step {steps - 99:,} of 1,000" in cell.text[PROGRESS] or "of 1,000" in cell.text[PROGRESS]
    listener.on_event(epoch(1))
    assert cell.shown.count(TABLE) == 1


def test_a_resumed_run_has_the_rows_of_its_earlier_launches() -> None:
    events = whole_run()
    at = until(events, 25)
    cell = cell_of([start(resumed=resumed(25)), *events[at:]], events[:at])
    assert [row.split()[0] for row in cell.text[TABLE].splitlines()] == ["epoch", "1/2", "2/2"]


def test_warnings_are_below_the_table_and_before_the_first_epoch_alone() -> None:
    warning = note("no checkpoint of step 1: <no space>", "warning")
    before = cell_of([start(), step(1), warning])
    assert before.html[TABLE].count("&lt;no space&gt;") == 1
    after = cell_of([start(), step(1), warning, epoch()])
    assert after.html[TABLE].count("&lt;no space&gt;") == 1
    assert "<no space>" not in after.html[TABLE]


def test_a_long_run_shows_its_last_rows_and_the_best_one() -> None:
    rows = [epoch(n, epochs=500, is_best=n <= 5, val={"loss": 1.0, "iou": 0.5}) for n in range(1, 501)]
    cell = cell_of([start(epochs=500), step(1), *rows])
    assert cell.html[TABLE].count("<tr>") == 1 + 1 + notebook.MOST_ROWS
    assert ">5/500<" in cell.html[TABLE].replace("<b>", "").replace("</b>", "")


def test_numbers_that_are_not_finite_are_no_error() -> None:
    bad = {"loss": math.nan, "iou": math.inf}
    cell = cell_of([start(), step(1, loss=math.nan), speed(), epoch(train=bad, val=bad, is_best=False)])
    assert "NaN" in cell.text[TABLE]
