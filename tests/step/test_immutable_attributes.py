"""Attributes of modules that are no Python numbers, but cannot change either: a skipped step binds them again."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep


class Phase(enum.Enum):
    WARM = 0
    MAIN = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Span(NamedTuple):
    first: Any
    last: Any


@dataclass(frozen=True)
class Statistics:
    count: int


BEFORE_AND_AFTER: dict[str, tuple[Any, Any]] = {
    "float64": (np.float64(0.5), np.float64(1.5)),
    "float32": (np.float32(0.5), np.float32(1.5)),
    "float16": (np.float16(0.5), np.float16(1.5)),
    "int64": (np.int64(0), np.int64(1)),
    "uint8": (np.uint8(0), np.uint8(1)),
    "bool_": (np.bool_(False), np.bool_(True)),
    "complex64": (np.complex64(1j), np.complex64(2j)),
    "str_": (np.str_("warm"), np.str_("main")),
    "datetime64": (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    "Fraction": (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "Decimal": (decimal.Decimal("0.1"), decimal.Decimal("0.2")),
    "Enum": (Phase.WARM, Phase.MAIN),
    "Flag": (Flags.A, Flags.A | Flags.B),
    "range": (range(3), range(4)),
    "slice": (slice(3), slice(4)),
    "frozenset": (frozenset({1}), frozenset({1, 2})),
    "timedelta": (datetime.timedelta(seconds=1), datetime.timedelta(seconds=2)),
    "datetime": (datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
    "tuple of them": ((Phase.WARM, np.int64(0)), (Phase.MAIN, np.int64(1))),
    "named tuple of them": (Span(np.int64(0), range(1)), Span(np.int64(1), range(2))),
    "another type": (0, np.int64(1)),
    "frozen dataclass": (Statistics(0), Statistics(1)),
    "path": (Path("a"), Path("b")),
    "memory_format": (torch.contiguous_format, torch.channels_last),
    "layout": (torch.strided, torch.sparse_coo),
    "Ellipsis": (..., None),
}


class Model(nn.Module):
    """Rebinds an attribute in forward, next to a buffer that belongs to it."""

    def __init__(self, before: Any, after: Callable[[], Any]) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.state, self._after = before, after

    def forward(self, x: Tensor) -> Tensor:
        self.state = self._after()
        self.seen += 1
        self.added = self.state
        out: Tensor = self.net(x)
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize("name", BEFORE_AND_AFTER)
@pytest.mark.parametrize("form", ["function", "calls"])
@pytest.mark.parametrize("applied", [0, 2])
def test_a_skipped_step_binds_the_value_again(name: str, form: str, applied: int) -> None:
    before, after = BEFORE_AND_AFTER[name]
    values = iter([before] * applied + [after])
    model = Model(before, lambda: next(values))
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")

    def step(x: Tensor) -> halfstep.StepReport:
        if form == "function":
            return stepper.step(loss_fn, x)
        with stepper.forward():
            loss = loss_fn(model, x)
        stepper.backward(loss)
        return stepper.apply()

    for _ in range(applied):
        assert step(torch.ones(2, 4)).applied
    report = step(torch.full((2, 4), float("nan")))
    assert not report.applied
    assert model.state is before
    assert int(model.seen) == applied, "the buffer that belongs to it"
    assert ("added" in vars(model)) == (applied > 0), "an attribute that the skipped step has added"


def test_an_applied_step_keeps_the_value() -> None:
    model = Model(Phase.WARM, lambda: Phase.MAIN)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    assert stepper.step(loss_fn, torch.ones(2, 4)).applied
    assert model.state is Phase.MAIN
