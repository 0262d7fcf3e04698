"""What loops do around the step: gradients read after it, losses divided twice, a Stepper per epoch, other orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.errors import StateMismatch, WrongUse


def _loss(model: Any, x: Tensor) -> Any:
    return model(x).square().mean()


def _build(**options: Any) -> tuple[Any, torch.optim.Optimizer, halfstep.Stepper]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, halfstep.Stepper(model, optimizer, precision="fp32", **options)


def test_gradients_are_kept_until_the_next_step() -> None:
    model, _, stepper = _build(keep_gradients=True, clip_norm=0.01)
    x = torch.randn(8, 4)
    expected = torch.autograd.grad(_loss(model, x), model.weight)[0]
    stepper.step(_loss, x)
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad / model.weight.grad.norm(), expected / expected.norm())
    assert float(model.weight.grad.norm()) <= 0.01
    before = model.weight.detach().clone()
    stepper.step(_loss, x * float("nan"))
    assert bool(model.weight.grad.isnan().all())
    assert torch.equal(model.weight, before)


def test_a_kept_gradient_is_not_added_to_the_next_one() -> None:
    kept, _, one = _build(keep_gradients=True)
    plain, _, other = _build()
    for i in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
        one.step(_loss, x)
        other.step(_loss, x)
    assert torch.equal(kept.weight, plain.weight)
    assert plain.weight.grad is None


def test_kept_gradients_of_narrow_weights_are_refused() -> None:
    with pytest.raises(WrongUse, match="keep_gradients"):
        _build(keep_gradients=True, weight_format="bf16-split")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", [lambda loss: loss / 4, lambda loss: loss * 0.25])
def test_a_loss_divided_twice_is_reported_with_its_line(by: Any) -> None:
    _, _, stepper = _build()
    stepper.step(lambda m, x: by(_loss(m, x)), halfstep.Window([torch.randn(2, 4)] * 4))
    assert [finding.id for finding in stepper.findings] == ["loss.divided_twice"]
    assert "test_real_loops_demands.py:" in stepper.findings[0].evidence


def test_other_divisions_are_not_reported() -> None:
    _, _, stepper = _build()
    stepper.step(lambda m, x: _loss(m, x) / 3, halfstep.Window([torch.randn(2, 4)] * 4))
    stepper.step(lambda m, x: _loss(m, x) / 1, torch.randn(2, 4))
    for factor in (float("nan"), float("inf"), 0.0, 1e-320):

        def scaled(m: Any, x: Tensor, factor: float = factor) -> Any:
            return _loss(m, x) * factor

        stepper.step(scaled, halfstep.Window([torch.randn(2, 4)] * 4))
    stepper.step(_loss, halfstep.Window([torch.randn(2, 4)] * 4))
    assert stepper.findings == []


@pytest.mark.filterwarnings("ignore")
def test_a_second_stepper_continues_the_first() -> None:
    model, optimizer, stepper = _build()
    for _ in range(3):
        stepper.step(_loss, torch.randn(2, 4))
    second = halfstep.Stepper(model, optimizer, precision="fp32")
    assert second.counts.applied == 3
    assert [finding.id for finding in second.findings] == ["stepper.continued"]
    assert second.step(_loss, torch.randn(2, 4)).step == 4


def test_a_stepper_over_another_optimizer_starts_anew() -> None:
    model, _, stepper = _build()
    stepper.step(_loss, torch.randn(2, 4))
    second = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    assert (second.counts.applied, second.findings) == (0, [])


def test_windows_have_a_length() -> None:
    for batches in (0, 1, 5, 6):
        for drop_last in (False, True):
            found = halfstep.windows(range(batches), 3, drop_last=drop_last)
            assert len(found) == len(list(found))
    with pytest.raises(TypeError):
        len(halfstep.windows(iter([1]), 3))
    assert list(halfstep.windows(iter([1, 2]), 3)) == [[1, 2]]


def test_a_schedule_that_has_ended_is_refused_before_the_update() -> None:
    model, optimizer, _ = _build()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    stepper = halfstep.Stepper(model, optimizer, precision="fp32", schedule=schedule)
    batches = [torch.randn(2, 4)] * 7
    for window in halfstep.windows(batches, 2):
        stepper.step(_loss, window)
    for window in list(halfstep.windows(batches, 2))[:2]:
        stepper.step(_loss, window)
    before = model.weight.detach().clone()
    with pytest.raises(WrongUse, match="an epoch makes 4 updates"):
        stepper.step(_loss, next(iter(halfstep.windows(batches, 2))))
    assert torch.equal(model.weight, before)
    assert stepper.state_dict()["counts"]["applied"] == 6


def _deep(groups: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(groups(list(model.parameters())), 1e-2)
    return model, optimizer, halfstep.Stepper(model, optimizer, precision="fp32")


def test_optimizer_state_is_matched_by_name() -> None:
    model, optimizer, stepper = _deep(lambda p: [{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:]}])
    stepper.step(_loss, torch.randn(3, 4))
    other, reordered, second = _deep(lambda p: [{"params": p[:1:-1]}, {"params": p[1::-1], "weight_decay": 0.1}])
    second.load_state_dict(stepper.state_dict())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], reordered.state[theirs]["exp_avg"])
    assert [group["weight_decay"] for group in reordered.param_groups] == [0.01, 0.1]


def test_a_parameter_in_another_group_is_refused() -> None:
    _, _, stepper = _deep(lambda p: [{"params": [p[0], p[1]]}, {"params": p[2:]}])
    stepper.step(_loss, torch.randn(3, 4))
    _, reordered, second = _deep(lambda p: [{"params": [p[2], p[1]]}, {"params": [p[0], p[3]]}])
    with pytest.raises(StateMismatch, match="other groups"):
        second.load_state_dict(stepper.state_dict())
    assert not reordered.state


@pytest.mark.filterwarnings("ignore")
def test_a_bad_running_statistic_is_reported_once() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_var[2] = float("nan")
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    for _ in range(3):
        stepper.step(_loss, torch.randn(3, 4))
    assert [finding.id for finding in stepper.findings] == ["buffer.not_finite"]


def test_a_mask_of_infinities_is_not_reported() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("mask", torch.full((4,), -torch.inf))

    model = Masked()
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    stepper.step(_loss, torch.randn(3, 4))
    assert stepper.findings == []


def test_an_average_of_torch_is_refused_by_name() -> None:
    model = nn.Linear(4, 1)
    averaged: Any = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(WrongUse, match=r"halfstep\.Ema\(model"):
        halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", ema=averaged)


def _with_a_dead_unit() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[3] = -99.0  # its gradient is 0, and so are its moments
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("three_calls", [False, True])
def test_an_update_that_writes_nan_is_reported_with_the_optimizers_fault(three_calls: bool) -> None:
    model = _with_a_dead_unit()
    stepper = halfstep.Stepper(model, torch.optim.Adam(model.parameters(), 1e-2, eps=0.0), precision="fp32")
    reports = []
    for _ in range(5):
        x = torch.randn(8, 4)
        if three_calls:
            with stepper.forward():
                loss = _loss(model, x)
            stepper.backward(loss)
            reports.append(stepper.apply())
        else:
            reports.append(stepper.step(_loss, x))
    assert [report.reason for report in reports] == [None, *["loss_not_finite"] * 4]
    assert bool(model[0].weight[3].isnan().all())
    assert [finding.id for finding in stepper.findings] == ["weight.not_finite"]
    assert "weight 0.weight contains nan" in stepper.findings[0].evidence
    assert "step 1" in stepper.findings[0].evidence
    assert "Adam divides by the root of exp_avg_sq, which is 0 there, with eps=0" in stepper.findings[0].evidence


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_other_code_has_overwritten_is_reported_without_an_optimizers_fault() -> None:
    model, _, stepper = _build()
    stepper.step(_loss, torch.randn(2, 4))
    with torch.no_grad():
        model.bias.fill_(torch.inf)
    for _ in range(3):
        stepper.step(_loss, torch.randn(2, 4))
    assert [finding.id for finding in stepper.findings] == ["weight.not_finite"]
    assert "weight bias contains inf" in stepper.findings[0].evidence
    assert "its update wrote it, or code that ran after it" in stepper.findings[0].evidence


@pytest.mark.filterwarnings("ignore")
def test_weights_that_were_loaded_with_nan_are_reported() -> None:
    model, _, stepper = _build()
    with torch.no_grad():
        model.weight[0, 1] = torch.nan
    for _ in range(2):
        stepper.step(_loss, torch.randn(2, 4))
    assert [finding.id for finding in stepper.findings] == ["weight.not_finite"]
    assert "no step was applied before" in stepper.findings[0].evidence


@pytest.mark.filterwarnings("ignore")
def test_bad_weights_of_one_of_two_optimizers_are_reported_in_the_step_of_the_other() -> None:
    model: Any = nn.ModuleDict({"d": nn.Linear(4, 1), "g": nn.Linear(4, 4)})
    optimizers = {name: torch.optim.SGD(module.parameters(), 0.1) for name, module in model.items()}
    stepper = halfstep.Stepper(model, optimizers=optimizers, precision="fp32")
    with torch.no_grad():
        model["d"].bias.fill_(torch.nan)
    for name in ("d", "g"):
        stepper.step(lambda m, x: m["d"](m["g"](x)).mean(), torch.randn(2, 4), only=name)
    assert [finding.id for finding in stepper.findings] == ["weight.not_finite"]
    assert "weight d.bias" in stepper.findings[0].evidence


def test_bad_batches_are_no_fault_of_the_weights() -> None:
    _, _, stepper = _build()
    for factor in (1.0, torch.nan, torch.nan, torch.nan, 1.0, torch.inf, torch.inf):
        stepper.step(_loss, torch.randn(2, 4) * factor)
    assert (stepper.counts.applied, stepper.findings) == (2, [])


def _build_gan() -> Any:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    gan: Any = nn.ModuleDict({"g": generator, "d": nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))})
    return gan, {name: torch.optim.Adam(module.parameters(), 1e-2) for name, module in gan.items()}


def _real_and_noise(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 2, generator=generator), torch.randn(6, 4, generator=generator)


def _loss_of_d(gan: Any, real: Tensor, fake: Tensor) -> Any:
    return nn.functional.softplus(-gan["d"](real)).mean() + nn.functional.softplus(gan["d"](fake.detach())).mean()


def test_first_d_then_g_with_the_updated_d_equals_the_loop_by_hand() -> None:
    by_hand, optimizers = _build_gan()
    for i in range(20):
        real, noise = _real_and_noise(i)
        fake = by_hand["g"](noise)
        optimizers["d"].zero_grad()
        _loss_of_d(by_hand, real, fake).backward()
        optimizers["d"].step()
        optimizers["g"].zero_grad()
        nn.functional.softplus(-by_hand["d"](fake)).mean().backward()
        optimizers["g"].step()

    gan, optimizers = _build_gan()
    stepper = halfstep.Stepper(gan, optimizers=optimizers, precision="fp32")
    for i in range(20):
        _step_d_then_g(stepper, gan, *_real_and_noise(i))
    assert all(torch.equal(a, b) for a, b in zip(by_hand.state_dict().values(), gan.state_dict().values(), strict=True))


def _step_d_then_g(stepper: halfstep.Stepper, gan: Any, real: Tensor, noise: Tensor) -> list[str | None]:
    with stepper.forward(only="d"):
        fake = gan["g"](noise)
        loss = _loss_of_d(gan, real, fake)
    stepper.backward(loss)
    of_d = stepper.apply()
    with stepper.forward(only="g"):
        loss = nn.functional.softplus(-gan["d"](fake)).mean()
    stepper.backward(loss)
    return [of_d.reason, stepper.apply().reason]


def test_a_skipped_step_of_d_restores_both_networks_and_g_is_updated_with_the_old_d() -> None:
    gan, optimizers = _build_gan()
    stepper = halfstep.Stepper(gan, optimizers=optimizers, precision="fp32")
    _step_d_then_g(stepper, gan, *_real_and_noise(0))
    before = {name: tensor.clone() for name, tensor in gan.state_dict().items()}
    real, noise = _real_and_noise(1)
    assert _step_d_then_g(stepper, gan, real * torch.nan, noise) == ["loss_not_finite", None]
    after = gan.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith(("d.0", "d.2")))
    assert torch.equal(after["g.1.running_mean"], before["g.1.running_mean"])
    assert not torch.equal(after["g.0.weight"], before["g.0.weight"])
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
