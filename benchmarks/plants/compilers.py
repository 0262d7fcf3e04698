"""Code that is right until it is compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.faults import Applies
from benchmarks.plants.models import Perceptron, Pictures, Plain, Transformer, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants

TWO = "bf16 fp32"
Compiled = Callable[..., Any]


def _on_results(change: Callable[[Tensor], Tensor]) -> Callable[..., Compiled]:
    """A backend whose code computes the right thing, and then changes it."""

    def backend(graph: Any, _inputs: Any) -> Compiled:
        def run(*given: Any) -> Any:
            return tuple(change(out) if isinstance(out, Tensor) and out.is_floating_point() else out
                         for out in graph(*given))  # fmt: skip

        return run

    return backend


def infinite(out: Tensor) -> Tensor:
    return out + torch.inf


def one_element(out: Tensor) -> Tensor:
    spoilt = torch.zeros_like(out)
    spoilt.view(-1)[-1] = torch.nan
    return out + spoilt


def far_too_large(out: Tensor) -> Tensor:
    return out * 1e30 * 1e30


def zero_over_zero(out: Tensor) -> Tensor:
    return out * 0 / (out * 0)


class _Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.nan


def wrong_backwards(out: Tensor) -> Tensor:
    """Forward is right; only gradients are not."""
    return _Backwards.apply(out)  # type: ignore[no-any-return, no-untyped-call]


def swapped(graph: Any, _inputs: Any) -> Compiled:
    """Takes one function for another: a hyperbolic tangent for a logarithm."""
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", node.target) in ("tanh", "relu"):
            node.op, node.target = "call_function", torch.log
            node.kwargs = {}
    graph.recompile()
    return graph.forward  # type: ignore[no-any-return]


def _whole(model: Callable[[], nn.Module], backend: Any) -> Callable[[], Scene]:
    def make() -> Scene:
        torch._dynamo.reset()
        built = model()
        return Scene(torch.compile(built, backend=backend), squares, batch_for(built), scale=256.0)  # type: ignore[arg-type]

    return make


def _with_a_part() -> nn.Module:
    return Perceptron(Applies(torch.sin))


def _in_place(model: Callable[[], nn.Module], part: str, backend: Any) -> Callable[[], Scene]:
    """One module is compiled, and the model stays what it is."""

    def make() -> Scene:
        torch._dynamo.reset()
        built = model()
        built.get_submodule(part).compile(backend=backend)
        return Scene(built, squares, batch_for(built), scale=256.0)

    return make


def compiled_loss() -> Scene:
    """No module is compiled: the loss is."""
    torch._dynamo.reset()

    @torch.compile(backend=_on_results(infinite))
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return distance(model(batch[0]).float(), batch[1]).mean()

    model = Perceptron()
    return Scene(model, loss_fn, batch_for(model), scale=256.0)


def compiled_function() -> Scene:
    """A function that the model calls."""
    torch._dynamo.reset()
    change = torch.compile(operator.neg, backend=_on_results(one_element))
    model = Perceptron(change=change)
    return Scene(model, squares, batch_for(model), scale=256.0)


def all_of_them() -> list[Plant]:
    expected = Expected("compiler", words=("in eager mode",))
    return [
        *plants("compiled_to_infinity", "fp16 bf16 fp32", _whole(Perceptron, _on_results(infinite)), expected),
        *plants("compiled_one_element", TWO, _whole(Transformer, _on_results(one_element)), expected),
        *plants("compiled_too_large", TWO, _whole(Plain, _on_results(far_too_large)), expected),
        *plants("compiled_zero_over_zero", TWO, _whole(Pictures, _on_results(zero_over_zero)), expected),
        *plants("compiled_backwards", TWO, _whole(Perceptron, _on_results(wrong_backwards)), expected),
        *plants("compiled_for_another", TWO, _whole(Perceptron, swapped), expected),
        *plants("compiled_part_wrong", TWO, _in_place(_with_a_part, "fault", _on_results(one_element)), expected),
        *plants("compiled_block", TWO, _in_place(Transformer, "blocks.1", _on_results(infinite)), expected),
        *plants("compiled_loss", TWO, compiled_loss, expected),
        *plants("compiled_change", TWO, compiled_function, expected),
    ]  # fmt: skip
