"""Which class a failed step gets: what the code cannot answer, what was bad before, and what has grown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Stepper, Window
from halfstep.guard.diagnosis.bad_inputs import PriorSteps
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.diagnosis.diagnoser import diagnose as by_hand
from halfstep.guard.verdict import StepHistory, Verdict
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.loss import DynamicScale
from halfstep.step.report import BUFFER_NOT_FINITE
from tests.support.models import plain_model

LOWER = "lower_rate"
HEALTHY = StepHistory(losses=(1.0, 0.9, 0.8, 0.9, 0.7), grad_norms=(1.0, 1.0, 1.0, 1.0, 1.0), rates=(0.1,))


def stepper_of(model: nn.Module, precision: str = "fp32") -> Stepper:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = DynamicScale(init_scale=16.0) if precision == "fp16" else None
    named = resolve_precision_name(precision)
    return Stepper(model, torch.optim.SGD(trained, 1e-3), precision=named, loss_scale=scale, observe=False)


def verdict_on(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, precision: str = "fp32", **known: Any
) -> Verdict:
    stepper = stepper_of(model, precision)
    report = stepper.step(loss_fn, batch)
    assert not report.applied
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason), **known)


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def after(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda model, x: change(model(x).float()).mean()


# -- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("change", "deed"),
    [
        (lambda h: (h * 0) / (h * 0), "divides by zero"),
        (lambda h: (h * 0).log(), "logarithm of 0"),
        (lambda h: (h - 100).log(), "logarithm of a negative number"),
        (lambda h: (h * 0).sqrt() + h, "divides by zero"),
        (lambda h: (h * 0 + 1).acos() + h, "divides by zero"),
        (lambda h: (h * 0).pow(0.5) + h, "divides by zero"),
        (lambda h: torch.logit(h * 0 + 1), "is undefined"),
        (lambda h: h[:0], "averages over nothing"),
        (lambda h: h.masked_fill(h > -99, -torch.inf).softmax(-1), "all -inf"),
        (lambda h: h * float("nan"), "is given nan by the code"),
    ],
)
def test_what_has_no_answer_is_the_codes_and_no_rate_helps(
    change: Callable[[Tensor], Tensor], deed: str, precision: str
) -> None:
    found = verdict_on(plain_model(), after(change), torch.randn(4, 8), precision, history=HEALTHY)
    assert (found.cause, [remedy.kind for remedy in found.remedies]) == ("code", ["fix_code"])
    assert deed in found.sentence
    assert found.culprit is not None
    assert found.culprit.line is not None


@pytest.mark.parametrize("weight", [None, torch.tensor([0.0, 1.0, 1.0, 1.0])])
def test_a_mean_over_labels_of_which_none_counts(weight: Tensor | None) -> None:
    labels = torch.full((4,), -100) if weight is None else torch.zeros(4, dtype=torch.int64)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), labels, weight=weight)

    found = verdict_on(plain_model(), loss_fn, torch.randn(4, 8))
    assert found.cause == "code"
    assert "averages over nothing: every label is ignored, or has weight 0" in found.sentence


def test_label_smoothing_over_a_mask() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        logits = model(x).float()
        hidden = torch.zeros_like(logits, dtype=torch.bool)
        hidden[:, 1] = True
        labels = torch.zeros(len(x), dtype=torch.int64)
        return F.cross_entropy(logits.masked_fill(hidden, -torch.inf), labels, label_smoothing=0.1)

    found = verdict_on(plain_model(), loss_fn, torch.randn(4, 8), "bf16")
    assert found.cause == "code"
    assert "of the -inf that a mask put there" in found.sentence


def test_a_range_that_fp32_lacks_in_a_first_step_is_no_divergence() -> None:
    """Nothing has grown: the code makes such numbers of ordinary ones."""
    found = verdict_on(plain_model(), after(lambda h: (h * 0 + 100).exp()), torch.randn(4, 8))
    assert found.cause == "code"
    assert "overflows fp32 (its largest number is 3.4e+38)" in found.sentence
    assert any("no sign of divergence" in text for text in found.evidence)


# -- divergence ------------------------------------------------------------------------------------------------------


def test_losses_that_have_grown_are_evidence() -> None:
    grown = StepHistory(losses=(1.0, 50.0, 1e5), rates=(0.1, 0.1, 0.1))
    found = verdict_on(plain_model(), after(lambda h: (h * 0).log()), torch.randn(4, 8), history=grown)
    assert found.cause == "divergence"
    assert "the loss went from 1 to 100,000 in 3 steps" in found.sentence
    assert [remedy.kind for remedy in found.remedies] == [LOWER]


def test_a_loss_that_was_as_good_as_zero_may_grow() -> None:
    learnt = StepHistory(losses=(1e-9, 1e-6, 1e-5))
    found = verdict_on(plain_model(), after(lambda h: (h * 0).log()), torch.randn(4, 8), history=learnt)
    assert found.cause == "code"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_norm_that_fp32_cannot_hold_is_reproducible(precision: str) -> None:
    """Every gradient is finite, their squares are not: the step and its rerun judge alike."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model[2].weight.data.mul_(1e15)
    found = verdict_on(model, mse, torch.randn(8, 64), precision)
    assert found.cause == "divergence"
    assert "the norm of the gradients is" in found.sentence
    assert "the largest weight is" in found.sentence


def test_losses_of_micro_batches_whose_sum_does_not_fit() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().sum() * 1e-30 + 3e38

    found = verdict_on(plain_model(), loss_fn, Window([torch.randn(2, 8) for _ in range(3)]))
    assert "the sum of the losses is more than fp32's largest number" in found.sentence
    assert found.cause == "code"


# -- state -----------------------------------------------------------------------------------------------------------


def test_a_weight_that_was_bad_before_the_step() -> None:
    model = plain_model()
    model[2].weight.data.fill_(torch.nan)  # type: ignore[union-attr, operator]
    found = verdict_on(model, mse, torch.randn(4, 8), "bf16", history=HEALTHY, past=PriorSteps(applied=5))
    assert found.sentence == (
        "state: weight 2.weight contains nan before the first operation; "
        "step 5, the last that was applied, was finite, so its update or later code wrote it"
    )
    assert [remedy.kind for remedy in found.remedies] == ["restore"]


@pytest.mark.parametrize(
    ("past", "said"),
    [
        (PriorSteps(400, "step-00000400", 400), "it came with the checkpoint step-00000400"),
        (PriorSteps(0), "it was already bad before the first step"),
        (PriorSteps(450, "step-00000400", 400), "after resuming from step-00000400"),
    ],
)
def test_since_when_and_from_which_checkpoint(past: PriorSteps, said: str) -> None:
    model = plain_model()
    model[0].bias.data.fill_(torch.nan)  # type: ignore[union-attr, operator]
    found = verdict_on(model, mse, torch.randn(4, 8), past=past)
    assert found.cause == "state"
    assert said in found.sentence


def test_a_bad_row_of_a_table_is_named_and_may_not_have_been_used() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2))
    model[0].weight.data[7] = torch.nan
    assert stepper_of(model).step(mse, torch.tensor([1, 2])).applied
    found = verdict_on(model, mse, torch.tensor([1, 7]), past=PriorSteps(3))
    assert found.cause == "state"
    assert "weight 0.weight contains nan in row 7" in found.sentence
    assert "or did not use it" in found.sentence


def test_a_variance_below_zero() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval().running_var.fill_(-1.0)  # type: ignore[operator]
    found = verdict_on(model, mse, torch.randn(4, 8))
    assert found.cause == "state"
    assert "buffer 1.running_var has negative numbers" in found.sentence
    assert found.culprit is not None
    assert found.culprit.outside == "buffer 1.running_var"


def test_weights_of_a_second_network_that_the_loss_function_holds() -> None:
    teachers = {"ema": nn.Linear(8, 4)}
    teachers["ema"].weight.data.fill_(torch.nan)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() - teachers["ema"](x).detach()).square().mean()

    found = verdict_on(plain_model(), loss_fn, torch.randn(4, 8))
    assert found.cause == "state"
    assert "weight teachers['ema'].weight contains nan" in found.sentence


def test_weights_that_a_diverging_run_has_spoilt_are_its_own_fault() -> None:
    model = plain_model()
    model[0].weight.data.fill_(torch.inf)  # type: ignore[union-attr, operator]
    found = verdict_on(model, mse, torch.randn(4, 8), history=StepHistory(losses=(1.0, 1e4, 1e9)))
    assert found.cause == "divergence"


def test_a_moment_of_the_optimizer_that_is_bad_is_told_with_its_weight() -> None:
    model = plain_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=resolve_precision_name("fp32"), observe=False)
    stepper.step(mse, torch.randn(4, 8))
    optimizer.state[model[0].weight]["exp_avg_sq"].fill_(-1.0)  # type: ignore[index]
    assert stepper.step(mse, torch.randn(4, 8)).applied
    found = by_hand(stepper, stepper.step(mse, torch.randn(4, 8)))
    assert found.cause == "state"
    assert found.evidence == ("the optimizer's exp_avg_sq of it is negative",)
    assert "step 2, the last that was applied" in found.sentence


# -- data ------------------------------------------------------------------------------------------------------------


def test_rows_of_a_data_set_that_the_batch_only_points_to() -> None:
    images = torch.randn(16, 8)
    images[9:12] = torch.nan

    def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
        return mse(model, images[rows])

    found = verdict_on(plain_model(), loss_fn, torch.arange(8, 12))
    assert found.cause == "data"
    assert "images contains nan in rows 9, 10, 11, 3 of 16" in found.sentence


def test_numbers_that_were_read_during_the_step() -> None:
    rows = [[1.0] * 8, [float("nan")] * 8]
    found = verdict_on(plain_model(), lambda model, _: mse(model, torch.tensor(rows)), torch.zeros(1))
    assert found.cause == "data"
    assert "test_verdict_classes.py:" in found.sentence


@pytest.mark.parametrize(("precision", "times"), [("fp16", 1e8), ("fp32", 1e30)])
def test_a_batch_that_was_not_normalised(precision: str, times: float) -> None:
    x = torch.randn(6, 8) * times
    found = verdict_on(nn.Linear(8, 4), mse, x, precision, history=HEALTHY)
    assert found.cause == "data"
    assert "divided by its own spread, the step is finite" in found.evidence
    assert LOWER not in [remedy.kind for remedy in found.remedies]


def test_a_large_batch_is_not_blamed_where_it_is_not_to_blame() -> None:
    found = verdict_on(plain_model(), after(lambda h: (h * 0).log()), torch.randn(6, 8) * 1e5, history=HEALTHY)
    assert found.cause == "code"


# -- buffers that a step would spoil ---------------------------------------------------------------------------------


def spoils_statistics(x: Tensor, precision: str = "fp32") -> Verdict:
    """Loss and gradients are finite; the running variance would not be."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    stepper = stepper_of(model, precision)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stepper.step(mse, x)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    assert stepper.attempt is not None
    found = diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=BUFFER_NOT_FINITE)
    assert all(torch.equal(kept[name], buffer) for name, buffer in model.named_buffers())
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sample_that_spoils_running_statistics(precision: str) -> None:
    x = torch.randn(16, 4)
    x[3] = 1e25
    found = spoils_statistics(x, precision)
    assert found.cause == "data"
    assert "the batch, sample 3 reaches 1e+25" in found.sentence
    assert "so buffer 1.running_var is no longer finite" in found.sentence


def test_a_buffer_that_the_code_spoils() -> None:
    class Counts(nn.Module):
        rate: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)
            self.register_buffer("rate", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            self.rate = self.rate / (x.detach().sum() * 0)
            return self.linear(x)

    model = Counts()
    stepper = stepper_of(model)
    stepper.step(mse, torch.randn(4, 8))
    model.rate = torch.ones(1)
    assert stepper.attempt is not None
    found = diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=BUFFER_NOT_FINITE)
    assert found.cause == "code"
    assert "divides by zero, so buffer rate is no longer finite" in found.sentence
    assert torch.equal(model.rate, torch.ones(1))


# -- operators that do not like to be looked at ------------------------------------------------------------------------


def test_a_higher_order_operator_does_not_stop_a_diagnosis() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.b(t), (x,))
            return chosen / 0

    found = verdict_on(Either(), mse, torch.randn(4, 8))
    assert found.cause == "code"
    assert "could not be run again" not in found.sentence
