"""`halfstep runs`: every run of a folder in its state, at once, whatever lies in the folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.journal.events import Event
from halfstep.journal.jsonl import JOURNAL, JsonLinesListener, format_event_line
from halfstep.runs import listing
from halfstep.runs.listing import RECIPE, RESULT, STATUS, RunRow, runs
from halfstep.train import run_folder, status
from tests.journal.told import end, epoch, start, step, whole_run
from tests.test_hostile_names import ESCAPE, harmless


def utc(seconds: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def make(folder: Path, events: list[Event] | None, result: object = None, **said: Any) -> Path:
    """A run of this journal, with the status that is said."""
    folder.mkdir(parents=True)
    (folder / RECIPE).write_text("task: segmentation\n")
    if events is not None:
        (folder / JOURNAL).write_bytes(b"".join(format_event_line(event).encode() for event in events))
    if result is not None:
        (folder / RESULT).write_text(json.dumps(result))
    if said:
        here = {"pid": os.getpid(), "host": socket.gethostname(), "time": utc(), "since": utc(), "phase": "computing"}
        (folder / STATUS).write_text(json.dumps({**here, **said}))
    return folder


def ended(code: int, reason: str = "so") -> dict[str, Any]:
    return {"state": "ended", "code": code, "reason": reason}


def halfstep(*words: object, width: int = 100) -> Result:
    return CliRunner().invoke(
        build(["runs"]), ["runs", *map(str, words)], catch_exceptions=False, env={"COLUMNS": str(width)}
    )


def only(folder: Path) -> RunRow:
    [row] = runs(folder, 10).runs
    return row


def a_dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-S", "-c", ""])
    done.wait()
    return done.pid


BEGUN = whole_run()[:30]
STATES: dict[str, tuple[Any, ...]] = {
    "running": (BEGUN, None, {"state": "running"}),
    "finished": (whole_run(), {"best": {"metric": "iou", "value": 0.7}, "precision": "bf16"}, ended(0)),
    "finished without a status": (whole_run(), {}, {}),
    "stopped": ([*BEGUN, end(reason="stopped")], None, ended(75)),
    "stopped by Ctrl-C": ([*BEGUN, end(reason="interrupted")], None, ended(130)),
    "gave up": ([*BEGUN, end(reason="gave_up")], None, ended(80)),
    "failed in a task": ([*BEGUN, end(reason="failed")], None, ended(70, "ZeroDivisionError")),
    "failed for memory": (BEGUN, None, ended(81)),
    "stopped without a status": ([*BEGUN, end(reason="stopped")], None, {}),
    "killed": (BEGUN, None, {"state": "running", "pid": "DEAD"}),
    "killed, and its number is another's": (BEGUN, None, {"state": "running", "since": utc(-1e6)}),
    "killed without a status": (BEGUN, None, {}),
    "killed after it was resumed": ([*BEGUN, end(reason="stopped"), start(resumed={"attempt": 20})], None, {}),
    "running elsewhere": (BEGUN, None, {"state": "running", "host": "elsewhere", "pid": 1}),
    "silent elsewhere": (BEGUN, None, {"state": "running", "host": "elsewhere", "pid": 1, "time": utc(-1000)}),
}


@pytest.mark.parametrize("case", STATES)
def test_the_states_of_runs_are_told_apart(tmp_path: Path, case: str) -> None:
    events, result, said = STATES[case]
    if said.get("pid") == "DEAD":
        said = {**said, "pid": a_dead_process()}
    if case == "running":
        # Since the test process began, which was long before.
        said = {**said, "since": datetime.fromtimestamp(psutil.Process().create_time() + 1, UTC).isoformat()}
    make(tmp_path / "run", events, result, **said)
    assert case.startswith(only(tmp_path).state)
    assert only(tmp_path / "run").state == only(tmp_path).state, "a run itself is a list of one"


def test_the_files_are_those_that_a_run_writes() -> None:
    assert (run_folder.RECIPE, run_folder.RESULT, status.name_status_file(0)) == (RECIPE, RESULT, STATUS)


def test_what_is_known_of_a_run(tmp_path: Path) -> None:
    events = [*whole_run("fp16")[:-1], start("fp16", resumed={"attempt": 40}), step(41, "gradient_overflow", step=37)]
    make(tmp_path / "run", events)
    row = only(tmp_path)
    assert (row.precision, row.metric, row.steps, row.planned, row.skips) == ("fp16", "iou", 41, 40, 4)
    assert row.seconds == pytest.approx(12.3)
    assert row.age < 60


def test_the_best_is_that_of_the_result_or_of_the_last_epoch(tmp_path: Path) -> None:
    make(tmp_path / "run", [*BEGUN, epoch(2, best={"metric": "iou", "value": 0.5, "epoch": 1})])
    assert (only(tmp_path).metric, only(tmp_path).value) == ("iou", 0.5)
    (tmp_path / "run" / RESULT).write_text('{"best": {"metric": "iou", "value": 0.75}}')
    assert only(tmp_path).value == 0.75
    (tmp_path / "run" / RESULT).write_text('{"best": {"metric": "iou", "value": "NaN"}}')
    assert only(tmp_path).value is None


def test_a_long_journal_in_several_files_is_read_at_its_end_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "run", None)
    lines = JsonLinesListener(run / JOURNAL, largest=200_000)
    for event in [start("bf16"), epoch(1), *(step(n) for n in range(1, 3001))]:
        lines.on_event(event)
    lines.close()
    assert len(list(run.glob("journal.*.jsonl"))) >= 3
    before = listing.LARGEST_TAIL
    try:
        listing.LARGEST_TAIL = 100_000
        row = only(tmp_path)
    finally:
        listing.LARGEST_TAIL = before
    assert (row.steps, row.precision, row.value) == (3000, "bf16", None), "the start is in the first line"
    assert only(tmp_path).value == 0.6234


def test_a_journal_that_another_program_wrote_again_is_read(tmp_path: Path) -> None:
    run = make(tmp_path / "run", whole_run())
    before = only(run)._replace(age=0.0)
    lines = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
    written_again = [json.dumps(dict(reversed(event.items()))) for event in lines]
    (run / JOURNAL).write_text("".join(f"{line}\n" for line in written_again))
    assert only(run)._replace(age=0.0) == before
    assert before.state == "finished"
    assert before.steps


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100])
def test_a_narrow_screen_has_fewer_columns_and_no_cut_number(tmp_path: Path, width: int) -> None:
    run = make(tmp_path / "a run with a name that is long", whole_run(), **ended(0))
    wide = halfstep(tmp_path, width=200).stdout.splitlines()[1]
    said = halfstep(tmp_path, width=width).stdout.splitlines()
    assert max(map(len, said[:2])) <= width
    (at,) = [place for place, name in enumerate(said[0].split()) if name == "state"]
    assert at == 1
    for cell in said[1].rstrip().split("  ")[1:]:
        assert cell.strip() in wide, "a cell is whole, or is not there"
    told = " ".join(said)
    assert all((name in said[0]) != (name in told.partition("no room for")[2]) for name in ("steps", "skips", "took"))
    assert "no room for" not in " ".join(halfstep(run, width=100).stdout.splitlines())


def test_a_list_is_shown_in_a_notebook_and_by_print(tmp_path: Path) -> None:
    make(tmp_path / "<b>run", whole_run(), **ended(0))
    found = runs(tmp_path)
    assert "&lt;b&gt;run" in found._repr_html_()
    assert "<b>run  finished" in str(found)


def test_the_newest_are_listed_and_the_rest_is_counted(tmp_path: Path) -> None:
    for n in range(5):
        run = make(tmp_path / f"run-{n}", BEGUN)
        for file in run.iterdir():
            os.utime(file, (time.time(), 1e9 + n))
    (tmp_path / "not a run").mkdir()
    (tmp_path / "neither" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    done = halfstep(tmp_path, "--most", 2)
    words = done.stdout.split()
    assert [word for word in words if word.startswith("run-")] == ["run-4", "run-3"]
    assert "3 more: --most 5\n2 other folders without a run\n" in done.stdout
    said = json.loads(halfstep(tmp_path, "--most", 2, "--json").stdout)
    assert (said["more"], said["other_folders"], [run["name"] for run in said["runs"]]) == (3, 2, ["run-4", "run-3"])


def test_links_pipes_and_damage_are_no_runs_or_harmless(tmp_path: Path) -> None:
    secret = make(tmp_path / "secret", whole_run(), {})
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "linked").symlink_to(secret)
    linked = make(folder / "linked recipe", BEGUN)
    (linked / RECIPE).unlink()
    (linked / RECIPE).symlink_to(secret / RECIPE)
    damaged = make(folder / "damaged", None)
    (damaged / JOURNAL).write_bytes(b"\0" * 100 + b"\n[[[[\n" + b'{"event":"step","attempt":"x"}\n{"event":"st')
    (damaged / STATUS).write_text('{"state": "ended", "code": [1], "time": 5, "since": {}}')
    (damaged / RESULT).write_text("[" * 100_000)
    piped = make(folder / "piped", BEGUN)
    os.mkfifo(piped / RESULT)
    os.mkfifo(piped / STATUS)
    found = runs(folder, 10)
    assert {row.name: (row.state, row.steps) for row in found.runs} == {
        "damaged": ("killed", None),
        "piped": ("killed", BEGUN[-1]["attempt"]),
    }
    assert found.other_folders == 1


def test_names_that_speak_to_a_terminal(tmp_path: Path) -> None:
    for name in (f"a{ESCAPE}", "b\nFAKE LINE: Finished", "c\u202egnp.exe", "d[red]", "e" * 200, os.fsdecode(b"f\xff")):
        make(tmp_path / name, [start(ESCAPE, metric={"name": ESCAPE}), step(1)], None, **ended(70, ESCAPE))
    done = halfstep(tmp_path)
    harmless(done, "\\x1b]0;PWNED", "d[red]", "eeee…")
    assert max(map(len, done.stdout.splitlines())) <= 100
    harmless(halfstep(tmp_path, "--json"))


@pytest.mark.wording
def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path: Path) -> None:
    assert halfstep(tmp_path).stdout == f"no runs in {tmp_path}\n"
    missing = halfstep(tmp_path / "missing")
    assert missing.exit_code == 65
    assert "No such file or directory" in missing.stderr


def test_it_answers_at_once_and_without_torch(tmp_path: Path) -> None:
    for n in range(20):
        make(tmp_path / f"run-{n}", whole_run(), {}, **ended(0))
    code = (
        "import sys, time; from halfstep.cli.main import main; sys.argv = ['halfstep', 'runs', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, time.process_time())"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    said = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-3:] for _ in range(2)]
    assert {(torch, numpy) for torch, numpy, _ in said} == {("False", "False")}
    # Others may be at work beside it; the quickest of a few is its own.
    assert min(float(seconds) for *_, seconds in said) <= 0.8
