"""`halfstep status`: whether a run is alive, for probes: fast, without torch, and never by the clocks of two hosts."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from halfstep.cli import _probe, main
from halfstep.errors import BadData
from halfstep.runs import liveness
from halfstep.runs.liveness import judge_run
from halfstep.train.status import Launch, RankStatus, name_status_file


def write(folder: Path, rank: int = 0, *, age: float = 0.0, **said: Any) -> None:
    """The status of a rank of this process, as old as this by its own clock."""
    at = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    here = {"state": "running", "pid": os.getpid(), "host": socket.gethostname(), "launch": "a", "time": at, "world": 1}
    here |= {"step": 7, "phase": "computing", "beat": 1}
    draft = folder / "draft"
    draft.write_text(json.dumps({**here, **said}))
    draft.replace(folder / name_status_file(rank))


def ended(code: int, **more: Any) -> dict[str, Any]:
    return {"state": "ended", "code": code, "reason": f"reason {code}", "restartable": code in (75, 76), **more}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PAUSE", 0.01)
    monkeypatch.setattr(liveness, "FOR_A_BEAT", 0.1)


def judged(folder: Path, max_age: float = 30.0, rank: int | None = None) -> tuple[str, int]:
    found = judge_run(folder, max_age, rank)
    return found.state, found.code


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"age": 1.0}, ("alive", 0)),
        (ended(0, age=1e6), ("finished", 0)),
        *[(ended(code, age=1e6), ("ended", code)) for code in (65, 70, 74, 75, 76, 78, 80, 81, 130)],
        (ended(300), ("ended", 70)),
        ({"state": "ended"}, ("ended", 70)),
        ({"state": "ended", "code": "80"}, ("ended", 70)),
        ({"time": "yesterday"}, ("silent", 76)),
    ],
)
def test_one_rank_of_this_host(tmp_path: Path, said: dict[str, Any], expected: tuple[str, int]) -> None:
    write(tmp_path, **said)
    assert judged(tmp_path) == expected


def test_a_process_that_stands_still_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_is_gone", lambda status: False)  # this process may be younger than that
    monkeypatch.setattr(liveness, "_watch_ranks", lambda *watched: {})
    write(tmp_path, age=40.0)
    assert judged(tmp_path, 30) == ("silent", 76)
    assert judged(tmp_path, 50) == ("alive", 0)


def test_a_process_that_was_killed_is_noticed_before_its_heartbeat_is_old(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    write(tmp_path, pid=gone.pid)
    found = judge_run(tmp_path, 1000)
    assert (found.state, found.code) == ("silent", 76)
    assert "process is gone" in found.why


def beating(folder: Path, *ranks: int, **said: Any) -> threading.Thread:
    """Raise the beat of some ranks a moment from now; everything else in their files stays."""

    def beat() -> None:
        time.sleep(0.05)
        for rank in ranks:
            status = json.loads((folder / name_status_file(rank)).read_text())
            write(folder, rank, **{**status, "beat": status["beat"] + 1, **said})

    thread = threading.Thread(target=beat)
    thread.start()
    return thread


def test_a_process_of_another_namespace_is_alive_while_it_writes(tmp_path: Path) -> None:
    write(tmp_path, pid=2**22 + 1)
    thread = beating(tmp_path, 0)
    assert judged(tmp_path) == ("alive", 0)
    thread.join()


@pytest.mark.parametrize("age", [-1e7, 0.0, 1e7], ids=["its clock is ahead", "clocks agree", "its clock is behind"])
def test_another_host_is_watched_and_its_clock_is_not_read(tmp_path: Path, age: float) -> None:
    write(tmp_path, host="elsewhere", age=age)
    assert judged(tmp_path, 0.2) == ("silent", 76)
    thread = beating(tmp_path, 0)
    assert judged(tmp_path, 30.0) == ("alive", 0)
    thread.join()
    thread = beating(tmp_path, 0, **ended(80))
    assert judged(tmp_path, 30.0) == ("ended", 80), "it ended while it was watched"
    thread.join()


def test_ranks_of_other_hosts_are_watched_at_the_same_time(tmp_path: Path) -> None:
    for rank in range(16):
        write(tmp_path, rank, world=16, host=f"node{rank}")
    looks: list[liveness.RankWatch] = []
    started = time.monotonic()
    found = judge_run(tmp_path, 1.0, None, looks.append)
    assert time.monotonic() - started < 4.0, "one wait, not one per rank"
    assert (found.state, found.code, len(found.ranks)) == ("silent", 76, 16)
    assert [one.rank for one in found.ranks] == list(range(16))
    assert (looks[0].watched, looks[0].heartbeat) == (16, 5.0)
    assert looks[0].left == pytest.approx(1.0)
    assert looks[-1].left < looks[0].left


def test_the_limit_is_kept_with_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A look at many files is rare: a tenth of a heartbeat, which is longer than the limit here.
    monkeypatch.setattr(liveness, "WRITES", 0.1)
    for rank in range(3):
        write(tmp_path, rank, world=3, host=f"node{rank}")
    started = time.monotonic()
    assert judged(tmp_path, 0.3) == ("silent", 76)
    assert time.monotonic() - started < 2.0


def test_a_probe_of_one_rank_knows_the_heartbeat_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1,000 ranks write every 20 s: a process that is not found by its number has two of these.
    monkeypatch.setattr(liveness, "WRITES", 1000.0)
    write(tmp_path, 3, world=1000, pid=2**22 + 1)
    looks: list[liveness.RankWatch] = []
    judge_run(tmp_path, 60.0, 3, looks.append)
    assert (looks[0].watched, round(looks[0].left, 1)) == (1, 2.0)


@pytest.mark.wording
def test_the_first_line_of_a_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(tmp_path, rank, world=2, host=f"node{rank}", beat=3)
    assert _probe.answer(_probe.StatusQuery(tmp_path, 1, None, True)) == 76
    printed = capsys.readouterr()
    assert json.loads(printed.out)["state"] == "silent", "the answer is alone on stdout"
    assert printed.err == "watching 2 ranks: a heartbeat every 5 s, at most 1 s left\n"
    assert "give a longer --max-age" in json.loads(printed.out)["why"]


def test_a_number_that_another_process_got_is_not_alive(tmp_path: Path) -> None:
    age = time.time() - psutil.Process().create_time() + 10.0
    write(tmp_path, age=age)
    found = judge_run(tmp_path, 1000)
    assert (found.state, found.code) == ("silent", 76), (
        "written before this process began, as by a pod of the same name"
    )


def test_a_clock_that_was_set_back_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, age=-3600.0)
    assert judged(tmp_path) == ("silent", 76)
    thread = beating(tmp_path, 0)
    assert judged(tmp_path) == ("alive", 0)
    thread.join()


def test_every_rank_counts(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, world=3)
    assert judged(tmp_path) == ("alive", 0)
    write(tmp_path, 2, world=3, age=100.0)
    assert judged(tmp_path) == ("silent", 76)
    assert "rank 2 on" in judge_run(tmp_path, 30).why
    assert judged(tmp_path, rank=1) == ("alive", 0), "the probe of another rank's pod"
    write(tmp_path, 2, world=3, **ended(0))
    assert judged(tmp_path) == ("alive", 0), "the others have not ended yet"
    write(tmp_path, 1, world=3, **ended(76))
    write(tmp_path, 2, world=3, **ended(70))
    found = judge_run(tmp_path, 30)
    assert (found.code, found.restartable) == (70, False)
    assert "rank 2" in found.why, "the rank that failed, not the one that lost it"


def test_ranks_that_never_wrote_and_files_of_earlier_launches(tmp_path: Path) -> None:
    write(tmp_path, 0, world=2)
    write(tmp_path, 1, world=2, launch="before", **ended(80))
    write(tmp_path, 2, world=3, launch="before", **ended(80))
    found = judge_run(tmp_path, 0.2)
    assert (found.state, found.code, len(found.ranks)) == ("silent", 76, 2)
    assert "rank 1: no status of this launch" in found.why
    thread = beating(tmp_path, 1, launch="a", state="running")
    assert judged(tmp_path) == ("alive", 0)
    thread.join()


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    status = RankStatus(tmp_path, Launch("a"))
    status.running(step=12, phase="computing")
    [rank] = judge_run(tmp_path, 60).ranks
    assert (rank.state, rank.step, rank.phase, rank.pid) == ("moving", 12, "computing", os.getpid())
    status.ended(80, "steps fail")
    assert judged(tmp_path) == ("ended", 80)


@pytest.mark.wording
@pytest.mark.parametrize("content", [None, "", "[]", "null", "{}"])
def test_a_folder_without_a_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / name_status_file(0)).write_text(content)
    with pytest.raises(BadData, match="no status of a run"):
        judge_run(tmp_path, 60)
    with pytest.raises(BadData, match="for rank 3"):
        judge_run(tmp_path, 60, 3)
    (tmp_path / "result.json").write_text("{}")
    assert judged(tmp_path) == ("finished", 0), "of a version that wrote no status"


@pytest.mark.parametrize("said", [{"state": 1, "world": 1e99}, {"world": 10**10}, {"pid": "7", "host": ["a"]}])
def test_a_status_of_another_program_is_not_alive(tmp_path: Path, said: dict[str, Any]) -> None:
    write(tmp_path, **{"time": None, **said})
    assert judged(tmp_path, 0.05) == ("silent", 76)


# -- command line -----------------------------------------------------------------------------------------------------


def test_a_probe_is_quick_and_loads_neither_torch_nor_typer(tmp_path: Path) -> None:
    write(tmp_path, **ended(80, reason="a\x1b[2Jb"))
    code = (
        "import sys; sys.argv = ['halfstep', 'status', sys.argv[1], '--max-age', '60']\n"
        "from halfstep.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'typer', 'rich', 'numpy', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (80, "[]\n")
    assert done.stdout == "ended with exit code 80: a\\x1b[2Jb\n", "no escape sequence reaches a terminal"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.4


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["run"], _probe.StatusQuery(Path("run"))),
        (["run", "--max-age", "90"], _probe.StatusQuery(Path("run"), 90)),
        (["--max-age=90", "--json", "run", "--rank", "3"], _probe.StatusQuery(Path("run"), 90, 3, True)),
        *[(words, None) for words in ([], ["a", "b"], ["run", "--help"], ["run", "--max-age"], ["run", "--rank=-1"])],
        *[(["run", "--max-age", given], None) for given in ("0", "-5", "nan", "inf", "1e3", "²", "9" * 30, "")],
    ],
)
def test_words_that_typer_reads_in_the_same_way_or_refuses(
    tmp_path: Path, words: list[str], asked: _probe.StatusQuery | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _probe.parse_status_query(words) == asked
    seen: list[_probe.StatusQuery] = []
    monkeypatch.setattr(_probe, "answer", lambda asked: seen.append(asked) or 0)
    done = CliRunner().invoke(main.build(["status"]), ["status", *words])
    if asked is not None:
        assert seen == [asked]
    elif "--help" not in words and "1e3" not in words:
        assert (done.exit_code, seen) == (64, [])


def test_json_has_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(tmp_path, rank, world=2, step=5 + rank)
    assert _probe.answer(_probe.StatusQuery(tmp_path, 60, None, True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["code"], found["max_age"]) == ("alive", 0, 60)
    assert [(one["rank"], one["step"], one["beat"]) for one in found["ranks"]] == [(0, 5, 1), (1, 6, 1)]
