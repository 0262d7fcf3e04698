"""Whose fault a failed step is: the user's on_gradients, a loss that grows on purpose, a batch that the step writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper, diagnose
from halfstep.guard.diagnosis.diagnose import diagnose_attempt as diagnose_inputs
from halfstep.guard.verdict import GuardEvent, Verdict
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.loss import DynamicScale
from tests.support.digest import digest_of
from tests.support.models import plain_model


def mse(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


def last_verdict(
    loss_fn: Callable[..., Any],
    good: Iterable[Any],
    bad: Any,
    *,
    precision: str = "fp32",
    build: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 1e-4),
    spoil: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> Verdict:
    """Return the verdict on the step with the batch `bad`, after applied steps with those of `good`."""
    model, told = plain_model(), list[GuardEvent]()
    scale = DynamicScale(init_scale=16.0) if precision == "fp16" else None
    named = resolve_precision_name(precision)
    stepper = Stepper(model, build(model.parameters()), precision=named, loss_scale=scale, observe=False, **options)
    guardian = Guardian(stepper, tell=told.append)
    for batch in good:
        assert guardian.step(loss_fn, batch).applied
    spoil(model)
    weights = digest_of(dict(model.named_parameters()))
    for _ in range(3):
        assert not guardian.step(loss_fn, bad).applied
        if any(event.kind == "verdict" for event in told):
            break  # while a loss scale falls, the third skip is the first that is diagnosed
    assert digest_of(dict(model.named_parameters())) == weights
    return Verdict.from_dict([event.facts for event in told if event.kind == "verdict"][-1])


# -- on_gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_on_gradients_that_divides_by_zero_is_named_with_its_line(precision: str) -> None:
    divisor: list[float] = []

    def edit(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(parameter.grad.norm() * (0.0 if divisor else 1.0))

    x = torch.randn(6, 8)
    found = last_verdict(
        mse, [(x,)] * 3, (x,), precision=precision, on_gradients=edit, spoil=lambda model: divisor.append(0.0)
    )
    assert found.cause == "code"
    assert "finite before on_gradients and not after it: on_gradients (aten.div_, " in found.sentence
    assert found.sentence.endswith("divides by zero")
    assert found.culprit is not None
    assert (found.culprit.line or "").rpartition(":")[0].endswith("test_diagnose_origin.py")
    assert [remedy.kind for remedy in found.remedies] == ["fix_code"]


def test_an_on_gradients_outside_torchs_sight_is_named_without_a_line() -> None:
    def edit(parameters: list[Tensor]) -> None:
        parameters[0].grad.numpy()[:] = float("nan")  # type: ignore[union-attr]

    found = last_verdict(mse, [], (torch.randn(6, 8),), on_gradients=edit)
    assert found.cause == "code"
    assert found.sentence.endswith("on_gradients and not after it: the gradient of 0.weight is not finite")
    assert found.remedies[0].target == "change on_gradients: the gradient of 0.weight is not finite"


def test_an_on_gradients_that_fails_once_cannot_be_reproduced() -> None:
    left = [float("nan")] * 3

    def edit(parameters: list[Tensor]) -> None:
        if left:
            parameters[0].grad.mul_(left.pop())  # type: ignore[union-attr]

    found = last_verdict(mse, [], (torch.full((6, 8), torch.inf),), on_gradients=edit)
    assert found.cause == "data"  # the batch explains the failure: on_gradients is not run for it
    left[:] = [float("nan")]
    model = plain_model()
    told = list[GuardEvent]()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", on_gradients=edit)
    assert not Guardian(stepper, tell=told.append).step(mse, (torch.randn(6, 8),)).applied
    assert told[-1].facts["cause"] == "not_reproducible"
    for words in ("Python state", "random numbers outside torch", "non-deterministic operation", "the device"):
        assert words in told[-1].text


def test_a_diagnosis_restores_the_tensors_that_on_gradients_holds() -> None:
    average, seen = torch.zeros(()), list[float]()

    def edit(parameters: list[Tensor]) -> None:
        average.add_(1.0)
        seen.append(average.item())
        parameters[0].grad.mul_(torch.nan)  # type: ignore[union-attr]

    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", on_gradients=edit)
    Guardian(stepper, tell=lambda event: None).step(mse, (torch.randn(6, 8),))
    assert seen == [1.0, 2.0]
    assert average.item() == 1.0


def test_on_gradients_is_given_what_the_step_gives_it() -> None:
    """Unscaled, of all micro-batches, in the order of the optimizer."""
    seen: list[list[Tensor]] = []

    def edit(parameters: list[Tensor]) -> None:
        seen.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        parameters[0].grad.mul_(torch.nan)  # type: ignore[union-attr]

    model = plain_model()
    reverse = torch.optim.SGD(list(model.parameters())[::-1], 0.1)
    scale = DynamicScale(init_scale=16.0, floor=16.0)
    stepper = Stepper(model, reverse, precision="fp16", loss_scale=scale, on_gradients=edit)
    Guardian(stepper, tell=lambda event: None).step(mse, (torch.randn(6, 8),))
    assert len(seen) == 2
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first, second)


# -- losses that grow on purpose -----------------------------------------------------------------------------------


def annealed(model: nn.Module, batch: tuple[Tensor, float, float]) -> Tensor:
    """A loss with a weight, and the logarithm of a sum that may be empty."""
    out = model(batch[0]).float()
    return out.square().mean() * batch[1] + (out.softmax(-1)[:, 0] * batch[2]).sum().log() * 1e-6


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda p: torch.optim.SGD(p, 1e-4), {}),
        (lambda p: torch.optim.SGD(p, 1e-5, momentum=0.9), {}),
        (lambda p: torch.optim.SGD(p, 1.0), {"clip_norm": 0.01}),
        (lambda p: torch.optim.AdamW(p, 1e-3), {}),
    ],
)
def test_a_logarithm_of_zero_under_a_weight_that_is_warmed_up_is_the_codes(build: Any, options: Any) -> None:
    x = torch.randn(6, 8)
    good = [(x, 10.0 ** (k - 5), 1.0) for k in range(7)]
    found = last_verdict(annealed, good, (x, 10.0, 0.0), build=build, **options)
    assert found.cause == "code"
    assert "takes the logarithm of 0" in found.sentence
    (told,) = (line for line in found.evidence if "the loss went from" in line)
    assert "no update was large enough to be the cause" in told


def test_the_same_with_updates_as_large_as_the_weights_is_a_divergence() -> None:
    x = torch.randn(6, 8)
    good = [(x, 10.0 ** (k - 5), 1.0) for k in range(7)]
    found = last_verdict(annealed, good, (x, 10.0, 0.0), build=lambda p: torch.optim.AdamW(p, 1.0))
    assert found.cause == "divergence"
    assert "the loss went from" in found.sentence


def test_a_weight_that_is_lost_while_the_loss_grows_on_purpose_is_state() -> None:
    def lose(model: nn.Module) -> None:
        next(model.parameters()).data[0, 0] = torch.nan

    x = torch.randn(6, 8)
    good = [(x, 10.0 ** (k - 5), 1.0) for k in range(7)]
    assert last_verdict(annealed, good, (x, 10.0, 1.0), spoil=lose).cause == "state"


def test_an_overflow_of_fp16_while_the_loss_grows_on_purpose_is_the_precisions() -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
        return (model(batch[0]).square() * batch[1]).mean().float()

    x = torch.randn(6, 8)
    good = [(x, 10.0**k) for k in range(-2, 4)]
    found = last_verdict(loss_fn, good, (x, 6e5), precision="fp16", build=lambda p: torch.optim.SGD(p, 1e-9))
    assert found.cause == "precision"


# -- batches that the step writes to -------------------------------------------------------------------------------


def written_by(write: Callable[[Sequence[Tensor]], object]) -> Callable[..., Tensor]:
    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        write(batch)
        return mse(model, batch)

    return loss_fn


def with_value(value: float) -> Tensor:
    x = torch.rand(6, 8) + 1.0
    x[3, 5] = value
    return x


@pytest.mark.filterwarnings("ignore:note batch.written")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_batch_that_the_code_divides_by_zero_is_the_codes(precision: str) -> None:
    batch = torch.randn(6, 8), torch.zeros(())
    found = last_verdict(written_by(lambda b: b[0].div_(b[1])), [], batch, precision=precision)
    assert found.cause == "code"
    assert "(aten.div_, " in found.sentence
    assert "divides by zero" in found.sentence
    assert any("the batch[0], sample 0 contains" in line for line in found.evidence)
    assert not batch[0].isfinite().any()  # as the step left it


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_a_step_from_disk_does_not_know_which_tensors_were_written() -> None:
    """Its versions are empty: each tensor of the batch may have been written to."""
    model, batch = plain_model(), (torch.randn(6, 8), torch.zeros(()))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", observe=False)
    report = stepper.step(written_by(lambda b: b[0].div_(b[1])), batch)
    assert stepper.attempt is not None
    unknown = stepper.attempt._replace(versions=())
    found = diagnose_inputs(model, unknown, precision=stepper.precision, reason=str(report.reason))
    assert found.cause == "code"


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_a_logarithm_that_the_code_writes_into_its_batch_is_the_codes() -> None:
    found = last_verdict(written_by(lambda b: b[0].log_()), [], (with_value(0.0),))
    assert found.cause == "code"
    assert "takes the logarithm of 0" in found.sentence


@pytest.mark.filterwarnings("ignore:note batch.written")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "write",
    [
        lambda b: b[0].sub_(1.0).div_(2.0),
        lambda b: b[0].sub_(b[0].nan_to_num().mean()).div_(b[0].nan_to_num(0, 0, 0).std()),
        lambda b: b[0].div_(4.0).log_(),  # a second time it would be the logarithm of negative numbers
    ],
)
def test_a_batch_that_came_so_and_is_written_in_place_is_data(value: float, write: Any) -> None:
    found = last_verdict(written_by(write), [], (with_value(value),))
    assert found.cause == "data"
    assert "the batch[0], sample 3 contains" in found.sentence
    assert "its original values are unknown" in found.sentence
    assert [remedy.kind for remedy in found.remedies] == ["fix_code", "skip"]


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_another_tensor_of_the_batch_that_is_written_excuses_nothing() -> None:
    batch = with_value(torch.nan), torch.ones(3)
    found = last_verdict(written_by(lambda b: b[1].add_(1.0)), [], batch)
    assert found.cause == "data"
    assert found.sentence == "data: the batch[0], sample 3 contains nan"
    assert [remedy.kind for remedy in found.remedies] == ["skip"]


# -- Python state --------------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Python state of every plain kind, and a tensor that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.last, self.sizes = nn.Linear(8, 4), 0, "", (0,)
        self.carried = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last, self.sizes, self.cache = self.calls + 1, f"call {self.calls}", (*self.sizes, len(x)), x
        self.carried.add_(1.0)
        return self.linear(x) / 0


def test_a_rerun_restores_plain_attributes() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), torch.zeros(6, 4))

    model = Remembers()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", observe=False)
    report = stepper.step(loss_fn, torch.randn(6, 8))
    before, carried = dict(vars(model)), model.carried.clone()
    assert diagnose(stepper, report).cause == "code"
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())
    assert torch.equal(model.carried, carried)
