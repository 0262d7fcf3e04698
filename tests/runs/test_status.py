"""How a process runs and ended, in a file that torchrun does not make a 1 of; and what a restart makes of it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep import files
from halfstep.errors import BadData, HalfstepError, NotRestarted, RankFailed, Stopped, StorageFailed, Unsafe
from halfstep.files import write_json
from halfstep.ownership import LOCK
from halfstep.status_files import RankStatusRecord, name_status_file, read_status
from halfstep.train.lost_ranks import find_lost_ranks
from halfstep.train.status import (
    RESERVED,
    Launch,
    RankStatus,
    begin_attempt,
    count_restarts,
    find_job_id,
    record_rank_status,
)
from tests.support.tiny_task import Tiny

SAID = ("code", "reason", "restartable")


def kept(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name_status_file(0)).read_text())
    return content


def said(folder: Path) -> tuple[Any, ...]:
    return tuple(kept(folder).get(name) for name in SAID)


def saved(folder: Path) -> Any:
    return record_rank_status(RankStatus(folder, Launch("token", restarts=2)))


def test_a_process_says_that_it_runs_and_that_it_came_to_its_end(tmp_path: Path) -> None:
    with saved(tmp_path):
        now = kept(tmp_path)
        assert (now["state"], now["pid"], now["restarts"], now["world"]) == ("running", os.getpid(), 2, 1)
        assert {"host", "since", "time", "step", "phase"} <= now.keys()
        assert "code" not in now
    assert kept(tmp_path)["state"] == "ended"
    assert said(tmp_path) == (0, "finished", False)


@pytest.mark.parametrize(
    ("error", "code", "restartable"),
    [
        (Stopped("stopped by SIGTERM at step 3", do="again"), 75, True),
        (RankFailed("another rank is gone"), 76, True),
        (StorageFailed("no room"), 74, False),
        (BadData("no samples", allowed="some"), 65, False),
        (Unsafe("code"), 77, False),
        (KeyboardInterrupt(), 130, False),
        (SystemExit(3), 70, False),
        (MemoryError("no room"), 81, False),
        (ZeroDivisionError("in a task\nand more"), 70, False),
    ],
)
def test_an_error_is_kept_in_its_first_line_and_goes_on(
    tmp_path: Path, error: BaseException, code: int, restartable: bool
) -> None:
    with pytest.raises(type(error)) as caught, saved(tmp_path):
        raise error
    assert caught.value is error
    told = error.given if isinstance(error, HalfstepError) else str(error).split("\n")[0] or type(error).__name__
    assert said(tmp_path) == (code, told, restartable)
    assert ("in test_an_error_is_kept" in kept(tmp_path).get("traceback", "")) == (code == 70)


def test_the_last_launch_counts_and_the_first_end_of_it(tmp_path: Path) -> None:
    with pytest.raises(Stopped), saved(tmp_path):
        raise Stopped("stopped")
    status = RankStatus(tmp_path, Launch("other"))
    with record_rank_status(status):
        status.ended(76, "hung")
    assert said(tmp_path) == (76, "hung", True)
    assert [path.name for path in tmp_path.iterdir()] == ["status.rank-00000.json"]


@pytest.mark.wording
def test_a_file_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / name_status_file(0)).mkdir()
    with pytest.raises(StorageFailed, match="no room"), saved(tmp_path):
        raise StorageFailed("no room")
    with saved(tmp_path):
        pass


def test_every_write_raises_the_beat_and_the_end_too(tmp_path: Path) -> None:
    status = RankStatus(tmp_path, Launch("token"))
    beats = []
    for step in range(3):
        status.running(step=step, phase="computing")
        beats.append(kept(tmp_path)["beat"])
    status.ended(0, "finished")
    assert [*beats, kept(tmp_path)["beat"]] == [1, 2, 3, 4]
    assert (tmp_path / name_status_file(0)).stat().st_size == RESERVED


def test_a_full_disk_can_still_say_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = RankStatus(tmp_path, Launch("token"))
    status.running(step=7, phase="saving")

    def full(*given: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    status.ended(74, "no room " * 2000, trace="long " * 4000)
    assert (kept(tmp_path)["state"], kept(tmp_path)["code"], kept(tmp_path)["step"]) == ("ended", 74, 7)
    assert kept(tmp_path)["reason"].startswith("no room")
    assert [path.name for path in tmp_path.iterdir()] == [name_status_file(0)], "no draft is left"
    # The name may be that of another run by now: its file is not overwritten.
    RankStatus(tmp_path, Launch("other")).ended(0, "finished")
    assert kept(tmp_path)["launch"] == "token"


def test_a_disk_that_does_not_answer_keeps_no_run_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answers = RankStatus(tmp_path, Launch("token")), threading.Event()
    monkeypatch.setattr(files, "flush", lambda path: answers.wait(30.0))
    heartbeat = threading.Thread(target=status.running, args=(0, "computing"), daemon=True)
    heartbeat.start()
    heartbeat.join(5.0)
    assert not heartbeat.is_alive(), "a heartbeat is not flushed"
    began = time.monotonic()
    status.ended(0, "finished", within=0.2)
    assert time.monotonic() - began < 5.0
    answers.set()


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(BadData), saved(tmp_path / "gone"):
        raise BadData("never began")
    assert not (tmp_path / "gone").exists()


# -- restarts -------------------------------------------------------------------------------------------------------


def leave(folder: Path, rank: int = 0, **status: Any) -> None:
    write_json(folder / name_status_file(rank), {"launch": "last", "checkpoint": 4, "fruitless": 0, **status})


def begun(folder: Path, newest: int, restarts: int, batch_size: int = 8, *accepted: str) -> Launch:
    return begin_attempt(folder, newest, restarts, batch_size, accepted)


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}, 1),
        ({"SLURM_RESTART_COUNT": "none"}, 0),
    ],
)
def test_a_restart_is_known_by_its_launcher(environment: dict[str, str], count: int) -> None:
    assert count_restarts(environment) == count


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "none"}, "77"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "", "TORCHELASTIC_RUN_ID": "abc"}, "abc"),
        ({"JOB_NAME": "halfstep"}, "halfstep"),
    ],
)
def test_a_job_has_the_name_that_its_scheduler_gave_it(environment: dict[str, str], job: str | None) -> None:
    assert find_job_id(environment) == job


@pytest.mark.wording
@pytest.mark.parametrize("code", [64, 65, 77, 78, 79, 80])
def test_a_restart_after_an_ending_that_stays_ends_in_the_same_way(tmp_path: Path, code: int) -> None:
    leave(tmp_path, code=76, reason="rank 1 failed", state="ended")
    leave(tmp_path, 1, code=code, reason="no samples", state="ended")
    leave(tmp_path, 2, code=65, reason="of an earlier launch", launch="before")
    with pytest.raises(NotRestarted, match="rank 1: no samples") as caught:
        begun(tmp_path, newest=9, restarts=1)
    assert caught.value.exit_code == code
    assert begun(tmp_path, newest=9, restarts=0).fruitless == 0, "the user's own command"


@pytest.mark.wording
@pytest.mark.parametrize(("code", "ends"), [(70, 70), (76, 76), (None, 70)])
def test_three_restarts_without_a_newer_checkpoint_are_enough(tmp_path: Path, code: int | None, ends: int) -> None:
    launch = begun(tmp_path, newest=4, restarts=0)
    for restart in (1, 2, 3):
        leave(tmp_path, launch=launch.token, fruitless=launch.fruitless, code=code, reason="again")
        launch = begun(tmp_path, newest=4, restarts=restart)
        assert launch.fruitless == restart
    leave(tmp_path, launch=launch.token, fruitless=launch.fruitless, code=code, reason="again")
    with pytest.raises(NotRestarted, match="3 restarts in a row") as caught:
        begun(tmp_path, newest=4, restarts=4)
    assert (caught.value.exit_code, kept(tmp_path)["restartable"]) == (ends, False)
    assert begun(tmp_path, newest=4, restarts=0).fruitless == 0


def test_a_newer_checkpoint_or_a_stop_that_was_asked_for_is_no_crash(tmp_path: Path) -> None:
    leave(tmp_path, fruitless=3, code=76, reason="hung")
    assert begun(tmp_path, newest=5, restarts=4).fruitless == 0
    leave(tmp_path, fruitless=3, code=75, reason="stopped by SIGTERM")
    assert begun(tmp_path, newest=4, restarts=4).fruitless == 3


@pytest.mark.parametrize("content", ["[]", '{"launch": 3}', '{"launch": "a", "code": [65], "fruitless": "x"}', "no"])
def test_a_status_that_another_program_wrote_stops_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / name_status_file(0)).write_text(content)
    assert begun(tmp_path, newest=0, restarts=1).fruitless <= 1


def test_a_field_of_another_type_counts_as_missing(tmp_path: Path) -> None:
    write_json(tmp_path / name_status_file(0), {"state": "ended", "code": True, "step": "7", "beat": 3, "unknown": 1})
    assert read_status(tmp_path, 0) == RankStatusRecord(state="ended", beat=3)


# -- want of memory -------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(("batch", "parts"), [(64, [2, 4, 8, 16, 32, 64]), (12, [2, 4, 12]), (7, [7])])
def test_a_restart_after_want_of_memory_halves_until_one_sample_is_left(
    tmp_path: Path, batch: int, parts: list[int]
) -> None:
    launch = begun(tmp_path, 4, 0, batch)
    for restart, expected in enumerate([*parts, None], start=1):
        leave(tmp_path, code=76, reason="lost rank 1", launch=launch.token, **sizes_of(launch))
        leave(tmp_path, 1, code=81, reason="out of memory", launch=launch.token)
        if expected is not None:
            launch = begun(tmp_path, 4, restart, batch)
            # Not the attempt before again: one that may end otherwise.
            assert (launch.divided_by, launch.fruitless) == (expected, 0)
    with pytest.raises(NotRestarted, match="rank 1: out of memory; micro-batches are of one sample already") as caught:
        begun(tmp_path, 4, len(parts) + 1, batch)
    assert caught.value.exit_code == 81


def sizes_of(launch: Launch) -> dict[str, int]:
    return {"batch_size": launch.batch_size, "divided_by": launch.divided_by}


def test_halves_stay_until_a_person_takes_another_batch(tmp_path: Path) -> None:
    leave(tmp_path, code=76, reason="hung", batch_size=8, divided_by=4)
    assert begun(tmp_path, 4, 1).divided_by == 4, "another failure keeps them"
    assert begun(tmp_path, 4, 0).divided_by == 4, "so does the same command"
    assert begun(tmp_path, 4, 0, 16).divided_by == 1, "these are halves of another batch"
    assert begun(tmp_path, 4, 0, 8, "recipe").divided_by == 1, "--accept-recipe-change"
    assert begun(tmp_path, 4, 1, 8, "recipe").divided_by == 4, "torchrun repeats the command with its options"


@pytest.mark.parametrize("parts", [3, 0, -2, 16, True, "2", None])
def test_parts_that_another_program_wrote_are_none(tmp_path: Path, parts: Any) -> None:
    leave(tmp_path, code=75, reason="stopped", batch_size=8, divided_by=parts)
    assert begun(tmp_path, 4, 1).divided_by == 1


def test_a_rank_whose_process_is_gone_or_that_failed_is_named_and_not_those_that_lost_it(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    running = {"launch": "now", "state": "running", "host": socket.gethostname()}
    ended = {**running, "state": "ended", "pid": gone.pid}
    statuses = (
        {**running, "pid": os.getpid()},
        {**running, "pid": gone.pid},
        {**ended, "code": 76},
        {**ended, "code": 70},
        {**running, "pid": gone.pid, "host": "elsewhere"},
        {**running, "pid": gone.pid, "launch": "before"},
    )
    for rank, status in enumerate(statuses):
        write_json(tmp_path / name_status_file(rank), status)
    assert find_lost_ranks(tmp_path, "now") == [1, 3]


class NoModel(Tiny):
    def model(self) -> Any:
        raise ImportError("of a test")


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_run_that_fails_to_start_leaves_what_its_restarts_are_counted_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("task: tiny\n")
    with pytest.raises(ImportError):
        halfstep.fit(recipe, task=NoModel, settings={"run.dir": str(tmp_path / "run"), "train.epochs": 1}, quiet=True)
    left = sorted(path.name for path in tmp_path.glob("run/*"))
    assert left == ([] if restarts == "0" else [LOCK, name_status_file(0)])
    assert (tmp_path / "run").exists() == (restarts != "0")
    if left:
        assert kept(tmp_path / "run")["code"] == 70
