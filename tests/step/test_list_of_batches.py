"""A list of batches in place of a `Window`: the error names what to type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.errors import WrongUse


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def make() -> halfstep.Stepper:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_batches_is_no_window(kind: Any) -> None:
    stepper = make()
    batches = [(torch.randn(4, 3), torch.randn(4, 1)), (torch.randn(4, 3), torch.randn(4, 1))]
    with pytest.raises(WrongUse) as caught:
        stepper.step(loss_fn, kind(batches))
    assert "halfstep.Window(batches)" in caught.value.do
    assert "halfstep.windows(loader, 2)" in caught.value.do
    assert isinstance(caught.value.__cause__, TypeError)
    assert stepper.step(loss_fn, halfstep.Window(batches)).applied, "the window is closed after the error"


@pytest.mark.parametrize(
    "batch",
    [
        ("text", torch.randn(4, 1)),
        ([torch.randn(3)], [{"boxes": torch.randn(3)}]),
        [],
    ],
)
def test_the_error_of_another_batch_is_the_loss_functions(batch: Any) -> None:
    def fail(_model: nn.Module, _batch: Any) -> Tensor:
        raise TypeError("of the loss function")

    with pytest.raises(TypeError, match="of the loss function"):
        make().step(fail, batch)
