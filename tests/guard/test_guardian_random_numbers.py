"""A diagnosis takes no random numbers from the run: with a guardian or without, the run is the same to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfstep import Guardian, Stepper, diagnose
from tests.support.digest import digest_of_run
from tests.support.random_streams import OwnStreams, augment, loss_fn, read_streams, seed_streams, small_model

STEPS, BAD = 200, (11, 50, 90, 120, 199)


class Counted:
    """The shared generators' loss function, with its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: torch.nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        return loss_fn(model, batch)

    def read(self) -> list[Any]:
        return []


def _train(make_loss: Callable[[], Any], precision: str, guard: str) -> tuple[list[Any], int]:
    """All that a run leaves behind, and how often it called the loss function."""
    seed_streams(1)
    loss = make_loss()
    model = small_model()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision=precision)
    guardian = None if guard in ("", "by hand") else Guardian(stepper, mode=guard, tell=lambda event: None)  # type: ignore[arg-type]
    reports = []
    for step in range(STEPS):
        x = augment(torch.zeros(4, 8))
        if step in BAD:
            x[random.randrange(4), int(np.random.randint(8))] = torch.nan
        report = (guardian or stepper).step(loss, x)
        if guard == "by hand" and not report.applied:
            diagnose(stepper, report)
        reports.append((report.reason, repr(report.loss)))
    assert guardian is None or not guardian.remedies.placed
    return [reports, digest_of_run(stepper), read_streams(), loss.read()], loss.calls


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("guard", ["watch", "repair", "by hand"])
@pytest.mark.parametrize("make_loss", [Counted, OwnStreams])
def test_a_run_with_diagnoses_is_the_run_without(make_loss: Callable[[], Any], guard: str, precision: str) -> None:
    (plain, calls), (guarded, more) = (_train(make_loss, precision, each) for each in ("", guard))
    assert [reason for reason, _ in plain[0]].count("loss_not_finite") == len(BAD)
    assert more >= calls + len(BAD)
    for one, other in zip(plain, guarded, strict=True):
        assert one == other


def test_all_reruns_of_a_diagnosis_draw_the_same_numbers() -> None:
    seed_streams(1)
    own, drawn = OwnStreams(), list[list[Any]]()

    def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        drawn.append([random.random(), float(np.random.rand()), own.read(), float(torch.rand(()))])
        return own(model, batch) / 0.0

    model = small_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision="bf16", observe=False)
    diagnose(stepper, stepper.step(loss, torch.randn(4, 8)))
    first, again, *more = drawn
    assert len(more) >= 1
    assert all(each == again for each in more)
    # torch's are those of the failed step; Python's and NumPy's before it are not recorded.
    assert again[-1] == first[-1]
    assert again[2][-1] == first[2][-1]
    assert again[:2] != first[:2]


class Noisy(torch.nn.Module):
    """A layer with its own generators, as private attributes."""

    def __init__(self) -> None:
        super().__init__()
        self._numpy, self._draw = np.random.default_rng(1), random.Random(1).random

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.from_numpy(self._numpy.standard_normal(x.shape)).to(x) + 0.1 * self._draw()


def test_generators_of_a_layer_are_the_runs() -> None:
    def train(guarded: bool) -> list[Any]:
        seed_streams(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), Noisy())
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-2), precision="fp32", check=guarded)
        step = Guardian(stepper, tell=lambda event: None).step if guarded else stepper.step
        for number in range(6):
            step(loss_fn, augment(torch.zeros(4, 8)) / (0.0 if number == 3 else 1.0))
        return [digest_of_run(stepper), repr(model[1]._numpy.bit_generator.state), model[1]._draw()]

    assert train(True) == train(False)


def test_an_error_in_a_rerun_leaves_the_streams_of_the_run() -> None:
    seed_streams(1)
    own, model = OwnStreams(), small_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision="fp32", observe=False)

    def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        found = loss_fn(model, batch) + own(model, batch)
        if own.calls > 1:
            raise StopIteration
        return found

    report = stepper.step(loss, torch.full((4, 8), torch.nan))
    before = [read_streams(), own.read()]
    assert diagnose(stepper, report).cause == "data"
    assert own.calls > 1
    assert [read_streams(), own.read()] == before
