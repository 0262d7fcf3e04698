"""Runs of every day: some diverge, some fail once and never again, some are only compiled wrongly, some are healthy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plants.faults import Applies
from benchmarks.plants.models import Perceptron, Pictures, Plain, Transformer, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants
from halfstep import Window

ALL, TWO, ONE = "fp16 bf16 fp32", "bf16 fp32", "fp32"
NOT_REPRODUCIBLE = "not_reproducible"
"""What is said of a step that is finite when it is run again."""
MANY = 120


# -- divergences --------------------------------------------------------------------------------------------------


def _with_optimizer(kind: Callable[..., torch.optim.Optimizer], rate: float, **options: Any) -> Callable[[], Scene]:
    def make() -> Scene:
        model = Plain()
        return Scene(
            model,
            squares,
            batch_for(model),
            rate=rate,
            steps=MANY,
            scale=256.0,
            optimizer=lambda m, lr: kind(m.parameters(), lr, **options),
        )

    return make


def warm_up_that_never_ends() -> Scene:
    """A schedule that doubles the rate in every step."""
    made: list[torch.optim.Optimizer] = []

    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(model.parameters(), rate))
        return made[0]

    def before(step: int) -> None:
        made[0].param_groups[0]["lr"] *= 2

    model = Plain()
    return Scene(model, squares, batch_for(model), rate=1e-3, steps=MANY, scale=256.0, before=before, optimizer=build)


def sum_in_place_of_a_mean() -> Scene:
    """A loss that sums over what it used to average, with the rate of the average."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 1000 * (model(batch[0]).float() - batch[1]).square().sum()

    model = Plain()
    return Scene(model, loss_fn, batch_for(model), rate=0.1, steps=MANY, scale=1.0)


# -- what does not happen again -----------------------------------------------------------------------------------


def _once(make_change: Callable[[list[int]], Callable[[Tensor], Tensor]], model: Any = Perceptron) -> Scene:
    """The state of the event is a list, outside of any module."""
    built = model(Applies(make_change([])))
    return Scene(built, squares, batch_for(built), steps=6, scale=256.0)


def third_call(calls: list[int]) -> Callable[[Tensor], Tensor]:
    def change(h: Tensor) -> Tensor:
        calls.append(1)
        return h * torch.inf if len(calls) == 3 else h

    return change


def one_row(calls: list[int]) -> Callable[[Tensor], Tensor]:
    """One row of one activation."""

    def change(h: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) != 2:
            return h
        spoilt = torch.zeros_like(h)
        spoilt[0] = torch.nan
        return h + spoilt

    return change


def gradient_once(calls: list[int]) -> Callable[[Tensor], Tensor]:
    """Forward is always right; the gradient of the second step is lost."""

    def lose(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * torch.nan if len(calls) == 2 else gradient

    def change(h: Tensor) -> Tensor:
        h = h.clone()
        if h.requires_grad:
            h.register_hook(lose)
        return h

    return change


def numbers_of_numpy() -> Scene:
    """Noise from NumPy, which nobody puts back; one draw in a row of draws is unlucky."""
    drawn = iter([0.5, 0.7, 0.0, *np.random.default_rng(0).uniform(0.5, 1.0, 200)])

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch) / float(next(drawn))

    def divided(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        try:
            return loss_fn(model, batch)
        except ZeroDivisionError:
            return squares(model, batch) * torch.inf

    model = Perceptron()
    return Scene(model, divided, batch_for(model), steps=6, scale=256.0)


def numbers_of_python() -> Scene:
    """Python's own random numbers decide which layer is left out; with the first seed all of them are."""
    numbers = random.Random(1)  # 0.13, 0.85, 0.76, 0.26 ...

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        kept = 1.0 if numbers.random() > 0.2 else 0.0
        return squares(model, batch) * kept / torch.tensor(kept)

    model = Perceptron()
    return Scene(model, loss_fn, batch_for(model), steps=3, scale=256.0)


def weight_gradient_once() -> Scene:
    """A hook on a weight, as a faulty reduction leaves it: one number of one gradient, once."""
    calls: list[int] = []

    def lose(gradient: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            gradient = gradient.clone()
            gradient[0] = torch.inf
        return gradient

    model = Perceptron()
    model.head.weight.register_hook(lose)
    return Scene(model, squares, batch_for(model), steps=8, scale=256.0)


def micro_batch_once() -> Scene:
    """The second micro-batch of the second window."""
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        return squares(model, batch) * (torch.nan if len(calls) == 5 else 1.0)

    model = Perceptron()
    return Scene(model, loss_fn, Window([batch_for(model) for _ in range(3)]), steps=4, scale=256.0)


def memory_of_others() -> Scene:
    """`torch.empty` that is not filled: whatever was left there, which differs from call to call."""
    left = [0.0, 0.0, torch.inf, *[0.0] * 100]

    def change(h: Tensor) -> Tensor:
        return h + torch.empty_like(h).fill_(left.pop(0))

    model = Perceptron(change=change)
    return Scene(model, squares, batch_for(model), steps=6, scale=256.0)


# -- compilers ----------------------------------------------------------------------------------------------------


def _backend(spoil: Callable[[Tensor], Tensor], calls: list[int], first: int) -> Callable[..., Any]:
    """Compiled code that is right in its first calls, and wrong from the call `first` on."""

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls.append(1)
            outs = graph(*given)
            late = len(calls) >= first
            return tuple(spoil(o) if late and isinstance(o, Tensor) and o.is_floating_point() else o for o in outs)

        return run

    return backend


def compiled_wrong_from_the_third_call_on() -> Scene:
    torch._dynamo.reset()
    model = Perceptron()
    compiled: Any = torch.compile(model, backend=_backend(lambda out: out * torch.nan, [], 3))
    return Scene(compiled, squares, batch_for(model), steps=6, scale=256.0)


def compiled_activation() -> Scene:
    """One module among the convolutions is compiled, by its own `compile()`."""
    torch._dynamo.reset()
    model = Pictures(Applies(torch.cos))
    model.fault.compile(backend=_backend(lambda out: out + torch.inf, [], 1))
    return Scene(model, squares, batch_for(model), scale=256.0)


def compiled_metric_of_the_loss() -> Scene:
    torch._dynamo.reset()

    @torch.compile(backend=_backend(lambda out: out * 0 / (out * 0), [], 1))
    def smooth(a: Tensor, b: Tensor) -> Tensor:
        return F.smooth_l1_loss(a, b, reduction="none")

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return smooth(model(batch[0]).float(), batch[1]).mean()

    model = Transformer()
    return Scene(model, loss_fn, batch_for(model), scale=256.0)


# -- healthy: a loss scale that finds its place -------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)).relu())


def _healthy(model: nn.Module, loss_fn: Callable[..., Any], batch: Any, weight: float = 256.0) -> Scene:
    return Scene(model, lambda m, b: weight * loss_fn(m, b), batch, rate=1e-6, scale=2.0**24)


def words() -> Scene:
    ids = torch.randint(16, (4, 6))
    return _healthy(Words(), lambda m, b: F.cross_entropy(m(b).float().flatten(0, 1), b.flatten()), ids, 1024.0)


def over_a_window() -> Scene:
    model = Plain()
    return _healthy(model, squares, Window([batch_for(model) for _ in range(3)]))


def with_dropout() -> Scene:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    return _healthy(model, squares, batch_for(model))


def with_a_frozen_body() -> Scene:
    model = Perceptron()
    model.body.requires_grad_(False)
    return _healthy(model, squares, batch_for(model))


def with_batch_statistics() -> Scene:
    model = Pictures()
    return _healthy(model, squares, batch_for(model), 1024.0)


def all_of_them() -> list[Plant]:
    diverges = Expected("divergence")
    once = Expected(NOT_REPRODUCIBLE, words=("non-deterministic operation",))
    compiler = Expected("compiler", words=("in eager mode",))
    healthy = Expected("warm_up", words=("fit without one",))
    return [
        *plants("rmsprop_far_too_fast", TWO, _with_optimizer(torch.optim.RMSprop, 1e9), diverges),
        *plants("adam_far_too_fast", TWO, _with_optimizer(torch.optim.Adam, 1e9), diverges),
        *plants("nesterov_too_fast", ALL,
                _with_optimizer(torch.optim.SGD, 10.0, momentum=0.9, nesterov=True), diverges),
        *plants("adagrad_far_too_fast", TWO, _with_optimizer(torch.optim.Adagrad, 1e9), diverges),
        *plants("warm_up_that_never_ends", TWO, warm_up_that_never_ends, diverges),
        *plants("sum_in_place_of_a_mean", TWO, sum_in_place_of_a_mean, diverges),
        *plants("third_call", ALL, lambda: _once(third_call), once),
        *plants("one_row_in_attention", TWO, lambda: _once(one_row, Transformer), once),
        *plants("one_row_in_pictures", TWO, lambda: _once(one_row, Pictures), once),
        *plants("gradient_once", TWO, lambda: _once(gradient_once), once),
        *plants("numbers_of_numpy", TWO, numbers_of_numpy, once),
        *plants("numbers_of_python", TWO, numbers_of_python, once),
        *plants("weight_gradient_once", TWO, weight_gradient_once, once),
        *plants("micro_batch_once", TWO, micro_batch_once, once),
        *plants("memory_of_others", TWO, memory_of_others, once),
        *plants("compiled_wrong_from_the_third_call_on", ONE, compiled_wrong_from_the_third_call_on, compiler),
        *plants("compiled_activation", ONE, compiled_activation, compiler),
        *plants("compiled_metric_of_the_loss", ONE, compiled_metric_of_the_loss, compiler),
        *plants("warm_up_of_words", "fp16", words, healthy),
        *plants("warm_up_over_a_window", "fp16", over_a_window, healthy),
        *plants("warm_up_with_dropout", "fp16", with_dropout, healthy),
        *plants("warm_up_with_a_frozen_body", "fp16", with_a_frozen_body, healthy),
        *plants("warm_up_with_batch_statistics", "fp16", with_batch_statistics, healthy),
    ]  # fmt: skip
