"""A worker that the system ends: said in words, not as a traceback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import BadSample, Order, Sample, Samples, ValSamples
from halfstep.data.loader import TrainLoader, ValLoader
from halfstep.errors import WorkerLost

HERE = torch.empty(0).device


class Ends:
    """A source whose first sample ends the process that reads it, as the system does where memory runs out."""

    def __init__(self, how: int) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def read(self, index: int) -> Sample:
        if index == 0:
            os.kill(os.getpid(), self.how)
        return {"x": torch.zeros(2)}

    def name(self, index: int) -> str:
        return f"number {index}"


def unchanged(sample: Sample) -> Sample:
    return sample


@pytest.mark.wording
@pytest.mark.parametrize("how", [signal.SIGKILL])
@pytest.mark.parametrize("training", [True, False])
def test_a_killed_worker_is_named_and_the_run_can_be_restarted(how: int, training: bool) -> None:
    with pytest.raises(WorkerLost, match=r"was killed .*pid\(s\) \d+") as caught:
        list(_read(how, training))
    assert caught.value.exit_code == 76
    assert "smaller train.num_workers" in caught.value.do


def _read(how: int, training: bool) -> Any:
    options: dict[str, Any] = {"batch_size": 8, "collate": default_collate, "workers": 1, "device": HERE}
    if training:
        return TrainLoader(Samples(Ends(how), unchanged, 0), Order(8, 0), **options).windows(epoch=0)
    return ValLoader(ValSamples(Ends(how), unchanged, 0), **options)


def test_a_death_is_told_where_samples_are_read_and_not_in_the_middle_of_a_step() -> None:
    # As many workers as batches: the second one is being read when the first comes.
    samples = Samples(Sleeps(asleep=15), unchanged, 0)
    options: dict[str, Any] = {"batch_size": 8, "collate": default_collate, "workers": 2, "device": HERE}
    others = set(multiprocessing.active_children())  # of earlier tests; ids start anew at 32768
    windows = TrainLoader(samples, Order(16, 0, shuffle=False), **options).windows(epoch=0)
    next(windows)
    handler = signal.getsignal(signal.SIGCHLD)
    assert not getattr(handler, "__module__", "").startswith("torch"), handler
    _, asleep = sorted(set(multiprocessing.active_children()) - others, key=lambda process: process.name)
    asleep.kill()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # a step
        torch.ones(4).sum()
    with pytest.raises(WorkerLost):
        list(windows)


@pytest.mark.wording
def test_a_worker_that_died_with_a_batch_in_hand_is_lost_too() -> None:
    """The batch was told of; its memory is fetched from a process that is gone."""
    options: dict[str, Any] = {"batch_size": 8, "collate": default_collate, "workers": 1, "device": HERE}
    others = set(multiprocessing.active_children())  # of earlier tests
    windows = TrainLoader(Samples(Sleeps(asleep=-1), unchanged, 0), Order(16, 0), **options).windows(epoch=0)
    next(windows)
    time.sleep(0.5)  # the second batch is ready by now
    [worker] = set(multiprocessing.active_children()) - others
    worker.kill()
    worker.join()
    with pytest.raises(WorkerLost, match=r"DataLoader worker \(pid"):
        list(windows)


def _refused(samples: list[Sample]) -> Sample:
    raise RuntimeError("stack expects each tensor to be equal size")


def test_another_error_of_a_worker_stays_what_it_is() -> None:
    samples = Samples(Ends(0), unchanged, 0)
    loader = TrainLoader(samples, Order(8, 0), batch_size=8, collate=_refused, workers=1, device=HERE)
    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(loader.windows(epoch=0))
    assert not isinstance(caught.value, WorkerLost)


class Sleeps:
    """A source in which one sample never comes."""

    def __init__(self, asleep: int) -> None:
        self.asleep = asleep

    def __len__(self) -> int:
        return 16

    def read(self, index: int) -> Sample:
        if index == self.asleep:
            time.sleep(1e6)
        return {"x": torch.tensor([float(index)])}

    def name(self, index: int) -> str:
        return f"number {index}"


class Unreadable(Sleeps):
    def read(self, index: int) -> Sample:
        if index == self.asleep:
            raise BadSample(self.name(index), "not read within 1 s (data.timeout)")
        return super().read(index)


def _windows(source: Sleeps, **more: Any) -> list[Any]:
    loader = TrainLoader(
        Samples(source, unchanged, 0),
        Order(16, 0),
        batch_size=4,
        collate=default_collate,
        workers=2,
        device=HERE,
        **more,
    )
    found = [batch for window in loader.windows(epoch=0) for batch in window]
    return [(batch.ids, batch.replaced, batch.tensors["x"].tolist()) for batch in found]


def test_a_sample_that_never_comes_is_replaced_as_an_unreadable_one_is() -> None:
    assert _windows(Sleeps(3), timeout=1.0) == _windows(Unreadable(3))


def test_in_evaluation_it_is_left_out() -> None:
    loader = ValLoader(
        ValSamples(Sleeps(3), unchanged, 0),
        batch_size=4,
        collate=default_collate,
        workers=1,
        device=HERE,
        timeout=1.0,
    )
    given_up: list[tuple[str, str]] = []
    loader.given_up = lambda name, reason: given_up.append((name, reason))
    batches = list(loader)
    assert given_up == [("number 3", "not read within 1 s (data.timeout)")]
    assert sorted(number for batch in batches for number in batch.ids) == [n for n in range(16) if n != 3]
    assert [(one.name, one.by) for batch in batches for one in batch.replaced] == [("number 3", -1)]


class Asked(Exception):
    pass


def test_a_wait_for_a_sample_can_be_ended() -> None:
    def asked() -> None:
        raise Asked

    loader = TrainLoader(
        Samples(Sleeps(3), unchanged, 0), Order(16, 0), batch_size=16, collate=default_collate, workers=1, device=HERE
    )
    loader.while_waiting = asked
    began = time.monotonic()
    with pytest.raises(Asked):
        next(loader.windows(epoch=0))
    assert time.monotonic() - began < 30.0
