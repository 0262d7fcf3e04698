"""What is saved is all there is: a run that stops, saves and goes on is the run that never stopped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import DynamicScale, Ema, Stepper
from halfstep.errors import StateMismatch, WrongUse
from tests.support.digest import digest_of, digest_of_run
from tests.support.models import buffered_model, plain_model


def make(precision: str, seed: int = 0) -> Stepper:
    model = buffered_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scale = DynamicScale(growth_interval=3) if precision == "fp16" else None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return Stepper(
        model, optimizer, precision=precision, schedule=schedule, ema=Ema(model, 0.9), clip_norm=1.0, loss_scale=scale
    )


def counted(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return halfstep.Counted(model(x).float().square().sum(), len(x))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    found = [torch.randn(4 + i % 3, 8, generator=generator) for i in range(count)]
    found[3] = found[3] * float("nan")
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stop_save_load_go_on(precision: str) -> None:
    straight = make(precision)
    reports = [straight.step(counted, x) for x in batches(20)]

    first = make(precision)
    for x in batches(20)[:9]:
        first.step(counted, x)
    model, saved = copy.deepcopy(first.model.state_dict()), copy.deepcopy(first.state_dict())

    second = make(precision, seed=1)
    with torch.no_grad():
        second.model(torch.randn(4, 8))  # the buffer that starts as None exists in the saved state
    second.model.load_state_dict(model)
    second.load_state_dict(saved)
    assert second.state_dict()["losses"]["loss"]["base_count"] == 4.0
    again = [second.step(counted, x) for x in batches(20)[9:]]

    assert again == reports[9:]
    assert digest_of_run(second) == digest_of_run(straight)
    assert digest_of(second.state_dict()["losses"]["loss"]["loss_scale"], second.counts.state_dict()) == digest_of(
        straight.state_dict()["losses"]["loss"]["loss_scale"], straight.counts.state_dict()
    )
    assert second.state_dict()["losses"]["loss"]["base_count"] == 4.0


@pytest.mark.wording
@pytest.mark.parametrize("part", ["precision", "counts", "ema", "optimizers", "losses"])
def test_a_missing_part_is_refused(part: str) -> None:
    stepper = make("bf16")
    state = stepper.state_dict()
    del state[part]
    before = digest_of_run(stepper)
    with pytest.raises(StateMismatch, match="saved without"):
        stepper.load_state_dict(state)
    assert digest_of_run(stepper) == before


@pytest.mark.wording
def test_the_state_of_another_run_is_refused() -> None:
    with pytest.raises(StateMismatch, match="precision saved without bf16 and with fp16"):
        make("bf16").load_state_dict(make("fp16").state_dict())
    state = make("bf16").state_dict()
    with pytest.raises(StateMismatch, match="optimizers saved without loss and with g"):
        make("bf16").load_state_dict({**state, "optimizers": {"g": state["optimizers"]["loss"]}})
    with pytest.raises(StateMismatch, match="riders saved without ema"):
        make("bf16").load_state_dict({**state, "ema": None})
    bare = {**state["optimizers"]["loss"], "schedule": None}
    with pytest.raises(StateMismatch, match="a schedule saved without schedule"):
        make("bf16").load_state_dict({**state, "optimizers": {"loss": bare}})


@pytest.mark.wording
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda slot, loss: loss.pop("loss_scale"), r"without loss_scale"),
        (lambda slot, loss: slot["optimizer"].update(param_groups=[]), "0 parameters"),
        (lambda slot, loss: loss["loss_scale"].update(scale=float("inf")), "inf"),
        (lambda slot, loss: slot.update(extra=1), r"with extra"),
    ],
)
def test_a_spoiled_state_is_refused_before_anything_changes(spoil: Any, words: str) -> None:
    stepper, other = make("fp16"), make("fp16", seed=3)
    other.step(counted, torch.randn(4, 8))
    state = copy.deepcopy(other.state_dict())
    state["losses"]["loss"]["loss_scale"]["scale"] = 8.0
    spoil(state["optimizers"]["loss"], state["losses"]["loss"])
    before = digest_of_run(stepper)
    with pytest.raises(StateMismatch, match=words):
        stepper.load_state_dict(state)
    assert digest_of_run(stepper) == before


# -- the average ---------------------------------------------------------------------------------------------------


def test_the_average_is_the_average() -> None:
    model = plain_model()
    ema = Ema(model, 0.9)
    expected = model[0].weight.detach().double().clone()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="bf16", ema=ema)
    for _ in range(30):
        stepper.step(lambda m, x: m(x).float().square().mean(), torch.randn(6, 8))
        expected = 0.9 * expected + 0.1 * model[0].weight.detach().double()
    assert torch.allclose(ema.averages()["0.weight"].double(), expected, atol=1e-6)


def test_the_average_moves_where_16_bits_would_not() -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, 0.9999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    start = ema.averages()["weight"].item()
    for _ in range(1000):
        ema.update()
    assert ema.averages()["weight"].item() == pytest.approx(2.0 - (2.0 - start) * 0.9999**1000, rel=1e-3)


def test_wearing_the_average_and_taking_it_off() -> None:
    stepper = make("fp32")
    for x in batches(5):
        stepper.step(counted, x)
    assert stepper.ema is not None
    own = digest_of(stepper.model.state_dict())
    average = stepper.ema.averages()["0.weight"].clone()
    with pytest.raises(ZeroDivisionError), stepper.ema.in_place():  # noqa: PT012
        assert torch.equal(stepper.model[0].weight, average)
        _ = 1 / 0
    assert digest_of(stepper.model.state_dict()) == own


def test_wearing_the_average_inside_an_open_autocast() -> None:
    """autocast keeps what it cast; weights that change under it must be cast again."""
    model = nn.Linear(4, 4)
    ema = Ema(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        own = model(x)
        with ema.in_place():
            assert not torch.equal(model(x), own)
        assert torch.equal(model(x), own)


@pytest.mark.wording
def test_averages_of_another_model_are_refused() -> None:
    with pytest.raises(StateMismatch, match="averages of another model"):
        Ema(plain_model()).load_state_dict(Ema(nn.Linear(2, 2)).state_dict())
    with pytest.raises(WrongUse, match="between 0 and 1"):
        Ema(plain_model(), 1.0)


# -- optimizers that are not torch's ---------------------------------------------------------------------------------


class Writes(torch.optim.SGD):
    """Writes options into its groups and a preconditioner into its state while it steps, as Prodigy and Shampoo do."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["beta"] = beta
        self.defaults["beta"] = beta

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        group["d_hat"] = torch.tensor(0.5) ** group["k"]
        group["lr"] = 0.1 / (1 + group["k"])
        for p in group["params"]:
            state = self.state[p]
            state.setdefault("precond", torch.zeros(5, 5)[: 5 if p.ndim == 2 else 1])
            state.setdefault("history", []).append(p.detach().mean())
            state["exp_avg"] = state.get("exp_avg", torch.zeros_like(p)).lerp(p.grad, 1.0 - group["beta"])
            p.grad.mul_(1 + state["exp_avg"].abs().mean() + sum(state["history"]))
        return super().step(closure)


def test_options_and_preconditioners_that_a_step_writes_resume_to_the_bit() -> None:
    def run(seed: int = 0) -> Stepper:
        model = plain_model(seed)
        return Stepper(model, Writes(model.parameters()), precision="fp32")

    straight, first, second = run(), run(), run(seed=1)
    for x in (found := [x for x in batches(9) if x.isfinite().all()]):
        straight.step(counted, x)
    for x in found[:4]:
        first.step(counted, x)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for x in found[4:]:
        second.step(counted, x)
    assert digest_of_run(second) == digest_of_run(straight)


def test_a_run_goes_back_to_a_state_from_before_the_first_step() -> None:
    """An older state lacks the options and moments that later steps wrote."""
    model = plain_model()
    stepper = Stepper(model, Writes(model.parameters()), precision="fp32")
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(stepper.state_dict())
    stepper.step(counted, batches(4)[0])
    after = digest_of_run(stepper)
    model.load_state_dict(weights)
    stepper.load_state_dict(state)
    assert "k" not in stepper.optimizers["loss"].param_groups[0]
    stepper.step(counted, batches(4)[0])
    assert digest_of_run(stepper) == after


@pytest.mark.wording
def test_a_class_of_the_same_name_with_other_options_is_refused_before_anything_changes() -> None:
    class Other(Writes):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            for group in self.param_groups:
                group["rho"] = group.pop("beta")
            del self.defaults["beta"]

    Other.__name__ = "Writes"
    model, own = plain_model(), plain_model()
    saved = Stepper(model, Other(model.parameters()), precision="fp32").state_dict()
    stepper = Stepper(own, Writes(own.parameters()), precision="fp32")
    before = digest_of_run(stepper)
    with pytest.raises(StateMismatch, match="options rho"):
        stepper.load_state_dict(saved)
    assert digest_of_run(stepper) == before


@pytest.mark.wording
def test_a_moment_of_another_width_is_refused_where_ours_is_known() -> None:
    def run(width: int) -> Stepper:
        model = nn.Linear(8, width)
        return Stepper(model, Writes(model.parameters()), precision="fp32")

    wide, narrow = run(6), run(5)
    for stepper in (wide, narrow):
        stepper.step(counted, torch.randn(4, 8))
    before = digest_of_run(wide)
    with pytest.raises(StateMismatch, match=r"exp_avg of parameter 0 was saved with shape \(5, 8\)"):
        wide.load_state_dict(narrow.state_dict())
    assert digest_of_run(wide) == before


@pytest.mark.wording
def test_a_known_moment_of_another_width_is_refused_where_none_is_held() -> None:
    def run(width: int) -> Stepper:
        model = nn.Linear(8, width)
        return Stepper(model, Writes(model.parameters()), precision="fp32")

    wide, narrow = run(6), run(5)
    narrow.step(counted, torch.randn(4, 8))
    with pytest.raises(StateMismatch, match=r"exp_avg of parameter 1 was saved with shape \(5,\)"):
        wide.load_state_dict(narrow.state_dict())
    assert not wide.optimizers["loss"].state


class Bare(torch.optim.Optimizer):
    """Hands everything on to another optimizer, without calling torch's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class Wrapper(torch.optim.Optimizer):
    """Keeps the state of an optimizer in a form of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.steps = self.inner.param_groups, state["steps"]


@pytest.mark.parametrize("wrapper", [Bare, Wrapper])
def test_a_wrapper_resumes(wrapper: Any) -> None:
    def run(seed: int = 0) -> Stepper:
        model = plain_model(seed)
        return Stepper(model, wrapper(torch.optim.AdamW(model.parameters(), 0.05)), precision="fp32")

    straight, first, second = run(), run(), run(seed=1)
    found = batches(4)[:3]
    for x in found:
        straight.step(counted, x)
    for x in found[:2]:
        first.step(counted, x)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.step(counted, found[2])
    assert digest_of_run(second) == digest_of_run(straight)


@pytest.mark.wording
def test_a_state_of_another_form_is_refused() -> None:
    model = plain_model()
    stepper = Stepper(model, Wrapper(torch.optim.AdamW(model.parameters(), 0.05)), precision="fp32")
    state = copy.deepcopy(stepper.state_dict())
    state["optimizers"]["loss"]["optimizer"] = torch.optim.AdamW(model.parameters()).state_dict()
    with pytest.raises(StateMismatch, match="Wrapper of 'loss' saved with param_groups, state"):
        stepper.load_state_dict(state)
