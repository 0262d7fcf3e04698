"""Looking again: after changes and now and then, never at compiled code, and never ending a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.observe.precision_check import (
    ObservationSchedule,
    PrecisionObserver,
    RepeatedPrecisionObserver,
    can_observe_again,
)
from halfstep.precision.precision import resolve_precision_name


class Switches(nn.Linear):
    wide = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.wide):
            return super().forward(x)


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, **options: Any) -> Stepper:
    return Stepper(
        model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name("bf16"), **options
    )


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Any:
    from torch._dynamo.utils import counters

    counters.clear()


def test_at_the_tenth_update_and_then_at_ten_times_as_many() -> None:
    looks = ObservationSchedule()
    due = [applied for applied in range(100_001) if looks.due(applied)]
    assert due == [10, 100, 1000, 10_000, 100_000]
    assert not looks.due(100_000)
    resumed = ObservationSchedule()
    assert [resumed.due(5_000), resumed.due(5_001), resumed.due(10_000)] == [True, False, True]


@pytest.mark.wording
def test_a_change_in_a_run_that_has_been_going_is_told_and_ends_nothing() -> None:
    stepper = make(Switches(8, 8))
    for _ in range(3):
        assert stepper.step(mse, torch.randn(4, 8)).applied
    stepper.model.wide = True  # type: ignore[assignment]
    stepper.counts.applied = 1000
    with pytest.warns(UserWarning, match=r"bf16 was requested, but now.*fp32 100 %"):
        assert stepper.step(mse, torch.randn(4, 8)).applied
    assert [finding.id for finding in stepper.findings] == ["precision.changed"]
    assert not isinstance(stepper._scope, PrecisionObserver)


def test_it_looks_again_when_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    stepper = make(model)
    stepper.step(mse, torch.randn(4, 8))
    first = stepper.observed
    model.append(nn.Linear(8, 2))
    stepper.step(mse, torch.randn(4, 8))
    assert stepper.observed is not None
    assert first is not None
    assert sum(stepper.observed.flops.values()) > sum(first.flops.values())


@pytest.mark.parametrize(("beside", "looks"), [(nn.Identity, 1), (lambda: nn.Linear(8, 8), 2)])
def test_it_looks_again_at_modules_of_the_loss_function_that_hold_a_tensor(beside: Any, looks: int) -> None:
    """A metric is a module too, and is handed to the loss function in some of the steps only."""
    stepper, seen = make(nn.Linear(8, 8)), []
    for module in (None, beside(), None):
        stepper.step(lambda model, x, m=module: mse(model, x if m is None else m(x)), torch.randn(4, 8))
        seen.append(stepper.observed)
    assert len({id(observed) for observed in seen[:2]}) == looks


def test_a_run_without_observation_is_never_looked_at() -> None:
    stepper = make(nn.Linear(8, 8), observe=False)
    stepper.counts.applied = 1000
    stepper.step(mse, torch.randn(4, 8))
    assert stepper.observed is None


def test_compiled_code_is_looked_at_once() -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(nn.Linear(8, 8), backend="eager")
    assert not can_observe_again(model)
    stepper = make(model)
    stepper.step(mse, torch.randn(4, 8))
    stepper.counts.applied = 1000
    stepper.step(mse, torch.randn(4, 8))
    assert not isinstance(stepper._scope, RepeatedPrecisionObserver)
    inner = torch.compile(lambda x: x * 2, backend="eager")
    inner(torch.ones(2))
    assert not can_observe_again(nn.Linear(2, 2))  # a loss may be compiled where no module shows it
    torch._dynamo.reset()


def test_a_second_look_changes_no_bit() -> None:
    def run(applied: int) -> Tensor:
        torch.manual_seed(3)
        stepper = make(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
        for _ in range(3):
            stepper.step(mse, torch.randn(4, 8))
            stepper.counts.applied += applied
        return torch.cat([p.detach().flatten() for p in stepper.model.parameters()])

    assert torch.equal(run(0), run(1000))
