"""Processes of other ranks: gone, stopped, or another one with the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from halfstep import peers
from halfstep.peers import Peers, RankProcess, is_process_gone, parse_processes, read_own_process, read_process_start

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="states of processes are read from /proc")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def of(process: subprocess.Popen[bytes], rank: int = 1) -> RankProcess:
    return RankProcess(rank, process.pid, read_process_start(process.pid))


def test_a_process_that_ended_is_gone_before_anybody_has_waited_for_it(child: subprocess.Popen[bytes]) -> None:
    one = of(child)
    assert not is_process_gone(one)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_process_gone(one), "a zombie"
    child.wait()
    assert is_process_gone(one), "no such process"


def test_a_stopped_process_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    one = of(child)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_process_gone(one)


def test_another_process_with_the_same_number_is_not_the_rank() -> None:
    own = read_own_process(0)
    assert not is_process_gone(own)
    assert is_process_gone(own._replace(began="1"))


def test_ranks_are_gone_a_moment_after_their_end(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: clock[0])
    others = Peers([of(child), read_own_process(2)], [3])
    assert others.gone() == {}
    child.kill()
    child.wait()
    assert others.gone() == {}, "what it sent may still arrive"
    clock[0] += peers.SETTLED
    assert others.gone() == {1: "its process has ended"}
    others.report_lost(3, "it has written no heartbeat for 95 s")
    assert list(others.gone()) == [1, 3]


def test_a_rank_that_came_twice_counts_with_its_last_process() -> None:
    text = "".join(map(str, (RankProcess(0, 10, "5"), RankProcess(1, 11, "6"), RankProcess(1, 12, "7"))))
    assert parse_processes(text) == [RankProcess(0, 10, "5"), RankProcess(1, 12, "7")]
