"""One process a folder: with real processes, which die."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import FolderTaken, HalfstepError
from halfstep.ownership import LOCK
from halfstep.peers import compute_boot_container_id
from halfstep.train.run_folder import lock_folder

FORK = multiprocessing.get_context("fork")


def refusal(folder: Path) -> FolderTaken:
    began = time.perf_counter()
    with pytest.raises(FolderTaken) as caught:
        lock_folder(folder)
    assert time.perf_counter() - began < 1  # at once: it does not wait for the holder, who stays
    assert caught.value.exit_code == 73
    return caught.value


def _hold(folder: Path, told: Any, child: bool) -> None:
    lock_folder(folder)
    if child and os.fork() == 0:
        told.send(os.getpid())
        time.sleep(60)
        os._exit(0)
    if not child:
        told.send(os.getpid())
    time.sleep(60)


def held(folder: Path, child: bool = False) -> tuple[Any, int]:
    """A process that holds the lock, and its number; or the number of its child, which lives on."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(folder, theirs, child))
    process.start()
    assert ours.poll(20)
    return process, ours.recv()


def killed(process: Any) -> None:
    process.kill()
    process.join()


@pytest.mark.wording
def test_a_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    process, pid = held(tmp_path)
    error = refusal(tmp_path)
    assert f"{tmp_path} is in use by process {pid} on {socket.gethostname()} since 20" in error.given
    assert error.allowed == "one process per folder"
    assert error.do == f"wait for it, stop it (kill {pid}), or call fit(..., new=True) for a new folder"
    killed(process)
    lock_folder(tmp_path).release()


@pytest.mark.wording
def test_one_process_cannot_have_it_twice(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    assert "this process" in str(refusal(tmp_path))
    assert "kill" not in str(refusal(tmp_path))
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(str(refusal(tmp_path))))
    thread.start()
    thread.join()
    assert "this process" in said[0]
    ours.release()
    ours.release()
    second = lock_folder(tmp_path)
    ours.release()
    refusal(tmp_path)
    second.release()
    assert os.listdir(tmp_path) == [LOCK], "released, and still there"


def test_a_lock_that_nobody_refers_to_is_held(tmp_path: Path) -> None:
    kept = lock_folder(tmp_path)
    number = id(kept)
    del kept
    refusal(tmp_path)
    from halfstep.train import run_folder as module

    [one.release() for one in list(module._held) if id(one) == number]


def _race(folder: Path, gate: Any, answers: Any) -> None:
    gate.wait()
    try:
        lock_folder(folder)
    except FolderTaken:
        answers.put("taken")
    else:
        answers.put("got")
    gate.wait()


def test_of_two_at_once_exactly_one_gets_it(tmp_path: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        gate, answers = FORK.Barrier(2), FORK.SimpleQueue()
        racers = [FORK.Process(target=_race, args=(folder, gate, answers)) for _ in range(2)]
        for racer in racers:
            racer.start()
        assert sorted(answers.get() for _ in racers) == ["got", "taken"]
        for racer in racers:
            racer.join()


@pytest.mark.parametrize("child", [False, True])
def test_the_lock_of_a_killed_process_is_free(child: bool, tmp_path: Path) -> None:
    for _ in range(10):
        process, pid = held(tmp_path, child)
        refusal(tmp_path)
        killed(process)
        lock_folder(tmp_path).release()
        if child:
            os.kill(pid, signal.SIGKILL)  # and it lived until now


def test_a_forked_child_cannot_give_the_lock_away(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    theirs = FORK.Process(target=ours.release)
    theirs.start()
    theirs.join()
    assert theirs.exitcode == 0
    refusal(tmp_path)
    ours.release()


def _lock_its_own(ours: Any, folder: Path) -> None:
    own = lock_folder(folder)
    ours.release()  # has no descriptor any more, not the one with the number that `own` has now
    refusal(folder)
    own.release()


def test_a_forked_child_can_lock_another_folder(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ours = lock_folder(tmp_path)
    theirs = FORK.Process(target=_lock_its_own, args=(ours, tmp_path / "other"))
    theirs.start()
    theirs.join()
    assert theirs.exitcode == 0
    ours.release()


def test_no_started_program_inherits_it(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as sleeps:
        ours._close()  # as if this process had died
        lock_folder(tmp_path).release()
        sleeps.kill()


@pytest.mark.parametrize("pid", [2**22 + 1, os.getppid(), -1, "x"])
def test_a_file_that_nobody_locked_is_taken_over(pid: object, tmp_path: Path) -> None:
    stale = {"pid": pid, "host": socket.gethostname(), "since": "2020-01-01T00:00:00+00:00", "long": "x" * 200}
    (tmp_path / LOCK).write_text(json.dumps(stale))
    ours = lock_folder(tmp_path)
    line = (tmp_path / LOCK).read_bytes()
    assert line.endswith(b"}\n")
    words = json.loads(line)
    here = {"pid": os.getpid(), "host": socket.gethostname(), "machine": compute_boot_container_id()}
    assert words == {**here, "since": words["since"], "launch": ours.token}
    assert len(ours.token) == 16
    ours.release()


@pytest.mark.wording
@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"{",
        b"\xff" * 10,
        b"[" * 4096,
        b"x" * 10_000_000,
        b'{"pid": 5}',
        b'{"pid": NaN, "host": "h", "since": "s"}',
        b'{"pid": 5, "host": "\\u001b[2J", "since": "s"}',
        json.dumps({"pid": 5, "host": "h" * 999, "since": "s"}).encode(),
    ],
)
def test_a_holder_without_words_holds_too(written: bytes, tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    (tmp_path / LOCK).write_bytes(written)
    error = refusal(tmp_path)
    assert "is in use by another process" in error.given
    assert error.do == "wait for it, or call fit(..., new=True) for a new folder"
    ours.release()


@pytest.mark.wording
def test_a_process_on_another_machine_is_not_killed_here(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    (tmp_path / LOCK).write_text('{"pid": 5, "host": "far", "since": "2020"}')
    assert "(kill 5 on far)" in refusal(tmp_path).do
    ours.release()


@pytest.mark.wording
def test_what_is_no_file_is_not_locked(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / LOCK).symlink_to(target)
    assert "cannot be locked" in refusal(tmp_path).given
    assert target.read_text() == "keep"
    target.unlink()
    assert "cannot be locked" in refusal(tmp_path).given
    assert not target.exists()
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    assert "is not a file" in refusal(tmp_path).given
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).mkdir()
    assert "cannot be locked" in refusal(tmp_path).given
    assert "No such file" in refusal(tmp_path / "absent").given
    assert not (tmp_path / "absent").exists()


def test_a_refusal_leaves_no_descriptor_open(tmp_path: Path) -> None:
    ours = lock_folder(tmp_path)
    before = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    for _ in range(5):
        refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")) == before
    ours.release()


def test_a_file_that_is_replaced_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replaced = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not replaced:
            replaced.append((tmp_path / LOCK).unlink())
        plain(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    ours = lock_folder(tmp_path)
    refusal(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    ours.release()


@pytest.mark.wording
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    assert os.strerror(number) in refusal(tmp_path).given
    assert "run.dir=" in refusal(tmp_path).do


@pytest.mark.wording
def test_a_full_disk_takes_only_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    ours = lock_folder(tmp_path)
    assert "another process" in refusal(tmp_path).given
    ours.release()
    lock_folder(tmp_path).release()


@pytest.mark.wording
def test_a_system_without_flock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(HalfstepError, match="no flock") as caught:
        lock_folder(tmp_path)
    assert caught.value.allowed == "Linux or macOS"
    assert os.listdir(tmp_path) == []


def test_locks_and_signals_need_no_torch() -> None:
    code = "import halfstep.train.run_folder, halfstep.train.signals, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
