"""Loss scales that find their place are left alone, also in turns; those that stay where they are are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Guardian, StaticScale, Stepper
from halfstep.errors import Diverged
from halfstep.guard.verdict import GuardEvent
from halfstep.step.loss import LossScale
from tests.support.digest import digest_of
from tests.support.models import plain_model


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def static(scale: LossScale, mode: Any = "watch") -> tuple[Guardian, list[GuardEvent]]:
    model, told = plain_model(), list[GuardEvent]()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    stepper = Stepper(model, optimizer, precision="fp16", loss_scale=scale, observe=False)
    return Guardian(stepper, mode=mode, tell=told.append), told


def train(guardian: Guardian, times: int, *sizes: float) -> None:
    for _ in range(times):
        for size in sizes:
            guardian.step(square, size * torch.randn(6, 8))


# -- two optimizers in turns -------------------------------------------------------------------------------------------


def in_turns() -> Stepper:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters(), 1e-9) for name, part in model.items()}
    return Stepper(model, optimizers, precision="fp16", observe=False)


def both(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model["d"](model["g"](x)).float().square().mean()  # type: ignore[index,operator]
    return out


def turn_by_turn(taker: Guardian | Stepper, loss_fn: Any, number: int) -> list[str | None]:
    """What came of each step."""
    draw = torch.Generator().manual_seed(0)
    batches = [60.0 * torch.rand(4, 4, generator=draw) for _ in range(number)]
    return [taker.step(loss_fn, x, only="gd"[i % 2]).reason for i, x in enumerate(batches)]


def test_a_warm_up_in_turns_is_let_through_as_without_a_guardian() -> None:
    told: list[GuardEvent] = []
    expected = turn_by_turn(in_turns(), both, 40)
    assert expected[:12] == ["gradient_overflow"] * 12
    assert expected.count(None) > 10
    guardian = Guardian(in_turns(), tell=told.append)
    assert turn_by_turn(guardian, both, 40) == expected
    assert [t.facts["cause"] for t in told] == ["warm_up", "warm_up"]


@pytest.mark.wording
def test_one_that_never_gets_through_is_found_while_the_other_goes_on() -> None:
    def losses(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        fine = model["g"](x / 60.0).float().square().mean()  # type: ignore[index,operator]
        return {"g": 1e-3 * fine, "d": 1e9 * both(model, x)}

    told: list[GuardEvent] = []
    guardian = Guardian(in_turns(), tell=told.append)
    with pytest.raises(Diverged, match="every update of d from attempt 2 on was skipped") as raised:
        turn_by_turn(guardian, losses, 120)
    assert raised.value.verdict is not None
    assert raised.value.verdict["cause"] == "precision"
    # At the third fall and at the floor, and not each time after g was applied in between.
    assert [t.facts.get("cause") for t in told[:-1]] == ["precision", "precision"]
    assert guardian.state_dict()["diagnoser"]["diagnoses"] == 2
    assert guardian.stepper.counts.applied == 17


# -- a scale that was chosen -------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize("mode", ["watch", "repair"])
def test_a_static_scale_that_is_too_high_is_named_at_once_with_what_to_do(mode: str) -> None:
    guardian, told = static(StaticScale(2.0**24), mode)
    with pytest.raises(Diverged) as raised:
        train(guardian, 6, 50.0)
    assert guardian.stepper.counts.attempted == 5
    assert told[0].facts["attempt"] == 1
    assert raised.value.given.startswith("precision: gradients overflow at a loss scale of 1.67772e+07 and fit without")
    assert "this loss scale does not fall by itself" in raised.value.given
    assert raised.value.do.startswith("a lower loss scale: StaticScale(")
    assert guardian.state_dict()["rollbacks"] == 0  # older weights would not help


@pytest.mark.wording
def test_a_static_scale_that_is_too_high_for_every_other_batch_is_counted() -> None:
    guardian, _ = static(StaticScale(2.0**17))
    before = digest_of(dict(guardian.stepper.model.named_parameters()))
    with pytest.raises(Diverged, match="26 of the last 100 steps were skipped") as raised:
        train(guardian, 60, 1e-4, 50.0)
    # The diagnoses of a run were used up before: the last one is made all the same.
    assert raised.value.do.startswith("a lower loss scale: StaticScale(")
    assert digest_of(dict(guardian.stepper.model.named_parameters())) != before


def test_a_dynamic_scale_with_a_cap_of_its_own_goes_on_from_its_state() -> None:
    guardian, told = static(DynamicScale(init_scale=128.0, cap=256.0))
    guardian.step(square, torch.randn(6, 8))
    state = guardian.stepper.state_dict()
    other, _ = static(DynamicScale(init_scale=128.0, cap=256.0))
    other.stepper.load_state_dict(state)
    assert other.stepper.state_dict()["losses"]["loss"]["loss_scale"]["scale"] == 128.0
    assert told == []
