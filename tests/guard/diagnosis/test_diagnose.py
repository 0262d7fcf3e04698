"""From a failed step to its cause: what each rerun rules out, and what the verdict says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper, Window, island
from halfstep.guard.diagnosis.diagnose import agree_on_verdict, diagnose_attempt
from halfstep.guard.verdict import Culprit, ProposedRemedy, StepHistory, Verdict
from halfstep.precision.island import find_islands
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.loss import DynamicScale
from tests.support.digest import digest_of
from tests.support.models import buffered_model, plain_model

Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, change: Change = torch.tanh) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(8, 8), Middle(change), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x)))


class Middle(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.inner = Inner(change)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h) * 1e-4


class Inner(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, h: Tensor) -> Tensor:
        return self.change(h)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().square().mean()


def verdict_on(
    model: nn.Module,
    loss_fn: Callable[..., Any] = mse,
    batch: Any = None,
    precision: str = "fp32",
    scale: DynamicScale | None = None,
    **known: Any,
) -> Verdict:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    stepper = Stepper(
        model,
        optimizer,
        precision=resolve_precision_name(precision),
        loss_scale=(scale or DynamicScale(init_scale=16.0)) if precision == "fp16" else None,
        observe=False,
    )
    report = stepper.step(loss_fn, (torch.randn(6, 8),) if batch is None else batch)
    assert not report.applied
    assert report.reason is not None
    assert stepper.attempt is not None
    return diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=report.reason, **known)


def large(h: Tensor) -> Tensor:
    return h * 0 + 71204.0


# -- precision -----------------------------------------------------------------------------------------------------


def test_a_number_that_does_not_fit_is_told_with_what_helps() -> None:
    model = Net(large)
    found = verdict_on(model, precision="fp16")
    assert found.cause == "precision"
    assert found.culprit is not None
    assert (found.culprit.operation, found.culprit.module, found.culprit.format) == ("aten.add", "middle.inner", "fp16")
    assert (found.culprit.in_fp32, found.culprit.limit) == (71204.0, 65504.0)
    assert "middle.inner (aten.add, " in found.sentence
    assert "produces 71,204, beyond fp16's maximum of 65,504; an island around middle is finite" in found.sentence
    # An island around the operation alone gives its number back in fp16, where it does not fit: the one round it helps.
    assert found.remedies == (
        ProposedRemedy("island", "middle", True),
        ProposedRemedy("precision", "bf16", True),
        ProposedRemedy("precision", "fp32", True),
        ProposedRemedy("island", "middle.inner", False),
    )
    assert found.evidence == ("an island around middle.inner is not finite either",)
    assert find_islands(model) == {}


def test_the_cure_that_was_told_does_cure() -> None:
    model = Net(large)
    path = verdict_on(model, precision="fp16").remedies[0].target
    island(model, path)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name("fp16"))
    assert stepper.step(mse, (torch.randn(6, 8),)).reason in (None, "gradient_overflow")


def test_what_no_module_has_to_itself_is_to_be_wrapped() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) * 0 + 300).square().mean()

    found = verdict_on(plain_model(), loss_fn, precision="fp16")
    assert found.cause == "precision"
    assert found.sentence.startswith("precision: the loss (aten.pow, ")
    assert found.sentence.endswith("wrap it: halfstep.island(fn)")
    assert [remedy.kind for remedy in found.remedies] == ["precision", "precision"]


def test_fp32_that_cannot_be_run_is_said_and_the_operation_judged_alone() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("no memory for fp32")
        return mse(model, batch)

    found = verdict_on(Net(large), loss_fn, precision="fp16")
    assert found.cause == "precision"
    assert found.evidence[0] == "the whole step could not be run in fp32: OutOfMemoryError: no memory for fp32"
    assert ProposedRemedy("precision", "fp32", None) in found.remedies


# -- the scale -----------------------------------------------------------------------------------------------------


def test_a_scale_that_has_yet_to_fall() -> None:
    found = verdict_on(plain_model(), precision="fp16", scale=DynamicScale(init_scale=2.0**24))
    assert found.cause == "warm_up"
    assert "at a loss scale of 1.67772e+07 and fit without one" in found.sentence
    assert found.culprit is not None
    assert found.culprit.backward


def test_a_scale_that_cannot_fall_is_no_warm_up() -> None:
    scale = DynamicScale(init_scale=2.0**24, floor=2.0**24)
    found = verdict_on(plain_model(), precision="fp16", scale=scale)
    assert found.cause == "precision"
    assert "cannot fall below its floor" in found.sentence


# -- data ----------------------------------------------------------------------------------------------------------


def test_bad_numbers_of_a_batch_are_counted_and_placed() -> None:
    batches = [(torch.randn(4, 8), torch.randn(4)) for _ in range(2)]
    batches[1][0][3, 2:5] = torch.nan
    batches[0][1][0] = torch.inf  # no part of the loss
    found = verdict_on(plain_model(), batch=Window(batches), precision="bf16")
    assert found.cause == "data"
    assert found.sentence == "data: micro-batch 1[0], sample 3 contains nan, one of 3 such numbers"
    assert found.culprit is not None
    assert found.culprit.outside == "the batch[1][0]"
    assert found.remedies[0].kind == "skip"


def test_one_sample_far_from_the_others() -> None:
    x = torch.randn(6, 8).clamp(-2, 2)
    x[4] = 1e30
    found = verdict_on(nn.Linear(8, 4), batch=(x,))
    assert found.cause == "data"
    assert "sample 4 reaches 1e+30, and no other sample exceeds 2" in found.sentence
    # Where the step fails without it as well, it is not to blame.
    assert verdict_on(Net(lambda h: h / 0), batch=(x,)).cause == "code"
    alone = [(torch.randn(1, 8),), (x[4:5],), (torch.randn(1, 8),)]
    assert verdict_on(nn.Linear(8, 4), batch=Window(alone)).sentence.startswith("data: micro-batch 1[0], sample 0")


@pytest.mark.filterwarnings("ignore:note batch.written")
def test_a_batch_that_was_written_to_is_reproducible() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = mse(model, (batch[0].clone(),))
        batch[0].nan_to_num_()
        return loss

    found = verdict_on(plain_model(), loss_fn, (torch.full((6, 8), torch.nan),))
    assert found.cause == "data"
    assert "written to in place" in found.sentence


def test_an_empty_batch_and_one_without_numbers() -> None:
    def empty(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones(0, 8)).mean()

    assert verdict_on(plain_model(), empty, {"words": ["a"], "ids": torch.zeros(0, dtype=torch.int64)}).cause == "code"
    assert "averages over nothing" in verdict_on(plain_model(), empty, (torch.ones(0, 8),)).sentence


# -- divergence ----------------------------------------------------------------------------------------------------


def test_fp32_fails_too() -> None:
    found = verdict_on(Net(lambda h: h / (h.detach() * 0)), precision="bf16", history=StepHistory(rates=(0.25,)))
    assert found.cause == "code"
    assert found.sentence.endswith("divides by zero; the step also fails in fp32")
    assert any(text.startswith("the largest weight is 0.3") for text in found.evidence)
    assert [remedy.kind for remedy in found.remedies] == ["fix_code"]


def test_what_fails_in_fp32_is_named_where_16_bits_fail_earlier() -> None:
    found = verdict_on(Net(lambda h: (h * 0 + 1e5).sin() / 0), precision="fp16")
    assert found.cause == "code"
    assert found.culprit is not None
    assert found.culprit.operation == "aten.div"
    assert any(text.startswith("in fp16 it is middle.inner (aten.add") for text in found.evidence)


def test_a_loss_far_from_those_before_is_not_blamed_on_the_format() -> None:
    near, far = (StepHistory(losses=(loss, loss, loss), rates=(1.0,)) for loss in (1e3, 1e-9))
    assert verdict_on(Net(large), precision="fp16", history=near).cause == "precision"
    found = verdict_on(Net(large), precision="fp16", history=far)
    assert found.cause == "divergence"
    assert "and the median so far is 1e-09" in found.sentence


def test_a_weight_that_is_not_finite() -> None:
    model = plain_model()
    model[2].weight.data[0, 0] = torch.nan  # type: ignore[union-attr, operator, index]
    found = verdict_on(model, precision="fp16")
    assert found.cause == "state"
    assert found.sentence == "state: weight 2.weight contains nan in row 0 before the first operation"
    assert [remedy.kind for remedy in found.remedies] == ["restore"]


# -- what does not happen again --------------------------------------------------------------------------------------


class Now(nn.Module):
    """Fails as often as it is told to."""

    def __init__(self, times: int) -> None:
        super().__init__()
        # In an iterator: a skip and a rerun restore a module's plain attributes and lists.
        self.linear, self.left = nn.Linear(8, 4), iter([torch.nan] * times)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(self.left, 1.0)


def test_what_happens_once() -> None:
    found = verdict_on(Now(1), precision="bf16")
    assert found.cause == "not_reproducible"
    assert found.culprit is None


def test_a_step_that_cannot_be_run_again_does_not_stop_the_run() -> None:
    calls: list[int] = []

    def once(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("gone")
        return mse(model, batch) * torch.nan

    found = verdict_on(plain_model(), once)
    assert "could not be run again: KeyError: 'gone'" in found.sentence


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiled", [True, False])
def test_what_only_compiled_code_does(compiled: bool) -> None:
    torch._dynamo.reset()

    def wrong(graph: Any, _inputs: Any) -> Callable[..., Any]:
        return lambda *given: tuple(out * torch.nan for out in graph(*given))

    model: Any = torch.compile(plain_model(), backend=wrong)
    found = verdict_on(model, compiled=compiled)
    assert found.cause == ("compiler" if compiled else "not_reproducible")
    assert found.remedies[0].kind == ("eager" if compiled else "skip")


def test_a_step_that_a_guard_refused() -> None:
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1e-3), precision=resolve_precision_name("fp32"))
    stepper.step(mse, (torch.randn(6, 8),))
    assert stepper.attempt is not None
    found = diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason="guard:spike")
    assert (found.cause, found.culprit) == ("divergence", None)
    assert "spike refused" in found.sentence


# -- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_diagnosis_leaves_everything_as_it_was(precision: str) -> None:
    model = buffered_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=resolve_precision_name(precision), observe=False)
    x = torch.randn(6, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).float() / 0).mean()

    report = stepper.step(loss_fn, x)
    assert stepper.attempt is not None
    before, state = digest_of(model.state_dict(), stepper.state_dict(), x), torch.get_rng_state()
    diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason))
    assert digest_of(model.state_dict(), stepper.state_dict(), x) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert stepper.step(mse, (x,)).reason in (None, "gradient_overflow")


def test_one_process_agrees_with_itself() -> None:
    culprit = Culprit("aten.mul", "up", True, None, "fp16", ("inf", "nan"), 3.0, None, 65504.0)
    verdict = Verdict("precision", "precision: up", culprit, ("a",), (ProposedRemedy("island", "up", None),))
    assert agree_on_verdict(verdict) == verdict
