"""A learning rate that explodes in the first updates, and an update that writes NaN: decided by a rerun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.errors import Diverged

LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "exp": lambda m, x: F.mse_loss(m(x)[:, :2], x[:, :2]) + (m(x)[:, 2:].exp() - m(x)[:, 2:]).mean(),
    "log": lambda m, x: -(torch.log(torch.sigmoid(m(x))) + torch.log(1 - torch.sigmoid(m(x)))).mean(),
    "cosh": lambda m, x: (torch.cosh(m(x)) - m(x) * 3).mean(),
}


def _end(
    optimizer: Callable[[Any], torch.optim.Optimizer], loss: Callable[[nn.Module, Tensor], Tensor], mode: Any = "watch"
) -> Diverged:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias[3] = -99.0  # a unit that never fires
    limits = halfstep.Limits(rollbacks=0) if mode == "repair" else halfstep.Limits()
    stepper = halfstep.Stepper(model, optimizer(model.parameters()), precision="fp32")
    guardian = halfstep.Guardian(stepper, mode=mode, limits=limits, tell=lambda event: None)

    def train() -> None:
        for _ in range(40):
            guardian.step(loss, torch.randn(16, 8))

    with pytest.raises(Diverged) as caught:
        train()
    return caught.value


@pytest.mark.parametrize("mode", ["watch", "repair"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_rate_that_is_far_too_high_is_a_divergence(name: str, mode: str) -> None:
    error = _end(lambda p: torch.optim.Adam(p, 300.0), LOSSES[name], mode)
    assert error.cause == "divergence"
    assert "optimizer.lr=" in error.do


def test_code_without_a_result_is_still_code() -> None:
    # It fails with any weights.
    calls = iter(range(100))
    error = _end(
        lambda p: torch.optim.Adam(p, 300.0), lambda m, x: m(x).square().mean() / (0.0 if next(calls) > 0 else 1.0)
    )
    assert error.cause == "code"


def test_an_update_that_writes_nan_is_named() -> None:
    error = _end(lambda p: torch.optim.Adam(p, 1e-2, eps=0.0), lambda m, x: m(x).square().mean())
    assert error.cause == "state"
    assert "its update wrote it" in error.given
    assert "eps=0" in error.do


@pytest.mark.parametrize("by", ["in place", "data"])
def test_weights_that_other_code_has_written_are_no_divergence(by: str) -> None:
    model = nn.Linear(8, 4)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision="fp32")
    guardian = halfstep.Guardian(stepper, tell=lambda event: None)

    def train() -> None:
        for i in range(20):
            if i == 5:
                with torch.no_grad():
                    (model.weight.data if by == "data" else model.weight).fill_(90.0)
            guardian.step(lambda m, x: m(x).abs().exp().mean(), torch.ones(16, 8))

    with pytest.raises(Diverged) as caught:
        train()
    assert caught.value.cause == "code"
