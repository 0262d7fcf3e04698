"""Several optimizers: each loss moves its own parameters, all of them or none, or in turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Ema, Stepper, Window
from halfstep.errors import WrongUse
from tests.support.digest import digest_of, digest_of_run


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Linear(4, 4)
        self.d = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def losses(model: Pair, real: Tensor) -> dict[str, Tensor]:
    fake = model.g(torch.randn_like(real))
    return {
        "g": -model.d(fake).float().mean(),
        "d": model.d(fake.detach()).float().mean() - model.d(real).float().square().mean(),
    }


def make(precision: str = "fp32", **options: Any) -> Stepper:
    model = Pair()
    optimizers = {
        "g": torch.optim.AdamW(model.g.parameters(), 1e-2),
        "d": torch.optim.SGD(model.d.parameters(), 1e-2, momentum=0.9),
    }
    if precision == "fp16":
        options.setdefault("loss_scale", {name: DynamicScale(init_scale=256.0) for name in optimizers})
    schedule = {name: torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for name, o in optimizers.items()}
    return Stepper(model, optimizers, precision=precision, schedule=schedule, ema=Ema(model, 0.5), **options)


def digest(module: nn.Module) -> str:
    return digest_of(dict(module.named_parameters()))


def test_each_loss_moves_its_own_parameters_as_in_a_plain_loop() -> None:
    stepper = make()
    torch.manual_seed(5)
    for _ in range(5):
        assert stepper.step(losses, torch.randn(6, 4)).applied

    plain = Pair()
    g, d = torch.optim.AdamW(plain.g.parameters(), 1e-2), torch.optim.SGD(plain.d.parameters(), 1e-2, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (g, d)]
    torch.manual_seed(5)
    for _ in range(5):
        found = losses(plain, torch.randn(6, 4))
        gradients_g = torch.autograd.grad(found["g"], list(plain.g.parameters()), retain_graph=True)
        gradients_d = torch.autograd.grad(found["d"], list(plain.d.parameters()))
        for p, gradient in zip(
            [*plain.g.parameters(), *plain.d.parameters()], [*gradients_g, *gradients_d], strict=True
        ):
            p.grad = gradient
        for mover in (g, d, *schedules):
            mover.step()
    assert digest_of(stepper.model.state_dict()) == digest_of(plain.state_dict())


@pytest.mark.parametrize("bad", ["g", "d"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_bad_loss_stops_both(precision: str, microbatches: int, bad: str) -> None:
    stepper = make(precision)
    window = Window(torch.randn(6, 4) for _ in range(microbatches))
    assert stepper.step(losses, window).applied
    before = digest_of_run(stepper)

    def spoiled(model: Pair, real: Tensor) -> dict[str, Tensor]:
        found = losses(model, real)
        found[bad] = found[bad] * float("inf")
        return found

    report = stepper.step(spoiled, window)
    assert report.reason == "loss_not_finite"
    assert digest_of_run(stepper) == before
    assert set(report.parts) == {"g", "d"}


def test_one_scale_a_loss() -> None:
    stepper = make("fp16", loss_scale={"g": DynamicScale(init_scale=256.0), "d": DynamicScale(init_scale=1024.0)})
    armed = [True]
    stepper.model.g.weight.register_hook(lambda g: g * float("inf") if armed[0] else g)
    before = digest_of_run(stepper)
    report = stepper.step(losses, torch.randn(6, 4))
    assert report.reason == "gradient_overflow"
    assert digest_of_run(stepper) == before
    assert {n: p.loss_scale for n, p in report.parts.items()} == {"g": 256.0, "d": 1024.0}
    scales = {n: loss["loss_scale"] for n, loss in stepper.state_dict()["losses"].items()}
    assert (scales["g"]["scale"], scales["d"]["scale"]) == (128.0, 1024.0)
    assert (scales["g"]["_growth_tracker"], scales["d"]["_growth_tracker"]) == (0, 1)
    armed[0] = False
    assert stepper.step(losses, torch.randn(6, 4)).applied


def test_in_turns_each_is_a_step_of_its_own() -> None:
    stepper = make()
    g, d = digest(stepper.model.g), digest(stepper.model.d)
    report = stepper.step(losses, torch.randn(6, 4), only="d")
    assert report.applied
    assert digest(stepper.model.g) == g
    assert digest(stepper.model.d) != d
    assert stepper.model.g.weight.grad is None
    rates = {n: own["optimizer"]["param_groups"][0]["lr"] for n, own in stepper.state_dict()["optimizers"].items()}
    assert rates == {"g": 1e-2, "d": 5e-3}
    averages = stepper.ema.averages()
    assert torch.equal(averages["g.weight"], stepper.model.g.weight)
    assert not torch.equal(averages["d.0.weight"], stepper.model.d[0].weight)

    d = digest(stepper.model.d)
    assert stepper.step(lambda m, x: losses(m, x)["g"], torch.randn(6, 4), only="g").applied
    assert digest(stepper.model.g) != g
    assert digest(stepper.model.d) == d


def test_clipping_by_name() -> None:
    stepper = make(clip_norm={"d": 1e-3})
    moved: dict[str, float] = {}
    for lane in stepper.slots.values():
        lane.optimizer.register_step_pre_hook(
            lambda o, *_, name=lane.name: moved.update(
                {name: torch.cat([p.grad.flatten() for p in o.param_groups[0]["params"]]).norm().item()}
            )
        )
    report = stepper.step(losses, torch.randn(6, 4))
    assert moved["d"] == pytest.approx(1e-3, rel=1e-3)
    assert moved["g"] == pytest.approx(report.parts["g"].grad_norm, rel=1e-5)


@pytest.mark.wording
def test_wrong_names_are_refused() -> None:
    stepper = make()
    with pytest.raises(WrongUse, match=r"no loss for \['d'\]"):
        stepper.step(lambda m, x: {"g": losses(m, x)["g"]}, torch.randn(6, 4))
    with pytest.raises(WrongUse, match="'g', 'd'"):
        stepper.step(losses, torch.randn(6, 4), only="x")
    with pytest.raises(WrongUse, match="'x'"):
        make(clip_norm={"x": 1.0})
    with pytest.raises(WrongUse, match="no optimizer named"):
        make("fp16", loss_scale={"x": DynamicScale()})
    shared = Pair()
    both = {n: torch.optim.SGD(shared.g.parameters(), 0.1) for n in ("a", "b")}
    with pytest.raises(WrongUse, match=r"g\.weight belongs to optimizers 'a' and 'b'"):
        Stepper(shared, both, precision="fp32")
