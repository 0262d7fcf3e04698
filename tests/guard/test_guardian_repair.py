"""A run under repair: the smallest remedy is placed, recorded, lifted after a while and kept over a resume."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.repair_vae import CULPRIT, one
from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import GuardEvent
from halfstep.precision.island import find_islands
from tests.support.digest import digest_of, digest_of_run
from tests.support.models import plain_model

TRUE = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Large(nn.Linear):
    """Overflows fp16 inside, and gives harmless numbers in fp32; `by` may be turned down later."""

    by = 1e6

    def forward(self, x: Tensor) -> Tensor:
        large = super().forward(x) * self.by
        return (large - large.mean()) / self.by


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.large, self.last = nn.Linear(8, 16), Large(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.large(torch.tanh(self.one(x))))


def fit(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), x @ TRUE)


def repairing(
    model: nn.Module, precision: str = "fp16", limits: Limits | None = None, **options: Any
) -> tuple[Guardian, list[GuardEvent]]:
    told: list[GuardEvent] = []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    stepper = Stepper(model, optimizer, precision=precision, observe=False, **options)
    return Guardian(stepper, mode="repair", tell=told.append, limits=limits or Limits()), told


def steps(guardian: Guardian, number: int, first: int = 0) -> None:
    for step in range(first, first + number):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        guardian.step(fit, x)


# -- islands -----------------------------------------------------------------------------------------------------------


def test_the_module_that_overflows_becomes_an_island_and_the_run_goes_on() -> None:
    guardian, told = repairing(Net())
    steps(guardian, 20)
    assert list(find_islands(guardian.stepper.model)) == guardian.remedies.islands == ["large"]
    assert guardian.stepper.precision.name == "fp16"
    assert guardian.stepper.counts.applied == 19
    assert [t.kind for t in told] == ["verdict", "remedy"]
    assert (told[1].facts["remedy"], told[1].facts["target"]) == ("island", "large")


def test_a_vae_that_overflows_fp16_trains_to_the_loss_of_fp32() -> None:
    run = one(seed=0, steps=150)
    assert run["islands"] == [CULPRIT]
    assert run["named"] == [CULPRIT]
    assert run["kept"]
    assert run["precision"] == "fp16"
    assert run["fp16_repaired"] == pytest.approx(run["fp32"], rel=0.15)


def test_a_resumed_run_has_its_island_and_goes_on_to_the_bit() -> None:
    whole, _ = repairing(Net())
    steps(whole, 12)
    first, _ = repairing(Net())
    steps(first, 6)
    second, _ = repairing(Net())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.stepper.model.load_state_dict(first.stepper.model.state_dict())
    second.stepper.load_state_dict(first.stepper.state_dict())
    assert list(find_islands(second.stepper.model)) == ["large"]
    steps(second, 6, first=6)
    assert digest_of_run(second.stepper) == digest_of_run(whole.stepper)
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


# -- the whole precision -----------------------------------------------------------------------------------------------


class InTheOpen(nn.Module):
    """Overflows in the model's own forward, which no island of a part can help."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        large = self.one(x) * 1e6
        return self.two((large - large.mean()) / 1e6)


def test_what_no_island_cures_changes_the_precision() -> None:
    guardian, _ = repairing(InTheOpen())
    steps(guardian, 10)
    assert guardian.remedies.islands == []
    assert guardian.remedies.precision == guardian.stepper.precision.name
    assert guardian.stepper.precision.name in ("bf16", "fp32")
    assert guardian.stepper.counts.applied == 9


# -- probation ---------------------------------------------------------------------------------------------------------


def test_a_remedy_is_lifted_after_its_probation_and_comes_back_for_good() -> None:
    guardian, told = repairing(Net(), limits=Limits(probation=10))
    steps(guardian, 11)
    assert guardian.remedies.islands == []
    assert [t.kind for t in told] == ["verdict", "remedy", "probation"]
    assert told[2].level == "info"
    steps(guardian, 40, first=11)
    assert guardian.remedies.islands == ["large"]
    assert guardian.remedies.placed[0].for_good
    assert [t.kind for t in told] == ["verdict", "remedy", "probation", "verdict", "remedy"]
    assert guardian.stepper.counts.applied == 49


def test_a_remedy_that_is_no_longer_needed_stays_away() -> None:
    model = Net()
    guardian, told = repairing(model, limits=Limits(probation=10))
    steps(guardian, 5)
    assert guardian.remedies.islands == ["large"]
    model.large.by = 1.0
    steps(guardian, 30, first=5)
    assert find_islands(model) == {}
    assert [t.kind for t in told] == ["verdict", "remedy", "probation"]


# -- going back --------------------------------------------------------------------------------------------------------


def spoil(model: nn.Module) -> None:
    """As a bit that flipped, or an update that should not have been."""
    with torch.no_grad():
        model[0].weight.mul_(1e8)
        model[2].weight.mul_(1e8)


@pytest.mark.parametrize(("spikes", "after", "said"), [("refuse", 4, ["alarm"] * 4), ("warn", 5, ["alarm"])])
def test_spoilt_weights_are_taken_back_and_training_goes_on(spikes: Any, after: int, said: list[str]) -> None:
    model = plain_model()
    guardian, told = repairing(model, "bf16", Limits(keep_every=5, spikes=spikes))
    steps(guardian, 32)
    spoil(model)
    steps(guardian, 20, first=32)
    assert [t.kind for t in told] == [*said, "remedy"]
    assert told[-1].facts == {"remedy": "rollback", "to": guardian.stepper.counts.applied - (20 - after)}
    assert 25 <= told[-1].facts["to"] <= 31
    assert max(p.abs().max() for p in model.parameters()) < 10
    assert not guardian.in_trouble


@pytest.mark.wording
def test_what_is_kept_is_never_what_a_spike_was_refused_for() -> None:
    model = plain_model()
    guardian, _ = repairing(model, "bf16", Limits(keep_every=1, rollbacks=0))
    steps(guardian, 30)
    spoil(model)
    with pytest.raises(Diverged, match="the weights are those of step 29"):
        steps(guardian, 10, first=30)
    assert max(p.abs().max() for p in model.parameters()) < 10


@pytest.mark.wording
def test_bad_data_does_not_cost_what_was_learnt() -> None:
    model = plain_model()
    guardian, told = repairing(model, "bf16")
    steps(guardian, 30)
    good = digest_of(dict(model.named_parameters()))
    x = torch.full((6, 8), math.nan)
    for _ in range(4):
        guardian.step(fit, x)
    with pytest.raises(Diverged, match="every update from attempt 31 on was skipped"):
        guardian.step(fit, x)
    assert digest_of(dict(model.named_parameters())) == good
    assert guardian.state_dict()["rollbacks"] == 0
    assert {t.facts.get("cause") for t in told if t.kind == "verdict"} == {"data"}


# -- compiled code -----------------------------------------------------------------------------------------------------


def test_compiled_code_that_spoils_a_step_is_no_longer_used() -> None:
    """A backend that computes something else, as a wrong kernel would."""
    ran: list[int] = []

    def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return tuple(out * float("nan") if out.is_floating_point() else out for out in graph.forward(*args))

        return run

    model = Net()
    model.compile(backend=wrong)
    guardian, told = repairing(model, "fp32")
    steps(guardian, 3)
    assert [t.facts.get("cause") or t.facts.get("remedy") for t in told] == ["compiler", "eager"]
    assert guardian.remedies.eager
    assert guardian.stepper.counts.applied == 2
    count = len(ran)
    steps(guardian, 2, first=3)
    assert len(ran) == count


def test_an_island_inside_compiled_code_is_compiled_anew() -> None:
    model = Net()
    model.compile(backend="aot_eager")
    guardian, _ = repairing(model)
    steps(guardian, 6)
    assert guardian.remedies.islands == ["large"]
    assert guardian.stepper.counts.applied == 5
    torch.compiler.reset()


def test_the_mean_of_losses_is_not_worse_for_being_repaired() -> None:
    """Beside the same net in fp32, step by step."""
    repaired, _ = repairing(Net())
    plain, _ = repairing(Net(), "fp32")
    losses: dict[str, list[float]] = {"repaired": [], "plain": []}
    for step in range(60):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        losses["repaired"].append(repaired.step(fit, x).loss)
        losses["plain"].append(plain.step(fit, x).loss)
    late = {name: statistics.fmean(values[-20:]) for name, values in losses.items()}
    assert late["repaired"] == pytest.approx(late["plain"], rel=0.05)
