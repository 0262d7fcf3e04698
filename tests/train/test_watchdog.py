"""The thread that judges a run, the one that writes for it, and ranks of other hosts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep import distributed
from halfstep.files import write_json
from halfstep.peers import Peers
from halfstep.recipe.schema import WorldOptions
from halfstep.train import watchdog
from halfstep.train.status import Launch, RankStatus, name_status_file
from halfstep.train.watchdog import AWAY, ENDING, SILENT, Watchdog

QUICK = WorldOptions(timeout=0.4, start_timeout=0.4)


def test_a_disk_that_does_not_answer_does_not_keep_a_hung_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a single call that touches the run's folder comes back."""
    answers, codes, ended = threading.Event(), list[int](), threading.Event()
    status = RankStatus(tmp_path, Launch("token"))

    def hangs(*given: Any, **more: Any) -> None:
        answers.wait(60.0)

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    for where, name in ((RankStatus, "running"), (watchdog, "write_stacks"), (Path, "exists"), (Path, "is_dir")):
        monkeypatch.setattr(where, name, hangs)
    monkeypatch.setattr(watchdog, "REPORT", 0.2)
    monkeypatch.setattr(watchdog, "JOIN", 0.1)
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    began = time.monotonic()
    with Watchdog(status, QUICK, on_hang=lambda reason: None):
        assert ended.wait(20.0)
    assert codes == [76]
    assert time.monotonic() - began < 20.0
    assert "no progress for" in capfd.readouterr().err
    answers.set()


def test_what_the_disk_takes_is_told_with_the_stacks(tmp_path: Path) -> None:
    told, ended = list[str](), threading.Event()

    def on_hang(reason: str) -> None:
        told.append(reason)
        ended.set()

    with Watchdog(RankStatus(tmp_path, Launch("token")), QUICK, on_hang=on_hang):
        assert ended.wait(20.0)
    assert told[0].startswith("no progress for")
    assert "test_what_the_disk_takes" in (tmp_path / "stacks" / "rank-00000.txt").read_text()


# -- ranks of other hosts -------------------------------------------------------------------------------------------


class Away:
    """A rank that watches others of another host, with the time in between given by a test."""

    def __init__(self, folder: Path, ranks: tuple[int, ...] = (1,)) -> None:
        self.folder, self.peers = folder, Peers([], ranks)
        self.watchdog = Watchdog(RankStatus(folder, Launch("token")), WorldOptions(), peers=self.peers)

    def writes(self, rank: int = 1, **status: Any) -> None:
        write_json(self.folder / name_status_file(rank), {"launch": "token", "state": "running", **status})

    def looks(self, seconds: float) -> None:
        self.watchdog._look_away(seconds)

    @property
    def lost(self) -> list[int]:
        return list(self.peers.gone())


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Away:
    monkeypatch.setattr(distributed, "is_waiting", lambda: True)
    return Away(tmp_path)


def test_a_rank_whose_heartbeat_stands_still_is_lost(away: Away) -> None:
    away.writes(beat=7)
    away.looks(5.0)
    away.looks(SILENT - 1.0)
    assert away.lost == []
    away.looks(1.0)
    assert away.lost == [1]
    assert "no heartbeat for 90 s" in away.peers.gone()[1]


def test_any_other_count_is_a_sign_of_life_whatever_its_clock_says(away: Away) -> None:
    for beat in (7, 8, 3):
        away.writes(beat=beat, time="1970-01-01T00:00:00+00:00")
        away.looks(SILENT - 1.0)
        away.looks(SILENT - 1.0)
    assert away.lost == []


def test_nothing_is_lost_while_this_rank_does_not_wait_or_cannot_read(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    away.looks(10 * SILENT)
    away.writes(beat=7, launch="before")
    away.looks(10 * SILENT)
    away.looks(10 * SILENT)
    away.writes(beat=7)
    away.looks(1.0)
    monkeypatch.setattr(distributed, "is_waiting", lambda: False)
    away.looks(10 * SILENT)
    monkeypatch.setattr(distributed, "is_waiting", lambda: True)
    away.looks(SILENT - 1.0)
    assert away.lost == []
    away.watchdog.beat(ENDING, 9)
    away.looks(10 * SILENT)
    away.looks(10 * SILENT)
    assert away.lost == []


def test_a_rank_that_says_it_ended_is_not_waited_for(away: Away) -> None:
    away.writes(beat=7, state="ended", code=70, reason="a bug")
    away.looks(1.0)
    assert away.peers.gone() == {1: "it ended: a bug"}


def test_each_rank_watches_a_few_and_each_is_watched(tmp_path: Path) -> None:
    watched = [watchdog._select_next_ranks(tuple(r for r in range(64) if r != own), own) for own in range(64)]
    assert {len(few) for few in watched} == {AWAY}
    assert all(sum(rank in few for few in watched) == AWAY for rank in range(64))


def test_the_wait_of_the_main_thread_counts_and_no_other(tmp_path: Path) -> None:
    with distributed.mark_thread_waiting():
        assert distributed.is_waiting()
        with distributed.mark_thread_waiting():
            pass
        assert distributed.is_waiting()
    assert not distributed.is_waiting()
    inside, seen = threading.Event(), list[bool]()

    def other() -> None:
        with distributed.mark_thread_waiting():
            inside.set()
            seen.append(distributed.is_waiting())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False]
