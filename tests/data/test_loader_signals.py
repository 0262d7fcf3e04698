"""Processes that read samples, and signals: this file is also the program that is sent them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import Order, Sample, Samples
from halfstep.data.loader import TrainLoader
from halfstep.train.signals import StopSignalHandler
from tests.support.forked_python import ForkedPython

SIZE = 30
LONG = 60.0


class Slow:
    """Sample n holds n. Each takes a moment; from the second on that a process reads, it takes `then` seconds."""

    def __init__(self, then: float) -> None:
        self.then, self.reads = then, 0

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int) -> Sample:
        time.sleep(self.then if self.reads else 0.02)
        self.reads += 1
        return {"x": torch.tensor([float(index)]), "pid": torch.tensor([os.getpid()])}

    def name(self, index: int) -> str:
        return f"number {index}"


def unchanged(sample: Sample) -> Sample:
    return sample


def windows(then: float, size: int = SIZE) -> Any:
    options: dict[str, Any] = {"batch_size": 1, "collate": default_collate, "device": torch.empty(0).device}
    return TrainLoader(Samples(Slow(then), unchanged, 0), Order(size, 0), workers=2, **options).windows(0)


def told(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def first(read: Any) -> list[float]:
    """The two first samples; the processes that read them are told."""
    batches = [next(read)[0].tensors for _ in range(2)]
    told(workers=[int(batch["pid"]) for batch in batches])
    return [float(batch["x"]) for batch in batches]


def reads_all(then: float = 0.05) -> None:
    with StopSignalHandler() as stopping:
        read = windows(then)
        found = first(read)
        found += [float(window[0].tensors["x"]) for window in read]
        told(asked=stopping.asked, found=found)


def closes() -> None:
    with StopSignalHandler() as stopping:
        read = windows(LONG)
        first(read)
        time.sleep(0.2)  # they are at their second sample
        began = time.perf_counter()
        read.close()
        told(seconds=time.perf_counter() - began, asked=stopping.asked, left=len(multiprocessing.active_children()))


def waits() -> None:
    first(read := windows(LONG))
    next(read)


KEPT: list[Any] = []


def leaves() -> None:
    KEPT.append(windows(LONG))
    first(KEPT[0])
    time.sleep(0.2)
    sys.exit(3)


def begins_in_a_storm() -> None:
    """Signals to the whole group, at every instant of the workers' beginning."""
    over = threading.Event()

    def storm() -> None:
        while not over.is_set():
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.001)

    with StopSignalHandler() as stopping:
        thread = threading.Thread(target=storm)
        thread.start()
        counts = [sum(1 for _ in windows(0.0, size=4)) for _ in range(5)]
        over.set()
        thread.join()
        told(asked=stopping.asked is not None, counts=counts)


@contextmanager
def program(name: str, method: str = "fork", start: Any = ForkedPython) -> Iterator[Any]:
    """This file as a program, by default forked from a process that has torch loaded."""
    words = [sys.executable, __file__, name, method]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start(words, **pipes, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()


def line(process: Any) -> dict[str, Any]:
    text = process.stdout.readline()
    assert text, process.stderr.read()
    found: dict[str, Any] = json.loads(text)
    return found


def ended(process: Any) -> tuple[int, str]:
    errors = process.stderr.read()
    return process.wait(60), errors


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.02)
    return False


ACKNOWLEDGED = {
    "SIGTERM": "SIGTERM: stopping before the first step\n",
    "SIGINT": "stopping before the first step; Ctrl-C again to stop now\n",
}


def read_all_of_them(process: Any) -> str | None:
    """The signal that the program was asked to stop by, once; it had read every sample all the same."""
    words = line(process)
    assert words["found"] == [float(number) for number in Order(SIZE, 0).numbers(0)]
    assert ended(process) == (0, ACKNOWLEDGED[words["asked"]])
    asked: str | None = words["asked"]
    return asked


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.full)])
@pytest.mark.slow
def test_a_worker_passes_the_wish_to_end_on_and_reads_on(method: str) -> None:
    with program("reads_all", method, ForkedPython if method == "fork" else subprocess.Popen) as process:
        workers = line(process)["workers"]
        assert len(set(workers)) == 2
        for worker in workers:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGTERM)
        assert read_all_of_them(process) == "SIGTERM"
        assert gone_within(2, workers)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_whole_group_leaves_the_workers_to_the_trainer(how: str) -> None:
    with program("reads_all") as process:
        line(process)
        os.killpg(process.pid, signal.Signals[how])
        assert read_all_of_them(process) == how


def test_an_iteration_that_is_left_ends_busy_workers_and_not_the_run() -> None:
    with program("closes") as process:
        workers = line(process)["workers"]
        words = line(process)
        assert words["seconds"] < 4
        assert (words["asked"], words["left"]) == (None, 0)
        assert ended(process) == (0, "")
        assert gone_within(2, workers)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_worker_outlives_a_killed_trainer(method: str) -> None:
    with program("waits", method, subprocess.Popen) as process:
        workers = line(process)["workers"]
        assert all(map(alive, workers))
        process.kill()
        assert gone_within(2, workers)


def test_a_program_that_leaves_its_iteration_half_done_has_its_own_exit_code() -> None:
    with program("leaves", start=subprocess.Popen) as process:
        workers = line(process)["workers"]
        assert ended(process) == (3, "")
        assert gone_within(2, workers)


def test_signals_while_workers_begin_end_none_of_them() -> None:
    with program("begins_in_a_storm") as process:
        assert line(process) == {"asked": True, "counts": [4] * 5}
        assert ended(process)[0] == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    multiprocessing.set_start_method(sys.argv[2])
    globals()[sys.argv[1]]()
