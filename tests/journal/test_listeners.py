"""The set of listeners that a run gets, and the curves that are drawn on the way."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from halfstep.journal import curves
from halfstep.journal.curves import CurvesListener
from halfstep.journal.events import Event, Journal
from halfstep.journal.jsonl import JOURNAL, LOG, read_events
from halfstep.journal.lines import GUIDE
from halfstep.journal.listeners import create_listeners
from tests.journal.told import epoch, start, step, whole_run


def tell(journal: Journal, events: list[Event]) -> None:
    for event in events:
        journal.emit(**{name: value for name, value in event.items() if name != "time"})


@pytest.mark.usefixtures("drawn_curves")
@pytest.mark.parametrize("kind", ["bf16", "nan"])
def test_a_run_leaves_its_journal_its_log_and_its_curves(tmp_path: Path, kind: str) -> None:
    screen = io.StringIO()
    guided = create_listeners(tmp_path / "run", tracker="none", console=Console(file=screen), style=GUIDE)
    journal = Journal(guided)
    tell(journal, whole_run(kind))
    assert len(journal.listeners) == 4, "a listener was left out"
    journal.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["curves.svg", JOURNAL, LOG]
    assert len(read_events(tmp_path / "run" / JOURNAL)) == len(whole_run(kind))
    assert (tmp_path / "run" / LOG).read_text() == screen.getvalue()
    assert (tmp_path / "run" / "curves.svg").read_text().startswith("<svg ")


def test_the_log_has_the_details_that_the_table_leaves_out(tmp_path: Path) -> None:
    screen = io.StringIO()
    journal = Journal(create_listeners(tmp_path / "run", tracker="none", console=Console(file=screen)))
    tell(journal, whole_run())
    journal.close()
    log = (tmp_path / "run" / LOG).read_text()
    for detail in ("num_workers: auto took 2", "Train IoU:  0.6543", "lr: 3e-4", "✓ observed"):
        assert detail in log
        assert detail not in screen.getvalue()


def test_a_quiet_run_has_no_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(create_listeners(tmp_path, tracker="none", console=None))
    tell(journal, whole_run())
    journal.close()
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / LOG).exists()


def test_a_run_that_was_interrupted_before_its_first_epoch_leaves_what_it_told(tmp_path: Path) -> None:
    journal = Journal(create_listeners(tmp_path, tracker="none", console=None))
    tell(journal, [start(), step(1)])
    journal.close()
    assert [e["event"] for e in read_events(tmp_path / JOURNAL)] == ["start", "step"]


class Unreachable:
    """A tracker whose server cannot be reached, as it finds out when the last messages are sent."""

    def on_event(self, event: Event) -> None:
        """Queue nothing."""

    def close(self) -> None:
        raise RuntimeError("http://127.0.0.1:9 cannot be reached")


def test_a_tracker_that_fails_at_the_end_is_reported_by_all_others(tmp_path: Path) -> None:
    screen = io.StringIO()
    kept = create_listeners(tmp_path, tracker="none", console=Console(file=screen))
    journal = Journal([*kept[:-1], Unreachable(), kept[-1]])
    tell(journal, whole_run())
    journal.close()
    reported = "Unreachable stopped: http://127.0.0.1:9 cannot be reached"
    assert screen.getvalue().count(reported) == (tmp_path / LOG).read_text().count(reported) == 1
    assert read_events(tmp_path / JOURNAL)[-1]["text"] == reported
    assert journal.listeners == []


class Drawings:
    """Counts instead of drawing; each drawing takes as long as it is told to, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.count, self._seconds = 1000.0, 0, seconds
        monkeypatch.setattr("halfstep.draw.curves.draw_curves", self._draw)
        monkeypatch.setattr(curves.time, "monotonic", lambda: self.now)

    def _draw(self, *_: object) -> None:
        self.count += 1
        self.now += self._seconds


@pytest.mark.usefixtures("drawn_curves")
@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 10.0), (0.5, 50.0)])
def test_drawing_is_seldom_and_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, pause: float
) -> None:
    drawings = Drawings(monkeypatch, seconds)
    listener = CurvesListener(tmp_path)
    listener.on_event(epoch(1))
    assert drawings.count == 1
    drawings.now += pause - 0.1
    listener.on_event(epoch(2))
    assert drawings.count == 1
    drawings.now += 0.2
    listener.on_event(epoch(3))
    assert drawings.count == 2
    listener.on_event(epoch(4))
    listener.close()
    assert drawings.count == 3, "the last epoch is missing in the picture"
    listener.close()
    assert drawings.count == 3
