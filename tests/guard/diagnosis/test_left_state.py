"""State that a skipped step leaves behind: the verdict names the attempt, and neither the samples nor a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import Diverged


class Held:
    """An object of a class that no skip restores."""

    def __init__(self) -> None:
        self.h = torch.zeros(8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.held = nn.Linear(8, 8), Held()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x + self.held.h)
        self.held.h = y.detach().mean(0) * 0.5
        return y


def _in_a_module() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    return Recurrent(), lambda m, x: m(x).square().mean()


def _in_a_closure() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    carried = [torch.zeros(8)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x + carried[0])
        carried[0] = y.detach().mean(0) * 0.5
        return y.square().mean()

    return nn.Linear(8, 8), loss


def _run(
    model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], bad: int | None
) -> tuple[halfstep.errors.Diverged, list[str]]:
    texts: list[str] = []
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.01), precision="fp32")
    guardian = halfstep.Guardian(stepper, tell=lambda event: texts.append(event.text))

    def train() -> None:
        for i in range(20):
            guardian.step(loss, torch.full((4, 8), float("nan")) if i == bad else torch.ones(4, 8))

    with pytest.raises(Diverged) as caught:
        train()
    return caught.value, texts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [_in_a_module, _in_a_closure])
def test_the_verdict_names_the_attempt_that_left_it(build: Callable[[], tuple[nn.Module, object]]) -> None:
    error, texts = _run(*build(), bad=3)  # type: ignore[arg-type]
    assert texts[0].startswith("data: the batch, sample 0 contains nan")
    assert error.cause == "state"
    assert "the skipped attempt 4 left" in error.given
    assert "include()" in error.do
    assert "checkpoint" not in str(error)
    assert "samples" not in str(error)


@pytest.mark.filterwarnings("ignore")
def test_a_data_set_of_the_loss_function_is_still_data() -> None:
    rows = torch.ones(20, 8)
    rows[3:] = float("nan")
    turn = iter(range(100))
    now = [0]

    def loss(model: nn.Module, _x: Tensor) -> Tensor:
        at: Tensor = model(rows[now[0] : now[0] + 1])
        return at.mean()

    model = nn.Linear(8, 8)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.01), precision="fp32")
    guardian = halfstep.Guardian(stepper)

    def train() -> None:
        for _ in range(20):
            now[0] = next(turn)
            guardian.step(loss, torch.ones(1, 8))

    with pytest.raises(Diverged) as caught:
        train()
    assert caught.value.cause == "data"
    assert "rows 3, 4" in caught.value.given
