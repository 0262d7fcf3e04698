"""The number of workers is measured, bounded, and explained."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data import loader
from halfstep.data.dataset import Order, Sample, Samples
from halfstep.data.loader import ReadPace, choose_workers, choose_workers_for_pace, measure_read_pace


class Slow:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1000

    def read(self, index: int) -> Sample:
        time.sleep(self.seconds)
        return {"x": torch.zeros(1)}

    def name(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize(
    ("pace", "cores", "on_cores", "expected", "because"),
    [
        (ReadPace(0.001, 0.0), 64, False, 0, "sending it"),
        (ReadPace(0.1, 0.0), 2, True, 0, "needs the 2 cores"),
        (ReadPace(0.1, 0.0), 1, True, 0, "needs the 1 core"),
        (ReadPace(0.1, 0.9), 2, True, 2, "90% of it waiting"),
        (ReadPace(0.1, 0.0), 8, True, 2, "leaves 2 of 8 cores"),
        (ReadPace(0.1, 0.0), 64, True, 4, "leaves 4 of 64"),
        (ReadPace(0.01, 0.0), 16, False, 2, "16 cores"),
        (ReadPace(0.4, 0.0), 16, False, 8, "16 cores"),
        (ReadPace(9.0, 0.0), 64, False, 16, "of 180 that would keep up"),
        (ReadPace(0.4, 0.0), 1, False, 1, "1 cores"),
    ],
)
def test_the_choice_and_its_reason(pace: ReadPace, cores: int, on_cores: bool, expected: int, because: str) -> None:
    number, reason = choose_workers_for_pace(pace, cores, on_cores)
    assert number == expected
    assert because in reason


def test_waiting_is_told_from_working() -> None:
    samples = Samples(Slow(0.004), dict, 0)
    pace = measure_read_pace(samples, Order(1000, 0), default_collate, 4)
    assert 0.014 < pace.seconds < 0.2
    assert pace.waiting > 0.5


def test_the_measurement_is_bounded_and_leaves_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LONGEST", 0.1)
    before, begin = torch.get_rng_state(), time.perf_counter()
    number, reason = choose_workers(
        Samples(Slow(0.05), dict, 0), Order(1000, 0), default_collate, 4, cores=8, computes_on_cores=False
    )
    assert time.perf_counter() - begin < 1.0
    assert number >= 2
    assert "ms to read" in reason
    assert torch.equal(before, torch.get_rng_state())
