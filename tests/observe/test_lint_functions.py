"""Autograd functions in which formats meet: found once, with their place; all others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from halfstep import Stepper, Window, audit, island
from halfstep.observe.lint.functions import ID
from halfstep.precision.precision import resolve_precision_name
from tests.support.functions import Applied, AsTheRun, Bare, Layer, Wide, between, found, mse, stepper


class ForwardOnly(Bare):
    forward = staticmethod(custom_fwd(Bare.forward, device_type="cpu"))


class OfAnotherDevice(Bare):
    forward = staticmethod(custom_fwd(Bare.forward, device_type="cuda", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Bare.backward, device_type="cuda"))


class Reversed(torch.autograd.Function):
    """One format in, the same one out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Quantised(torch.autograd.Function):
    """Straight through, with indices beside it that nobody differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        indices = x.argmax(-1)
        ctx.mark_non_differentiable(indices)
        return x.round(), indices

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Warmed(torch.autograd.Function):
    """Divided by a temperature that is learned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(x, temperature)
        return x / temperature

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, temperature = ctx.saved_tensors
        return gradients[0] / temperature, -(gradients[0].float() * x.float()).sum() / temperature**2


class Squared(torch.autograd.Function):
    """A loss, summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x / x.numel()


@pytest.mark.wording
@pytest.mark.parametrize(("precision", "format"), [("bf16", "bf16"), ("fp16", "fp16")])
def test_formats_that_meet_are_found_with_their_place(precision: str, format: str) -> None:
    (finding,) = found(between(Layer(Bare)), precision)
    line = Bare.forward.__code__.co_firstlineno
    assert finding.evidence.startswith(f"{Path('tests/support/functions.py')}:{line} in 1: Bare takes {format}")
    assert f"takes {format} and fp32 and returns {format}" in finding.evidence
    assert 'torch.amp.custom_bwd(device_type="cpu")' in finding.fix
    assert 'torch.amp.custom_fwd(device_type="cpu")' in finding.fix
    assert finding.fix.endswith('island(model, "1")')
    assert finding.severity == "warning"


@pytest.mark.wording
def test_a_weight_that_is_not_trained_counts_too() -> None:
    model = between(Layer(Bare))
    model[1].requires_grad_(False)
    assert "takes bf16 and fp32" in found(model)[0].evidence
    model[1].function = Wide  # type: ignore[assignment]
    assert not found(model)


@pytest.mark.wording
def test_a_graph_that_was_walked_before_is_no_trouble() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        (slope,) = torch.autograd.grad(hidden.float().sum(), model[0].weight, retain_graph=True)  # type: ignore[index]
        return hidden.float().square().mean() + slope.detach().square().mean()

    with pytest.warns(UserWarning, match="Bare takes"):
        assert stepper(between(Layer(Bare))).step(loss_fn, torch.randn(4, 8)).applied


@pytest.mark.wording
def test_it_is_a_warning_that_a_person_sees() -> None:
    with pytest.warns(UserWarning, match="Bare takes"):
        stepper(between(Layer(Bare))).step(mse, torch.randn(4, 8))


@pytest.mark.wording
@pytest.mark.parametrize("function", [ForwardOnly, OfAnotherDevice])
def test_half_a_protection_is_none(function: type[torch.autograd.Function]) -> None:
    assert function.__name__ in found(between(Layer(function)))[0].evidence


@pytest.mark.parametrize("function", [Wide, AsTheRun])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_decorated_functions_are_left_alone(function: type[torch.autograd.Function], precision: str) -> None:
    assert not found(between(Layer(function)), precision)


def test_the_same_in_an_island_is_left_alone() -> None:
    assert not found(island(between(Layer(Bare)), "1"))
    weight = torch.randn(8, 8, requires_grad=True)
    assert not found(between(Applied(island(lambda x: Bare.apply(x, weight)))))  # type: ignore[no-untyped-call]


def test_nothing_is_said_in_fp32() -> None:
    assert not found(between(Layer(Bare)), "fp32")


@pytest.mark.parametrize("function", [Reversed.apply, lambda x: Quantised.apply(x)[0]])  # type: ignore[no-untyped-call]
def test_one_format_all_the_way_is_left_alone(function: Callable[[Tensor], Tensor]) -> None:
    assert not found(between(Applied(function)))


@pytest.mark.parametrize("trained", [True, False])
def test_a_number_without_dimensions_takes_the_format_of_what_it_meets(trained: bool) -> None:
    layer = Layer(Warmed)
    layer.weight = nn.Parameter(torch.tensor(2.0), requires_grad=trained)
    assert not found(between(layer))


def test_a_loss_of_their_own_that_is_summed_in_fp32_is_left_alone() -> None:
    ours = stepper(between(nn.Linear(8, 8)))
    ours.step(lambda model, x: Squared.apply(model(x)), torch.randn(4, 8))  # type: ignore[no-untyped-call]
    assert not [finding for finding in ours.findings if finding.id == ID]


def test_many_uses_are_told_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Layer(Bare) for _ in range(3)), nn.Linear(8, 512), nn.Linear(512, 8))
    assert len(found(model, batch=Window([torch.randn(4, 8), torch.randn(4, 8)]))) == 1


def test_later_steps_are_not_looked_at() -> None:
    model = between(Layer(AsTheRun))
    ours = stepper(model)
    ours.step(mse, torch.randn(4, 8))
    model[1].function = Bare  # type: ignore[assignment]
    ours.step(mse, torch.randn(4, 8))
    assert not ours.findings


@pytest.mark.wording
def test_the_context_form_is_looked_at_too() -> None:
    ours = stepper(model := between(Layer(Bare)))
    with ours.forward():
        loss = mse(model, torch.randn(4, 8))
    with pytest.warns(UserWarning, match="in 1: Bare takes"):
        ours.backward(loss)
    assert ours.apply().applied


@pytest.mark.wording
def test_each_of_several_losses_is_looked_at() -> None:
    model = nn.ModuleDict({"a": between(Layer(AsTheRun)), "b": between(Layer(Bare))})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()}
    ours = Stepper(model, optimizers, precision=resolve_precision_name("bf16"))
    with pytest.warns(UserWarning, match=r"in b\.1: Bare takes"):
        ours.step(lambda m, x: {name: mse(part, x) for name, part in m.items()}, torch.randn(4, 8))


def test_audit_finds_it_and_says_that_the_island_is_needed() -> None:
    (spotted,) = [one for one in audit(between(Layer(Bare)), mse, torch.randn(4, 8), precision="bf16").spotted]
    assert (spotted.finding.id, spotted.module) == (ID, "1")
    protected = audit(island(between(Layer(Bare)), "1"), mse, torch.randn(4, 8), precision="bf16")
    assert not [one for one in protected.spotted if one.finding.id == ID]
    assert [(one.path, one.needed) for one in protected.islands] == [("1", True)]


class Apart(torch.autograd.Function):
    """As `Bare`, with a forward that is not given the context."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(Bare.backward)


class ApartDecorated(Apart):
    forward = staticmethod(custom_fwd(Apart.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Bare.backward, device_type="cpu"))


@pytest.mark.wording
def test_a_context_that_is_set_up_apart_needs_an_island() -> None:
    """torch's decorators leave their note on the first argument, where no backward finds it."""
    with pytest.warns(UserWarning, match="Apart takes") as told:
        stepper(between(Layer(Apart))).step(mse, torch.randn(4, 8))
    assert "island" in str(told[0].message)
    assert "custom_fwd" not in str(told[0].message), "what does not work is not advised"
    assert not found(island(between(Layer(Apart)), "1"))
    with pytest.warns(UserWarning, match="ApartDecorated takes"), pytest.raises(AttributeError, match="autocast"):
        stepper(between(Layer(ApartDecorated))).step(mse, torch.randn(4, 8))
