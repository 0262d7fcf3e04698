"""Optimizers of torch, timm and pytorch_optimizer in a Stepper: as in a plain loop, also skipped and resumed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from benchmarks.optimizers import FAILED, OK, OWN, REFUSED, Row, classes, examine, same
from halfstep.step.optimizer_slot import OptimizerSlot

SOME = (
    "torch.optim.AdamW",
    "torch.optim.SGD",
    "torch.optim.Adafactor",
    "torch.optim.SparseAdam",
    "timm.optim.Adan",
    "timm.optim.Adopt",
    "timm.optim.Lamb",
    "timm.optim.Lookahead",
    "timm.optim.Mars",
    "timm.optim.NvNovoGrad",
)
"""Among them those that write options into their groups while they step."""


def examined(name: str, kind: Any) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the packages
        return examine(name, kind)


@pytest.mark.parametrize("name", SOME)
def test_a_class_trains_skips_and_resumes_as_in_a_plain_loop(name: str) -> None:
    package, _, own = name.rpartition(".")
    assert examined(name, getattr(pytest.importorskip(package), own)) == Row(name)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_class_does_so_or_cannot_be_stepped_in_a_plain_loop() -> None:
    rows = [examined(name, kind) for name, kind in classes()[0].items()]
    assert [row for row in rows if row.failed] == []
    assert sum(row.counted for row in rows) >= len(SOME)


# -- the comparison can fail ----------------------------------------------------------------------------------------


class Forgetful(torch.optim.SGD):
    """Grows its learning rate by an attribute that no state has."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.param_groups[0]["lr"] = 0.01 * self.steps
        return super().step(closure)


class Draws(torch.optim.SGD):
    """Has other bits in every run."""

    runs = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Draws.runs += 1
        self.param_groups[0]["lr"] = 0.01 * Draws.runs


def test_a_class_that_does_not_save_what_it_needs_is_its_own() -> None:
    row = examine("Forgetful", Forgetful)
    assert (row.equal, row.skip, row.resume) == (OK, OK, OWN)


def test_other_bits_are_a_failure() -> None:
    row = examine("Draws", Draws)
    assert (row.equal, row.skip, row.resume) == (FAILED, FAILED, FAILED)


def test_a_state_that_is_not_loaded_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptimizerSlot, "load_state_dict", lambda self, state: None)
    row = examine("torch.optim.AdamW", torch.optim.AdamW)
    assert (row.equal, row.skip, row.resume) == (OK, OK, FAILED)


def test_a_class_that_needs_a_closure_is_refused_and_not_counted() -> None:
    row = examine("torch.optim.LBFGS", torch.optim.LBFGS)
    assert row.equal == REFUSED
    assert not row.counted


def test_one_bit_is_seen() -> None:
    one = {"a": [torch.tensor([1.0, float("nan")])], "b": (1, 0.5)}
    assert same(one, {"a": [torch.tensor([1.0, float("nan")])], "b": (1, 0.5)})
    assert not same(one, {"a": [torch.tensor([1.0 + 2**-23, float("nan")])], "b": (1, 0.5)})
    assert not same(one, {"a": [torch.tensor([1.0, 2.0])], "b": (1, 0.5)})
    assert not same(one, {"a": [torch.tensor([1.0, float("nan")])], "b": (1, 1)})
    assert not same(one, {"a": [torch.tensor([1.0, float("nan")], dtype=torch.float64)], "b": (1, 0.5)})
