"""Losses and optimizers are two axes: one loss may train several optimizers, with one backward and one norm."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Ema, Stepper, Window
from halfstep.errors import WrongUse
from tests.support.digest import digest_of, digest_of_run


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(3)])
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x))


def split(model: Mixed) -> tuple[list[Tensor], list[Tensor]]:
    matrices = [block.weight for block in model.blocks]
    known = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in known]


def muon_and_adamw(model: Mixed) -> dict[str, torch.optim.Optimizer]:
    matrices, rest = split(model)
    return {"muon": torch.optim.Muon(matrices, 1e-2), "adamw": torch.optim.AdamW(rest, 1e-3)}


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
def test_muon_and_adamw_train_as_in_a_plain_loop(clip: float | None) -> None:
    model, plain = Mixed(), Mixed()
    stepper = Stepper(model, optimizers=muon_and_adamw(model), precision="fp32", clip_norm=clip)
    optimizers = muon_and_adamw(plain)
    for step in range(5):
        report = stepper.step(next_token, tokens(step))
        loss = next_token(plain, tokens(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), math.inf if clip is None else clip)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        assert report.loss == pytest.approx(loss.item(), rel=1e-6)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_loss_runs_one_backward() -> None:
    model = Mixed()
    stepper = Stepper(model, muon_and_adamw(model), precision="fp32")
    calls = 0

    def count(gradient: Tensor) -> None:
        nonlocal calls
        calls += 1

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = next_token(model, batch)
        found.register_hook(count)
        return found

    stepper.step(loss, tokens())
    assert calls == 1


def test_each_optimizer_may_be_clipped_by_its_own_norm() -> None:
    model = Mixed()
    matrices, rest = split(model)
    sgd = {"a": torch.optim.SGD(matrices, 1.0), "b": torch.optim.SGD(rest, 1.0)}
    stepper = Stepper(model, sgd, precision="fp32", clip_norm={"a": 1e-3})
    before = [p.detach().clone() for p in model.parameters()]
    report = stepper.step(next_token, tokens())
    moved = {id(p): (p.detach() - old) for p, old in zip(model.parameters(), before, strict=True)}
    norm = {
        name: math.hypot(*(moved[id(p)].norm().item() for p in own)) for name, own in (("a", matrices), ("b", rest))
    }
    assert norm["a"] == pytest.approx(1e-3, rel=1e-3)
    assert norm["b"] == pytest.approx(report.parts["b"].grad_norm, rel=1e-4)
    assert report.grad_norm == pytest.approx(math.hypot(*(part.grad_norm for part in report.parts.values())), rel=1e-6)
    assert report.parts["a"].loss == report.parts["b"].loss == report.loss


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_all_of_them_or_none(precision: str, microbatches: int) -> None:
    model = Mixed()
    optimizers = muon_and_adamw(model)
    schedule = {name: torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for name, o in optimizers.items()}
    scale = DynamicScale(init_scale=256.0) if precision == "fp16" else None
    stepper = Stepper(model, optimizers, precision=precision, schedule=schedule, ema=Ema(model), loss_scale=scale)
    window = Window(tokens(n) for n in range(microbatches))
    assert stepper.step(next_token, window).applied
    before = digest_of_run(stepper)
    bad = stepper.step(lambda m, b: next_token(m, b) * float("nan"), window)
    assert bad.reason == "loss_not_finite"
    assert digest_of_run(stepper) == before
    assert stepper.step(next_token, window).applied
    assert stepper.counts.applied == 2


def test_an_overflow_lowers_the_one_scale_of_the_one_loss() -> None:
    model = Mixed()
    stepper = Stepper(
        model, muon_and_adamw(model), precision="fp16", loss_scale=DynamicScale(init_scale=2.0**24, cap=2.0**24)
    )
    report = stepper.step(lambda m, b: next_token(m, b) * 1e4, tokens())
    assert report.reason == "gradient_overflow"
    assert stepper.loss_scales == {"muon": 2.0**23, "adamw": 2.0**23}


@pytest.mark.wording
def test_one_loss_then_a_dict_of_losses_are_two_kinds_of_steps() -> None:
    model = Mixed()
    stepper = Stepper(model, muon_and_adamw(model), precision="fp32")
    assert stepper.step(next_token, tokens()).applied
    assert stepper.step(lambda m, b: {"muon": next_token(m, b), "adamw": 2 * next_token(m, b)}, tokens()).applied
    kinds = iter([next_token, lambda m, b: dict.fromkeys(("muon", "adamw"), next_token(m, b))])
    before = digest_of_run(stepper)
    with pytest.raises(WrongUse, match="one loss and a dict of losses in one window"):
        stepper.step(lambda m, b: next(kinds)(m, b), Window([tokens(), tokens(1)]))
    assert digest_of_run(stepper) == before


def test_the_state_of_two_optimizers_goes_on_bitwise() -> None:
    def run(break_at: int | None) -> str:
        model = Mixed()
        stepper = Stepper(model, muon_and_adamw(model), precision="fp32", clip_norm=1.0)
        for step in range(6):
            if step == break_at:
                weights, state = model.state_dict(), stepper.state_dict()
                model = Mixed()
                model.load_state_dict(weights)
                stepper = Stepper(model, muon_and_adamw(model), precision="fp32", clip_norm=1.0)
                stepper.load_state_dict(state)
            stepper.step(next_token, tokens(step))
        return digest_of(model.state_dict(), stepper.counts.state_dict())

    assert run(None) == run(3)


def test_ten_optimizers_share_one_loss() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
    stepper = Stepper(
        model, {str(n): torch.optim.SGD(layer.parameters(), 0.1) for n, layer in enumerate(model)}, precision="fp32"
    )
    report = stepper.step(lambda m, x: m(x).square().mean(), torch.randn(4, 8))
    assert report.applied
    assert len(report.parts) == 10


def test_an_optimizer_that_the_loss_does_not_reach_rests() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in ("used", "unused")}
    stepper = Stepper(model, optimizers, precision="fp32", clip_norm=1.0)
    before = digest_of(model["unused"].state_dict())
    report = stepper.step(lambda m, x: m["used"](x).square().mean(), torch.randn(4, 4))
    assert report.applied
    assert report.parts["unused"].grad_norm == 0.0
    assert digest_of(model["unused"].state_dict()) == before


# -- freezing ------------------------------------------------------------------------------------------------------


def test_a_gan_that_toggles_requires_grad() -> None:
    gan = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)})
    stepper = Stepper(
        gan, {k: torch.optim.SGD(gan[k].parameters(), 0.1) for k in "gd"}, precision="fp32", ema=Ema(gan, 0.9)
    )
    true = gan["g"].weight.detach().clone()
    for _ in range(6):
        gan["g"].requires_grad_(False)
        before = digest_of(gan["g"].state_dict())
        report = stepper.step(lambda m, z: m["d"](m["g"](z)).square().mean(), torch.randn(16, 8), only="d")
        assert report.applied
        assert digest_of(gan["g"].state_dict()) == before
        gan["g"].requires_grad_(True)
        gan["d"].requires_grad_(False)
        assert stepper.step(lambda m, z: -m["d"](m["g"](z)).mean(), torch.randn(16, 8), only="g").applied
        gan["d"].requires_grad_(True)
        true.lerp_(gan["g"].weight.detach(), 0.1)
    torch.testing.assert_close(stepper.ema.averages()["g.weight"], true)


@pytest.mark.wording
def test_a_step_for_an_optimizer_that_is_all_frozen_says_so() -> None:
    gan = nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)})
    stepper = Stepper(gan, {k: torch.optim.SGD(gan[k].parameters(), 0.1) for k in "gd"}, precision="fp32")
    gan["d"].requires_grad_(False)
    with pytest.raises(WrongUse, match="all of whose parameters are frozen"):
        stepper.step(lambda m, z: m["d"](m["g"](z)).square().mean(), torch.randn(16, 8), only="d")


def test_a_parameter_that_is_frozen_for_a_while_keeps_its_average() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    average = Ema(model, 0.99)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", ema=average)
    true = model[0].weight.detach().clone()
    for step in range(40):
        model[0].requires_grad_(step % 2 == 0)
        stepper.step(lambda m, x: m(x).square().mean(), torch.randn(8, 16))
        true.lerp_(model[0].weight.detach(), 0.01)
        assert "0.weight" in average.averages()
    torch.testing.assert_close(average.averages()["0.weight"], true)


def test_gradual_unfreezing() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[:3].requires_grad_(False)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision="fp32", ema=Ema(model, 0.9))
    for unfrozen in (3, 2, 1, 0):
        model[unfrozen].requires_grad_(True)
        before = [digest_of(layer.state_dict()) for layer in model]
        report = stepper.step(lambda m, x: m(x).square().mean(), torch.randn(4, 8))
        assert report.applied
        moved = [digest_of(layer.state_dict()) != old for layer, old in zip(model, before, strict=True)]
        assert moved == [n >= unfrozen for n in range(4)]
    assert len(stepper.ema.averages()) == 8


# -- refused by name -----------------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """As it is on many pages: two steps, with the loss evaluated between them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": 0.1})

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.wording
@pytest.mark.parametrize("kind", [SAM, torch.optim.LBFGS])
def test_optimizers_that_evaluate_the_loss_are_refused_by_name(kind: Any) -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(WrongUse, match=kind.__name__):
        Stepper(model, kind(model.parameters()), precision="fp32")


@pytest.mark.wording
def test_an_optimizer_in_backward_is_refused() -> None:
    model = nn.Linear(16, 4)
    own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        own[parameter].step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    with pytest.raises(WrongUse, match="optimizer in backward"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    for handle in handles:
        handle.remove()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")


@pytest.mark.wording
def test_an_optimizer_in_backward_over_the_other_parameters_of_the_model_is_refused() -> None:
    model = Mixed()
    matrices, rest = split(model)
    muons = {p: torch.optim.Muon([p], 1e-2) for p in matrices}

    def hook(parameter: Tensor) -> None:
        muons[parameter].step()
        muons[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in matrices]
    with pytest.raises(WrongUse, match=r"blocks\.0\.weight of the model has an optimizer in backward"):
        Stepper(model, torch.optim.AdamW(rest, 1e-3), precision="fp32")
    for handle in handles:
        handle.remove()
    assert Stepper(model, torch.optim.AdamW(rest, 1e-3), precision="fp32").step(next_token, tokens()).applied


@pytest.mark.wording
def test_torchs_own_optimizer_in_backward_is_refused() -> None:
    model = nn.Linear(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(WrongUse, match="optimizer in backward"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")


@pytest.mark.wording
def test_data_parallel_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(4, 1))
    with pytest.raises(WrongUse, match="DataParallel"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")


@pytest.mark.wording
def test_an_optimizer_is_needed_and_given_once() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WrongUse, match="without an optimizer"):
        Stepper(model)
    with pytest.raises(WrongUse, match="both optimizer= and optimizers="):
        Stepper(model, optimizer, optimizers={"a": optimizer})
