"""The start check: faults are refused or reported by module, healthy models train, and nothing of it remains."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import start_check as bench
from halfstep import DynamicScale, Guardian, Stepper, distributed
from halfstep.errors import StartCheckFailed
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment import start_check
from halfstep.step.experiment.start_check import NOT_CHECKED
from tests.support.models import buffered_model, plain_model

BF16, FP16, FP32 = (resolve_precision_name(name) for name in ("bf16", "fp16", "fp32"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


REFUSED = (start_check.NO_GRADIENT, start_check.ZEROS, start_check.NOT_FINITE)


@pytest.mark.parametrize(
    "fault", [each for each in bench.FAULTS if each.name not in bench.NOT_SEEN], ids=lambda fault: fault.name
)
def test_a_fault_is_caught_and_named(fault: bench.Fault) -> None:
    said = bench.caught(fault)
    assert (said.id, said.module) == (fault.id, fault.module)
    assert said.refused == (fault.id in REFUSED)


class TwiceTheGradient(bench.Narrow):
    def narrow(self, x: Tensor) -> Tensor:
        return F.linear(x, 2.0 * self.weight - self.weight.detach(), self.bias)


def test_a_gradient_that_is_scaled_is_a_warning() -> None:
    said = bench.checked(bench._rows(extra=TwiceTheGradient(bench.WIDTH, bench.WIDTH)), "bf16")
    assert (said.id, said.module, said.refused) == (start_check.GRADIENT, "extra", False)


def test_a_bad_device_is_refused_by_name() -> None:
    assert bench.bad_device_refused()


_SHORT = (
    "convolutions bf16",
    "gpt bf16",
    "experts bf16",
    "quantized bf16",
    "adversarial bf16",
    "masked bf16",
    "batch_normed bf16",
    "group_normed bf16",
    "key_bias bf16",
    "one_token bf16",
    "two_samples bf16",
    "mlp fp16",
    "batch_normed fp16",
)


@pytest.mark.parametrize(
    "name", [name if name in _SHORT else pytest.param(name, marks=pytest.mark.full) for name in bench.HEALTHY]
)
def test_a_healthy_model_is_not_refused(name: str) -> None:
    said = bench.healthy(name)
    assert not said.refused
    assert said.id != NOT_CHECKED
    if name.split()[0] not in bench.DISCRETE:
        assert said.id == ""


# -- nothing remains --------------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Writes what a module can hold, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.calls = 0
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.detach().float().mean()))
        self.cache = x.detach().float() + random.random() + float(np.random.rand())
        return x


class Counts:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def _everything(check: bool) -> list[Any]:
    """One step of a model that writes everything there is; returns all that it could have written."""
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(buffered_model(), Remembers(), nn.Dropout(0.1))
    chance, held, counts = torch.Generator().manual_seed(3), torch.zeros(3), Counts()
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        batch[0].add_(1.0)
        held.add_(torch.rand(3, generator=chance))
        counts.number += 1
        return model(batch).float().square().mean()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    stepper = Stepper(model, optimizer, precision=BF16, check=check)
    stepper.include(counts)
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = stepper.step(loss_fn, batch)
    remembers: Any = model[1]
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = [*model.state_dict().values(), *states, batch, held, chance.get_state(), torch.get_rng_state()]
    found += [remembers.cache, torch.tensor(remembers.seen), random.getstate(), np.random.get_state()[1].tolist()]
    return [*found, remembers.calls, counts.number, report.loss, stepper.start_check is not None]


def test_everything_that_it_wrote_is_taken_back() -> None:
    without, with_check = _everything(False), _everything(True)
    assert (without.pop(), with_check.pop()) == (False, True)
    for one, other in zip(without, with_check, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# -- when it runs -----------------------------------------------------------------------------------------------------


class Calls:
    """A loss function that counts its calls."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.number += 1
        loss: Tensor = model(batch).float().square().mean()
        return loss


def _stepper(precision: Any = BF16, model: nn.Module | None = None, **options: Any) -> Stepper:
    model = model or plain_model()
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, **options)


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def test_it_runs_once_and_not_unless_asked_for(batch: Tensor) -> None:
    for precision, check, calls in ((BF16, True, 3), (BF16, False, 1), (FP32, True, 1)):
        loss_fn, stepper = Calls(), _stepper(precision, check=check)
        stepper.step(loss_fn, batch)
        assert loss_fn.number == calls
        assert (stepper.start_check is None) == (calls == 1)
        stepper.step(loss_fn, batch)
        assert loss_fn.number == calls + 1


def test_it_does_not_run_on_resume(batch: Tensor) -> None:
    first, second, loss_fn = _stepper(check=True), _stepper(check=True), Calls()
    first.step(loss_fn, batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    loss_fn.number = 0
    second.step(loss_fn, batch)
    assert loss_fn.number == 1
    assert second.start_check is None


def test_a_refusal_changes_nothing_and_stays(batch: Tensor) -> None:
    model = nn.Sequential(nn.Linear(8, 16), bench.BiasDropped(16, 4))
    before, stepper = copy.deepcopy(model.state_dict()), _stepper(model=model, check=True)
    for _ in range(2):
        with pytest.raises(StartCheckFailed) as caught:
            stepper.step(Calls(), batch)
        assert (caught.value.id, caught.value.module) == (start_check.NO_GRADIENT, "1")
        assert caught.value.figure > 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert stepper.counts.attempted == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.wording
def test_a_refusal_has_the_parameter_the_figure_and_a_remedy(batch: Tensor) -> None:
    stepper = _stepper(model=nn.Sequential(nn.Linear(8, 16), bench.BiasDropped(16, 4)), check=True)
    with pytest.raises(
        StartCheckFailed, match=r"1\.bias has no gradient in bf16, and one up to [0-9.]+ in fp32"
    ) as caught:
        stepper.step(Calls(), batch)
    assert "island(model, '1')" in caught.value.do


# -- not checked ------------------------------------------------------------------------------------------------------


def _note(stepper: Stepper) -> str:
    assert stepper.start_check is not None
    assert [finding.severity for finding in stepper.findings if finding.id == NOT_CHECKED] == ["note"]
    return stepper.start_check.not_checked


def _fits(most: int) -> Any:
    """A loss function that runs out of memory in fp32, above so many samples."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        if not torch.is_autocast_enabled("cpu") and len(x) > most:
            raise torch.OutOfMemoryError("no room")
        loss: Tensor = model(x).float().square().mean()
        return loss

    return loss_fn


def test_the_first_samples_are_taken_where_fp32_does_not_fit(batch: Tensor) -> None:
    stepper = _stepper(check=True)
    assert stepper.step(_fits(4), batch).applied
    assert stepper.start_check is not None
    assert (stepper.start_check.not_checked, stepper.start_check.samples) == ("", 2)


@pytest.mark.filterwarnings("ignore:note start.not_checked")
def test_a_check_that_cannot_be_made_ends_nothing(batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = _stepper(check=True)
    assert stepper.step(_fits(0), batch).applied
    assert "no room" in _note(stepper)
    stepper = _stepper(check=True)
    assert stepper.step(_fits(4), {"x": batch, "other": batch[:3]}).applied
    assert "cut" in _note(stepper)
    stepper = _stepper(check=True)
    with stepper.forward():
        loss = stepper.model(batch).float().square().mean()
    stepper.backward(loss)
    assert stepper.apply().applied
    assert "loss function" in _note(stepper)
    stepper = _stepper(check=True)
    with monkeypatch.context() as patched:
        patched.setattr(distributed, "is_sharded", lambda _parameters: True)
        assert stepper.step(Calls(), batch).applied
    assert "fully_shard" in _note(stepper)


@pytest.mark.filterwarnings("ignore:note start.not_checked")
def test_a_loss_function_that_can_be_called_once_only(batch: Tensor) -> None:
    left = iter([batch])

    def loss_fn(model: nn.Module, _batch: Tensor) -> Tensor:
        loss: Tensor = model(next(left)).float().square().mean()
        return loss

    stepper = _stepper(check=True)
    with pytest.raises(StopIteration):
        stepper.step(loss_fn, batch)  # the check has used up what the step needs: its own error, not the check's
    assert "StopIteration" in _note(stepper)


# -- fp16 -------------------------------------------------------------------------------------------------------------


def test_fp16_is_compared_at_a_scale_that_fits(batch: Tensor) -> None:
    stepper = _stepper(FP16, check=True, loss_scale=DynamicScale(init_scale=2.0**20))
    stepper.step(lambda model, x: 100.0 * model(x).float().square().sum(), batch)
    assert stepper.start_check is not None
    assert stepper.start_check.deviations == ()
    assert stepper.start_check.loss_scale < 2.0**20


@pytest.mark.filterwarnings("ignore:warning start.underflow")
def test_gradients_that_underflow_are_a_warning(batch: Tensor) -> None:
    stepper = _stepper(FP16, check=True, loss_scale=DynamicScale(init_scale=1.0))
    assert stepper.step(lambda model, x: 1e-9 * model(x).float().square().mean(), batch).applied
    assert start_check.UNDERFLOW in {finding.id for finding in stepper.findings}


def test_an_overflow_is_left_to_a_guardian() -> None:
    case = bench._overflow()
    stepper = _stepper(FP16, case.model, check=True, observe=False)
    guardian = Guardian(stepper, tell=lambda _event: None)
    assert not guardian.step(case.loss_fn, case.batch).applied
    assert stepper.start_check is not None
    assert [each.id for each in stepper.start_check.deviations] == [start_check.NOT_FINITE]


# -- choices ----------------------------------------------------------------------------------------------------------


def test_an_expert_without_a_token_is_not_refused() -> None:
    class OneToken(nn.Module):
        """Sends its one token to another expert in 16 bits."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            score = torch.tensor([1.0, 1.001]).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
            chosen = score.expand(len(x), 2).argmax(-1)
            return torch.stack([self.experts[int(index)](row) for row, index in zip(x, chosen, strict=True)])

    stepper = _stepper(model=OneToken(), check=True)
    with pytest.warns(UserWarning, match="start.no_gradient"):
        assert stepper.step(lambda m, x: F.mse_loss(m(x).float(), x), torch.randn(2, 8)).applied
