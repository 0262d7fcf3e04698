"""What a rerun writes is put back to the bit, and what it does not write is not copied."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Guardian, Stepper
from halfstep.guard.diagnosis import diagnose as diagnosis
from halfstep.guard.diagnosis.diagnose import diagnose_attempt, estimate_diagnosis_cost
from halfstep.guard.diagnosis.diagnoser import diagnose as by_hand
from halfstep.guard.diagnosis.trials import Trials
from halfstep.guard.verdict import GuardEvent
from halfstep.observe.reachable import find_generators, iterate_reachable
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment import rerun
from tests.support.digest import digest_of
from tests.support.models import plain_model


class Byol(nn.Module):
    """A target network that forward moves towards the one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(8, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.online.parameters(), self.target.parameters(), strict=True):
                its.lerp_(mine, 0.1)
        return (self.online(x) - self.target(x.flip(0))).square().mean()


def stepper_of(model: nn.Module) -> Stepper:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Stepper(model, torch.optim.SGD(trained, 0.5), precision=resolve_precision_name("fp32"))


def call(model: nn.Module, x: Any) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_that_forward_writes_are_put_back() -> None:
    model = Byol()
    stepper = stepper_of(model)
    stepper.step(call, torch.randn(4, 8))
    report = stepper.step(call, torch.full((4, 8), torch.nan))
    before = digest_of(model.state_dict())
    by_hand(stepper, report)
    assert digest_of(model.state_dict()) == before


def test_weights_of_a_network_beside_the_model_are_put_back() -> None:
    model, teacher = plain_model(), nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher[0].weight.mul_(0.9)  # type: ignore[union-attr, operator]
            target = teacher(x)
        return (model(x) - target).square().mean() / 0

    stepper = stepper_of(model)
    report = stepper.step(loss_fn, torch.randn(4, 8))
    before = digest_of(teacher.state_dict())
    assert by_hand(stepper, report).cause == "code"
    assert digest_of(teacher.state_dict()) == before


class Rebinds(nn.Module):
    """Sets other data, and another parameter, in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.shift = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.gain.data = self.gain.data * 2
        self.shift = nn.Parameter(self.shift.detach() + 1, requires_grad=False)
        return ((self.body(x) * self.gain + self.shift) / 0).mean()


def test_data_and_parameters_that_were_set_anew_are_put_back() -> None:
    model = Rebinds()
    stepper = stepper_of(model)
    report = stepper.step(call, torch.randn(4, 8))
    gain, shift, data = model.gain, model.shift, model.gain.detach().clone()
    by_hand(stepper, report)
    assert model.gain is gain
    assert model.shift is shift
    assert torch.equal(model.gain, data)


def test_only_what_is_written_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fills the memory can be run again: its weights have no second copy."""
    copied: list[int] = []
    restore = rerun.Rollback.restore

    def counting(self: rerun.Rollback) -> None:
        copied.append(len(self._written))
        restore(self)

    monkeypatch.setattr(rerun.Rollback, "restore", counting)
    for model, expected in ((plain_model(), 0), (Byol(), 2)):
        copied.clear()
        stepper = stepper_of(model)
        report = stepper.step(lambda model, x: model(x).mean() * torch.nan, torch.randn(4, 8))
        by_hand(stepper, report)
        assert copied
        assert set(copied) == {expected}


# -- random numbers --------------------------------------------------------------------------------------------------


class Draws(nn.Module):
    """Divides by zero where its own generator, wherever it is kept, draws one number."""

    def __init__(self, holder: Any, find: Any) -> None:
        super().__init__()
        self.linear, self.holder, self.find = nn.Linear(8, 4), holder, find
        self.unlucky: float | None = None

    def draw(self) -> float:
        return float(torch.rand(1, generator=self.find(self)).item())

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) / (0.0 if self.draw() == self.unlucky else 1.0)).mean()


def aimed(model: Draws) -> None:
    generator = model.find(model)
    state = generator.get_state()
    model.unlucky = model.draw()
    generator.set_state(state)


class Source:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)


class Private(nn.Module):
    """A layer whose generator is a private attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._own = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("holder", "find"),
    [
        (Private(), lambda model: model.holder._own),
        (torch.Generator().manual_seed(1), lambda model: model.holder),
        ([torch.Generator().manual_seed(1)], lambda model: model.holder[0]),
        ({"a": {"b": torch.Generator().manual_seed(1)}}, lambda model: model.holder["a"]["b"]),
        (Source(), lambda model: model.holder.generator),
    ],
)
def test_generators_of_a_model_draw_the_same_again(holder: Any, find: Any) -> None:
    model, told = Draws(holder, find), list[GuardEvent]()
    guardian = Guardian(stepper_of(model), tell=told.append)
    guardian.step(call, torch.randn(4, 8))
    aimed(model)
    after = find(model).get_state()
    guardian.step(call, torch.randn(4, 8))
    assert [t.facts["cause"] for t in told if t.kind == "verdict"] == ["code"]
    assert not torch.equal(find(model).get_state(), after)  # the step has drawn, and that stays
    expected = torch.Generator()
    expected.set_state(after)
    torch.rand(1, generator=expected)
    assert torch.equal(find(model).get_state(), expected.get_state())


def test_a_generator_that_comes_with_the_batch() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        drawn = torch.randn(1, generator=batch["noise"])
        return model(batch["x"]).mean() + drawn.log().mean()

    noise, told = torch.Generator().manual_seed(303), list[GuardEvent]()  # first a negative number, then positive ones
    Guardian(stepper_of(plain_model()), tell=told.append).step(loss_fn, {"x": torch.randn(4, 8), "noise": noise})
    assert [t.facts["cause"] for t in told] == ["code"]


def test_where_the_state_of_a_generator_is_not_known_that_is_said() -> None:
    model = Draws(torch.Generator().manual_seed(1), lambda model: model.holder)
    stepper = stepper_of(model)
    aimed(model)
    found = by_hand(stepper, stepper.step(call, torch.randn(4, 8)))
    assert found.cause == "not_reproducible"
    assert "its own torch.Generator" in found.evidence[1]


def test_a_fault_that_comes_back_once_and_then_not_is_the_devices() -> None:
    calls: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return model(x).mean() * (torch.nan if len(calls) < 3 else 1.0)

    stepper = stepper_of(plain_model())
    found = by_hand(stepper, stepper.step(loss_fn, torch.randn(4, 8)))
    assert found.cause == "not_reproducible"
    assert found.evidence[0] == "of two reruns one was finite and one was not"


# -- what is reached -------------------------------------------------------------------------------------------------


def test_what_a_function_leads_to_has_the_names_that_people_gave_it() -> None:
    table, source = torch.ones(2), Source()

    def inner() -> Tensor:
        return table + torch.rand(2, generator=source.generator)

    def outer() -> Tensor:
        return inner()

    names = {name: thing for name, thing in iterate_reachable(outer)}
    assert names["inner.table"] is table
    assert names["inner.source.generator"] is source.generator
    assert find_generators(outer) == [source.generator]


def test_things_that_hold_each_other_and_very_many_of_them_come_to_an_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert len(list(iterate_reachable(loop))) == 1
    assert len(list(iterate_reachable([[random.random() for _ in range(10**4)] for _ in range(300)]))) <= 4096


# -- large models ----------------------------------------------------------------------------------------------------


def test_a_diagnosis_of_a_large_model_says_what_it_costs_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "LARGE", 10)
    runs: list[Any] = []
    tried = Trials._run_trial
    monkeypatch.setattr(Trials, "_run_trial", lambda self, *given: (runs.append(given), tried(self, *given))[1])
    told: list[GuardEvent] = []
    guardian = Guardian(stepper_of(plain_model()), tell=told.append)
    guardian.step(lambda model, x: model(x).mean() / 0, torch.randn(4, 8))
    assert [t.kind for t in told] == ["alarm", "verdict"]
    assert "parameters, so the step is rerun at most 4 times, at least" in told[0].text
    assert "no copy of the weights" in told[0].text
    assert told[0].facts["seconds"] > 0
    assert told[1].facts["cause"] == "code"
    assert 0 < len(runs) <= diagnosis.MOST_RERUNS


def test_what_is_not_tried_any_more_is_neither_a_cure_nor_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "LARGE", 10)
    monkeypatch.setattr(diagnosis, "MOST_RERUNS", 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * 0 + 300).square().mean().float()

    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("fp16"), observe=False
    )
    report = stepper.step(loss_fn, torch.randn(4, 8))
    assert stepper.attempt is not None
    found = diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=str(report.reason))
    assert found.cause == "precision"
    assert {remedy.works for remedy in found.remedies} <= {True, None}


def test_the_cost_of_a_billion_parameters_is_told_from_shapes_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40_000, 40_000, bias=False), nn.BatchNorm1d(2**20))
    found = estimate_diagnosis_cost(model, seconds=2.0)
    assert found.is_large
    assert found.parameters == 40_000**2 + 2 * 2**20
    assert found.gradient_bytes == 4 * found.parameters
    assert found.buffer_bytes == 8 * 2**20 + 8
    assert "at least 8 s" in str(found)
    assert "8.00 MiB for copies of buffers" in str(found)
    assert not estimate_diagnosis_cost(plain_model()).is_large


def test_a_healthy_small_model_costs_no_word() -> None:
    stepper = stepper_of(plain_model())
    report = stepper.step(lambda model, x: model(x).mean() / 0, torch.randn(4, 8))
    heard: list[Any] = []
    assert halfstep.diagnose(stepper, report, tell=heard.append).cause == "code"
    assert heard == []
