"""Islands wherever they are: beside the model, round a function, under torch.compile, in what is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import Stepper, island
from halfstep.errors import PrecisionNotObserved
from halfstep.precision import island as islands
from halfstep.precision.precision import resolve_precision_name


def make(model: nn.Module) -> Stepper:
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name("bf16"))


def mse(x: Tensor) -> Tensor:
    return x.float().square().mean()


def observed(stepper: Stepper) -> Any:
    assert stepper.observed is not None
    return stepper.observed


def test_a_module_beside_the_model() -> None:
    encoder = island(nn.Linear(64, 64))
    stepper = make(nn.Linear(64, 8))
    assert stepper.step(lambda m, x: mse(m(encoder(x))), torch.randn(16, 64)).applied
    # Its backward too: the weights of the encoder get a gradient, its input does not.
    assert observed(stepper).island_flops == 2 * (2 * 16 * 64 * 64)
    assert observed(stepper).share == 1.0


def test_a_function_beside_the_model() -> None:
    encoder = nn.Linear(64, 64).requires_grad_(False)
    wide = island(lambda x: encoder(x))
    stepper = make(nn.Linear(64, 8))
    assert stepper.step(lambda m, x: mse(m(wide(x))), torch.randn(16, 64)).applied
    assert observed(stepper).island_flops == 2 * 16 * 64 * 64


@pytest.mark.wording
def test_the_same_without_an_island_is_refused() -> None:
    encoder = nn.Linear(64, 64).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = encoder(x)
        return mse(model(x))

    with pytest.raises(PrecisionNotObserved, match="outside the model"):
        make(nn.Linear(64, 8)).step(loss, torch.randn(16, 64))


@pytest.mark.parametrize("path", ["2", "4"])
def test_before_torch_compile(path: str) -> None:
    torch._dynamo.reset()
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    model: Any = torch.compile(island(nn.Sequential(*layers), path), backend="eager")
    stepper = make(model)
    for _ in range(3):
        assert stepper.step(lambda m, x: mse(m(x)), torch.randn(8, 16)).applied
    assert stepper.findings == []
    assert observed(stepper).island_flops > 0
    torch._dynamo.reset()


@pytest.mark.wording
def test_an_idle_island_under_torch_compile_is_found() -> None:
    torch._dynamo.reset()

    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.used(x), self.idle.weight)

    model: Any = torch.compile(island(Leaves(), "idle"), backend="eager")
    with pytest.warns(UserWarning, match=r"nothing ran in the island '_orig_mod\.idle'"):
        make(model).step(lambda m, x: mse(m(x)), torch.randn(3, 8))
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_computes_again_is_still_in_the_island(reentrant: bool) -> None:
    model = island(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)), "1")
    stepper = make(model)

    def loss(m: Any, x: Tensor) -> Tensor:
        return mse(m[2](checkpoint(m[1], m[0](x), use_reentrant=reentrant)))

    assert stepper.step(loss, torch.randn(6, 8)).applied
    assert observed(stepper).share == 1.0
    # Without reentry torch stops computing again as soon as it has what backward needs: the input of the last layer.
    assert observed(stepper).island_flops == (4 if reentrant else 3) * 2 * 6 * 8 * 8


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
def test_an_island_that_computes_parts_of_itself_again(reentrant: bool, as_function: bool) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

        def _block(self, x: Tensor) -> Tensor:
            if as_function:
                x = nn.functional.linear(x, self.a.weight).tanh()
                return nn.functional.linear(x, self.b.weight)
            return self.b(self.a(x).tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self._block, x, use_reentrant=reentrant)

    model = island(nn.Sequential(nn.Linear(8, 8), Inner(), nn.Linear(8, 4)), "1")
    stepper = make(model)
    assert stepper.step(lambda m, x: mse(m(x)), torch.randn(6, 8)).applied
    assert observed(stepper).share == 1.0


def test_a_function_that_is_an_island_inside_what_is_computed_again() -> None:
    inner, weight = nn.Linear(8, 64), torch.randn(64, 64)
    wide = island(lambda x: (inner(x) @ weight).tanh() @ weight)
    stepper = make(nn.Linear(8, 8))

    def loss(m: Any, x: Tensor) -> Tensor:
        return mse(checkpoint(lambda h: wide(h).sin(), m(x), use_reentrant=False))

    assert stepper.step(loss, torch.randn(6, 8)).applied
    assert observed(stepper).share == 1.0


@pytest.mark.wording
def test_a_part_of_an_island_that_is_called_past_it_is_not_protected_and_not_set_aside() -> None:
    model = island(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))), "1")
    with pytest.warns(UserWarning, match="nothing ran in the island '1'"):
        make(model).step(lambda m, x: mse(m[1][0](m[0](x))), torch.randn(6, 8))


def test_nothing_stays_marked_after_an_error() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    wide = island(fails)
    stepper = make(nn.Linear(8, 8))
    with pytest.raises(ZeroDivisionError):
        stepper.step(lambda m, x: mse(wide(m(x))), torch.randn(3, 8))
    assert islands.running.islands == ()
    assert not islands.has_island_watchers()
