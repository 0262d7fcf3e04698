"""The process for an object store: workers may be forked after an upload, and nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from halfstep.errors import StoreFailed
from halfstep.store.process import LOST, StoreProcess
from tests.store.conftest import InStore

FORKED = """
import json, multiprocessing, sys
from tests.store import calls
address, way = sys.argv[1:]
request = {"address": address, "key": "data", "start": 10, "size": 1000, "patience": 10.0}
if way == "process":
    from halfstep.store.process import StoreProcess
    process = StoreProcess()
    process.call("tests.store.calls:put", {"address": address, "key": "data", "size": 5000})
else:
    calls.put({"address": address, "key": "data", "size": 5000})
context = multiprocessing.get_context("fork")
def work(answers):
    answers.put(calls.read(request))
answers = context.Queue()
workers = [context.Process(target=work, args=(answers,), daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
try:
    print(json.dumps([answers.get(timeout=float(60 if way == "process" else 15)) for _ in workers]), flush=True)
finally:
    for worker in workers:
        worker.kill()
"""


def forked(in_store: InStore, way: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", FORKED, in_store.address, way]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)


def test_workers_that_are_forked_after_an_upload_read(in_store: InStore, tmp_path: Path) -> None:
    done = forked(in_store, "process", tmp_path)
    assert done.returncode == 0, done.stderr
    digest = in_store("read", key="data", start=10, size=1000)
    assert done.stdout.count(digest) == 2


@pytest.mark.full
def test_workers_read_nothing_where_the_parent_used_obstore_itself(in_store: InStore, tmp_path: Path) -> None:
    """Why there is a process at all; where this fails, obstore can be forked and the process may go."""
    assert forked(in_store, "itself", tmp_path).returncode != 0


def test_a_killed_process_fails_one_call_and_is_started_again(in_store: InStore) -> None:
    process = StoreProcess()
    try:
        process.call("tests.store.calls:put", {"address": in_store.address, "key": "data", "size": 10})
        before = process.pid
        os.kill(before, signal.SIGKILL)
        failed = []
        try:
            process.call("tests.store.calls:keys", {"address": in_store.address})
        except StoreFailed as failure:
            failed.append(failure.kind)
        assert failed in ([], [LOST]), "the end may be noticed before the call"
        assert process.call("tests.store.calls:keys", {"address": in_store.address}) == ["data"]
        assert process.pid != before
    finally:
        process.close()
    assert not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
def test_a_reply_that_is_cut_off_is_a_lost_process(in_store: InStore) -> None:
    process = StoreProcess()
    try:
        with pytest.raises(StoreFailed) as caught:
            process.call("tests.store.calls:half_a_reply", {})
        assert caught.value.kind == LOST
        assert process.call("tests.store.calls:keys", {"address": in_store.address}) == []
    finally:
        process.close()


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom halfstep.store.process import StoreProcess\n"
        "process = StoreProcess()\n"
        # A worker that holds the pipe open must not keep it alive.
        "worker = os.fork()\n"
        "if worker == 0: time.sleep(60); os._exit(0)\n"
        "print(process.pid, worker, flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        helper, worker = map(int, parent.stdout.readline().split())
        time.sleep(0.5)
        os.kill(helper, signal.SIGTERM)
        os.kill(helper, signal.SIGINT)
        time.sleep(0.2)
        parent.kill()
    until = time.monotonic() + 20.0
    while psutil.pid_exists(helper) and psutil.Process(helper).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it outlived the run"
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
