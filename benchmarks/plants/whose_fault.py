"""Faults that look like others: in on_gradients, while a loss grows on purpose, in a batch that the step writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Plain, batch_for, squares
from benchmarks.plants.plant import LOSS, ROOT, Expected, Plant, Scene, plants

ALL, TWO = "fp16 bf16 fp32", "bf16 fp32"
GOOD = 4
"""Steps before the one that fails."""
Batch = tuple[Tensor, ...]


# -- on_gradients ----------------------------------------------------------------------------------------------------


def _edited(edit: Callable[[list[Tensor]], object], model: nn.Module | None = None) -> Scene:
    """A run whose gradients are edited from the fifth step on."""
    model, now = model or Perceptron(), list[int]()

    def on_gradients(parameters: list[Tensor]) -> None:
        if now[-1] >= GOOD:
            edit(parameters)

    options = {"on_gradients": on_gradients}
    return Scene(model, squares, batch_for(model), steps=GOOD + 1, before=now.append, scale=256.0, options=options)


def by_a_count_of_zero() -> Scene:
    """The mean over workers, of which there are none."""

    def edit(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad /= 0  # type: ignore[operator]  # by a count of zero

    return _edited(edit)


class Unused(nn.Module):
    """A parameter whose gradient is exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.rest = nn.Linear(8, 4), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x) + 0 * self.unused(x)


def to_unit_length() -> Scene:
    """Each gradient divided by its length, without an epsilon; one of them has none."""

    def edit(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = parameter.grad / parameter.grad.norm()  # type: ignore[union-attr]  # to unit length

    return _edited(edit, Unused())


def amplified() -> Scene:
    def edit(parameters: list[Tensor]) -> None:
        torch._foreach_mul_([p.grad for p in parameters], 1e38)  # type: ignore[arg-type]
        torch._foreach_mul_([p.grad for p in parameters], 1e38)  # type: ignore[arg-type]  # amplified

    return _edited(edit)


def by_numpy() -> Scene:
    def edit(parameters: list[Tensor]) -> None:
        parameters[-1].grad.numpy()[...] = float("nan")  # type: ignore[union-attr]

    return _edited(edit)


def lost_once() -> Scene:
    left = [torch.nan]

    def edit(parameters: list[Tensor]) -> None:
        if left:
            parameters[0].grad.mul_(left.pop())  # type: ignore[union-attr]

    return _edited(edit)


# -- losses that grow on purpose -------------------------------------------------------------------------------------


def _annealed(
    term: Callable[[Tensor, Tensor], Tensor],
    *,
    build: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    rate: float = 1e-4,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> Scene:
    """The weight of the loss rises from 1e-5 to 10; a term gets 1, and 0 in the last step."""
    model = Perceptron()
    x, y = batch_for(model)

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        out = model(batch[0]).float()
        return batch[2] * (out - batch[1]).square().mean() + 1e-6 * term(out, batch[3])

    def batch_at(step: int) -> Batch:
        return x, y, torch.tensor(10.0 ** min(step - 5, 1)), torch.tensor(float(step < 7))

    def build_for(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return build(model.parameters(), rate)

    return Scene(model, loss_fn, (), rate=rate, steps=8, scale=256.0, batch_at=batch_at, optimizer=build_for,
                 before=lambda step: before(model, step))  # fmt: skip


def empty_sum(out: Tensor, one: Tensor) -> Tensor:
    return (out.softmax(-1)[:, 0] * one).sum().log()  # log of an empty sum


def empty_share(out: Tensor, one: Tensor) -> Tensor:
    return (out * one).square().sum() / one  # a share of nothing


def steep(out: Tensor, one: Tensor) -> Tensor:
    return ((1 - one) * 100 + out).exp().mean()  # steep


def lost_weight(model: nn.Module, step: int) -> None:
    if step == 7:
        model.head.weight.data[2, 3] = torch.nan  # type: ignore[union-attr, operator, index]


def overflow_of_a_weight() -> Scene:
    """The loss weight rises to where the loss does not fit fp16; that is the format's fault, not the rate's."""
    model = Plain()
    x, y = batch_for(model)

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        return ((model(batch[0]) * 4).square() * batch[2].to(torch.float16)).mean().float()

    def batch_at(step: int) -> Batch:
        return x, y, torch.tensor(10.0 ** (step - 3) if step < 7 else 60000.0)

    return Scene(model, loss_fn, (), rate=1e-9, steps=9, scale=1.0, batch_at=batch_at)


def grows_into_a_logarithm() -> Scene:
    """Nothing keeps the output from growing, step by step, until a softmax is saturated and its logarithm is taken."""
    model = Plain()

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        out = model(batch[0]).float()
        return -out.square().mean() - 1e-6 * out.softmax(-1).log().mean()

    return Scene(model, loss_fn, batch_for(model), rate=0.3, steps=200, scale=256.0)


# -- batches that the step writes to ---------------------------------------------------------------------------------


def _written(write: Callable[[Batch], object], *more: Tensor, value: float | None = None) -> Scene:
    model = Perceptron()
    x, y = 1.0 + torch.rand(6, 8), torch.randn(6, 4)
    if value is not None:
        x[3, 5] = value

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        write(batch)
        return squares(model, (batch[0], batch[1]))

    return Scene(model, loss_fn, (x, y, *more), scale=256.0)


def by_its_count(batch: Batch) -> None:
    batch[0].div_(batch[2])  # by its count


def log_in_place(batch: Batch) -> None:
    batch[0].log_()  # log in place


def target_by_zero(batch: Batch) -> None:
    batch[1].div_(batch[1].sum() * 0)  # target by zero


def by_mean_and_spread(batch: Batch) -> None:
    batch[0].sub_(1.5).div_(0.3)


# -- decompositions --------------------------------------------------------------------------------------------------


def equal_values(h: Tensor) -> Tensor:
    """The slope of singular vectors is not defined where values are equal."""
    u, s, v = torch.linalg.svd(torch.eye(4) + 0 * h.float().mean())  # equal values
    return h + (u @ v).sum() + s.sum()


def equal_eigenvalues(h: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(torch.eye(4) + 0 * h.float().mean())  # equal eigenvalues
    return h + vectors.abs().sum() + values.sum()


def large_exponent(h: Tensor) -> Tensor:
    return h + torch.linalg.matrix_exp(100 * torch.eye(4) + 0 * h.float().mean()).mean()  # large exponent


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[], Scene]:
    def make() -> Scene:
        model = Perceptron(change=change)
        return Scene(model, squares, batch_for(model), scale=256.0)

    return make


# -- Python ----------------------------------------------------------------------------------------------------------


def noise_of_python() -> Scene:
    """Noise from Python's random numbers: the first draw is the unlucky one."""
    model, numbers = Perceptron(), random.Random(1)  # 0.13, 0.85, 0.76, 0.26 ...

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return squares(model, batch) / float(numbers.random() > 0.2)

    return Scene(model, loss_fn, batch_for(model), scale=256.0)


def all_of_them() -> list[Plant]:
    code, edited = "code", ("before on_gradients and not after it", "on_gradients (aten.")
    grown = "(on_gradients)"
    return [
        *plants("by_a_count_of_zero", ALL, by_a_count_of_zero,
                Expected(code, "aten.div_", grown, mark="by a count of zero", words=(*edited, "divides by zero"))),
        *plants("to_unit_length", ALL, to_unit_length,
                Expected(code, "aten.div", grown, mark="to unit length", words=edited)),
        *plants("amplified_gradients", TWO, amplified,
                Expected(code, "aten._foreach_mul_", grown, mark="amplified", words=edited)),
        *plants("gradients_by_numpy", TWO, by_numpy, Expected(code, words=("before on_gradients and not after it",))),
        *plants("gradients_lost_once", TWO, lost_once, Expected("not_reproducible", words=("Python state",))),
        *plants("annealed_empty_sum", ALL, lambda: _annealed(empty_sum),
                Expected(code, "aten.log", LOSS, mark="log of an empty sum")),
        *plants("annealed_empty_sum_with_adam", TWO, lambda: _annealed(empty_sum, build=torch.optim.AdamW, rate=1e-3),
                Expected(code, "aten.log", LOSS, mark="log of an empty sum")),
        *plants("annealed_share", ALL, lambda: _annealed(empty_share),
                Expected(code, "aten.div", LOSS, mark="a share of nothing", words=("divides by zero",))),
        *plants("annealed_and_steep", TWO, lambda: _annealed(steep), Expected(code, "aten.exp", LOSS, mark="steep")),
        *plants("annealed_lost_weight", ALL, lambda: _annealed(empty_sum, before=lost_weight),
                Expected("state", outside="weight head.weight")),
        *plants("annealed_overflow", "fp16", overflow_of_a_weight, Expected("precision")),
        *plants("grows_into_a_logarithm", ALL, grows_into_a_logarithm, Expected("divergence")),
        *plants("batch_by_its_count", TWO, lambda: _written(by_its_count, torch.zeros(())),
                Expected(code, "aten.div_", LOSS, mark="by its count", words=("divides by zero",))),
        *plants("batch_by_its_logarithm", TWO, lambda: _written(log_in_place, value=0.0),
                Expected(code, "aten.log_", LOSS, mark="log in place", words=("logarithm of 0",))),
        *plants("target_by_zero", TWO, lambda: _written(target_by_zero),
                Expected(code, "aten.div_", LOSS, mark="target by zero", words=("divides by zero",))),
        *plants("nan_normalised_in_place", TWO, lambda: _written(by_mean_and_spread, value=float("nan")),
                Expected("data", words=("the batch[0], sample 3 contains nan", "written to in place"))),
        *plants("inf_normalised_in_place", TWO, lambda: _written(by_mean_and_spread, value=float("inf")),
                Expected("data", words=("the batch[0], sample 3 contains inf", "written to in place"))),
        *plants("equal_values", TWO, _changed(equal_values), Expected(code, backward=True, mark="equal values")),
        *plants("equal_eigenvalues", TWO, _changed(equal_eigenvalues),
                Expected(code, backward=True, mark="equal eigenvalues")),
        *plants("large_exponent", TWO, _changed(large_exponent),
                Expected(code, "aten.linalg_matrix_exp", ROOT, mark="large exponent")),
        *plants("noise_of_python", TWO, noise_of_python,
                Expected("not_reproducible", words=("random numbers outside torch",))),
    ]  # fmt: skip
