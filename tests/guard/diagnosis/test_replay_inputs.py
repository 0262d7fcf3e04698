"""What a rerun is given: the batch, random numbers and modules of the step, and what was usual before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.verdict import StepHistory, Verdict
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment.rerun import ReplayConfig, rerun_step
from halfstep.step.loss import DynamicScale
from tests.support.models import plain_model

FP32 = resolve_precision_name("fp32")


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper_of(model: nn.Module, precision: str = "fp32", scale: DynamicScale | None = None) -> Stepper:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return Stepper(model, optimizer, precision=resolve_precision_name(precision), loss_scale=scale, observe=False)


def verdict_on(
    stepper: Stepper, loss_fn: Callable[..., Any], batch: Any, history: StepHistory | None = None
) -> Verdict:
    report = stepper.step(loss_fn, batch)
    assert report.reason is not None
    assert stepper.attempt is not None
    known = history or StepHistory()
    return diagnose_attempt(
        stepper.model, stepper.attempt, precision=stepper.precision, reason=report.reason, history=known
    )


# -- random numbers and modules of the loss function ---------------------------------------------------------------


def test_random_numbers_of_the_loss_functions_own_are_drawn_again() -> None:
    own = torch.Generator().manual_seed(1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return mse(model, x) + torch.rand(3, generator=own).sum()

    stepper = stepper_of(plain_model())
    report = stepper.step(loss_fn, torch.randn(6, 8))
    assert stepper.attempt is not None
    state = own.get_state()
    assert rerun_step(stepper.model, stepper.attempt, ReplayConfig(FP32)).loss == pytest.approx(report.loss, rel=1e-6)
    assert torch.equal(own.get_state(), state)


@pytest.mark.parametrize("how", ["closed over", "given before", "bound"])
def test_modules_that_the_loss_function_holds_stay_as_they_are(how: str) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def with_teacher(teacher: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
        return (teacher(model(x)) / 0).mean()

    class Task:
        def __init__(self) -> None:
            self.teacher = teacher

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return with_teacher(self.teacher, model, x)

    ways: dict[str, Callable[..., Tensor]] = {
        "closed over": lambda model, x: with_teacher(teacher, model, x),
        "given before": functools.partial(with_teacher, teacher),
        "bound": Task().loss,
    }
    stepper = stepper_of(nn.Linear(8, 4))
    report = stepper.step(ways[how], torch.randn(6, 8))
    gradients = [p.grad for p in teacher.parameters()]
    counted, mean = int(teacher[1].num_batches_tracked), teacher[1].running_mean.clone()  # type: ignore[union-attr, operator, arg-type]
    assert stepper.attempt is not None
    diagnose_attempt(stepper.model, stepper.attempt, precision=FP32, reason=str(report.reason))
    assert int(teacher[1].num_batches_tracked) == counted  # type: ignore[arg-type]
    assert torch.equal(teacher[1].running_mean, mean)  # type: ignore[arg-type]
    assert all(p.grad is g for p, g in zip(teacher.parameters(), gradients, strict=True))


# -- the batch -----------------------------------------------------------------------------------------------------


@dataclass
class Held:
    x: Tensor


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_a_batch_of_a_persons_own_class_that_was_written_to() -> None:
    def loss_fn(model: nn.Module, batch: Held) -> Tensor:
        loss = mse(model, batch.x.clone())
        batch.x.nan_to_num_()
        return loss

    found = verdict_on(stepper_of(plain_model()), loss_fn, Held(torch.full((6, 8), torch.nan)))
    assert found.cause == "data"
    assert "written to in place" in found.sentence


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_what_a_rerun_writes_into_the_batch_is_taken_back() -> None:
    seen: list[float] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.max().item())
        x.mul_(2.0)
        return (model(x) / 0).mean()

    x = torch.ones(4, 8)
    found = verdict_on(stepper_of(plain_model(), "bf16"), loss_fn, x)
    assert len(seen) > 2
    assert seen == [1.0] + [2.0] * (len(seen) - 1)
    assert torch.equal(x, torch.full((4, 8), 2.0))
    assert found.evidence[0] == "the batch was written to in place during the step"


def test_a_batch_that_can_be_read_once_is_not_the_devices_fault() -> None:
    def loss_fn(model: nn.Module, batch: Iterator[Tensor]) -> Any:
        return sum(mse(model, x) for x in batch) * float("nan")

    found = verdict_on(stepper_of(plain_model()), loss_fn, iter([torch.randn(2, 8)]))
    assert found.cause == "data"
    assert "could not be run again" in found.sentence
    assert "not_reproducible" not in found.sentence
    assert found.remedies[0].kind == "fix_code"
    assert "again=" in found.remedies[0].target


# -- what was usual ------------------------------------------------------------------------------------------------


class Large(nn.Module):
    """Too large for fp16, and nearly right."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        nn.init.zeros_(self.inner.weight)
        nn.init.ones_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1e6


@pytest.mark.parametrize(("target", "before", "cause"), [
    (1.1, 1e-8, "precision"),
    (300.0, 1e-8, "divergence"),
    (300.0, 1e3, "precision"),
])  # fmt: skip
def test_a_task_that_is_nearly_learnt_may_jump(target: float, before: float, cause: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() / 1e6 - target).square().mean()

    history = StepHistory((before,) * 6, (before**0.5,) * 6)
    assert verdict_on(stepper_of(Large(), "fp16"), loss_fn, torch.randn(4, 4), history=history).cause == cause


# -- remedies ---------------------------------------------------------------------------------------------------------


def test_cures_are_tried_at_the_scale_that_cannot_fall() -> None:
    """All three layers overflow at it: an island around the first of them is no remedy, though it is finite without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    scale = DynamicScale(init_scale=2.0**14, floor=2.0**14)
    stepper = stepper_of(model, "fp16", scale)
    found = verdict_on(stepper, lambda model, x: model(x).float().mean(), torch.rand(64, 4) * 300)
    assert found.cause == "precision"
    islands = [remedy for remedy in found.remedies if remedy.kind == "island"]
    assert islands
    assert not any(remedy.works for remedy in islands)


# -- the second look -----------------------------------------------------------------------------------------------


def test_what_happened_once_is_looked_at_twice_in_the_same_way() -> None:
    """Gradients overflow at this scale, which says nothing of a loss that was not finite."""
    calls: list[int] = []

    def once(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return mse(model, x) * (torch.nan if len(calls) == 1 else 1.0)

    found = verdict_on(stepper_of(plain_model(), "fp16", DynamicScale(init_scale=2.0**24)), once, torch.randn(6, 8))
    assert found.cause == "not_reproducible"
    assert found.evidence == ("a rerun with the same batch and the same random numbers is finite",)
