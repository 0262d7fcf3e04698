"""Compiled models and islands, recomputed activations, higher-order operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from benchmarks.loops.harness import (
    NAN,
    Case,
    adamw,
    ce,
    labelled,
    loop,
    mlp,
    mse,
    named,
    normal,
    pairs,
    poisoned,
    promise,
    require,
    sgd,
    skips,
    trains,
)
from benchmarks.loops.precisions import held_beside
from halfstep import island


def _compiled(backend: str, precision: str) -> str:
    """Both loops compile, so both are the same."""

    def build() -> Case:
        torch._dynamo.reset()
        model = torch.compile(mlp(norm=True), backend=backend)
        return Case(model, adamw(model), ce)

    return promise(build, labelled(4), precision=precision)


for _backend in ("eager", "aot_eager"):
    for _precision in ("fp32", "bf16"):
        named(f"compile_{_backend}_{_precision}", partial(_compiled, _backend, _precision), "compiled")


@loop
def compile_in_place() -> str:
    """`model.compile(backend="eager")`: the module stays what it was."""

    def build() -> Case:
        torch._dynamo.reset()
        model = mlp(norm=True)
        model.compile(backend="eager")
        return Case(model, adamw(model), ce)

    return promise(build, labelled(4))


@loop
def compile_really_compiles() -> str:
    """Watching the first step must not switch the compiler off: graphs are counted."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = torch.compile(mlp(), backend=backend)
    case = Case(model, adamw(model), ce)
    case.start(precision="bf16")
    trains(case, labelled(4))
    require(graphs, "no graph was compiled")
    return f"{len(graphs)} graph compiled"


@loop
def island_then_compile() -> str:
    """The documented order: the island first, then torch.compile."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner = mlp(64, 64, 64, 4)
    island(inner, "2")
    model = torch.compile(inner, backend="eager")
    case = Case(model, adamw(model), ce)
    stepper = case.start(precision="bf16")
    trains(case, labelled(4, shape=(64,)))
    skips(case, poisoned(labelled(1, shape=(64,))[0]))
    said = [f.id for f in stepper.findings if "island" in f.id]
    require(not said, f"a false finding: {said}")
    return f"4 steps, no false finding; {stepper.observed}"


@loop
def compiled_islandheld_beside() -> str:
    torch._dynamo.reset()

    def make() -> Any:
        encoder = torch.compile(island(nn.Linear(64, 64).requires_grad_(False)), backend="eager")
        return encoder, encoder

    return held_beside(make)


@loop
def compiled_loss_function() -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    fast = torch.compile(lambda x, y: F.cross_entropy(x.float(), y), backend="eager")
    case = Case(model, adamw(model), lambda m, b: fast(m(b[0]), b[1]))
    case.start(precision="bf16")
    trains(case, labelled(3))
    skips(case, poisoned(labelled(1)[0]))
    return "3 steps, a skip undone"


# -- recomputation ------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = mlp(16, 32, 32, norm=True), nn.Linear(32, 4), reentrant
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return self.head(checkpoint(lambda t: self.drop(self.body(t)), x, use_reentrant=self.reentrant))


def _recomputed(reentrant: bool, precision: str) -> str:
    def build() -> Case:
        model = Recomputed(reentrant)
        return Case(model, adamw(model), ce)

    return promise(build, labelled(3), precision=precision)


for _reentrant in (False, True):
    for _precision in ("fp32", "bf16"):
        _mode = "reentrant" if _reentrant else "not_reentrant"
        named(f"checkpoint_{_mode}_{_precision}", partial(_recomputed, _reentrant, _precision), "compiled")


# -- higher-order operators ---------------------------------------------------------------------------------------


class Flex(nn.Module):
    """Attention frozen and without gradients, which torch's CPU kernel does not have, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        n, t, d = x.shape
        with torch.no_grad():
            q, k, v = (p.view(n, t, 2, d // 2).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            attended = flex_attention(q, k, v).transpose(1, 2).reshape(n, t, d)
        return self.out(attended)


@loop
def flex_attention() -> str:
    def build() -> Case:
        model = Flex()
        return Case(model, adamw(model), lambda m, b: m(b[0]).float().square().mean())

    return promise(build, [(normal(2, 16, 32, seed=i),) for i in range(3)])


@loop
def flex_attention_bf16_and_diagnose() -> str:
    torch.manual_seed(0)
    model = Flex()
    case = Case(model, adamw(model), lambda m, b: m(b[0]).float().square().mean())
    stepper = case.start(precision="bf16")
    batch = (normal(2, 16, 32),)
    trains(case, [batch])
    report = skips(case, (batch[0] * NAN,))
    halfstep.diagnose(stepper, report)
    return f"{stepper.observed}; diagnosed"


@loop
def torch_cond() -> str:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda t: self.one(t), lambda t: self.two(t), (x,))

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Branching()
    case = Case(model, sgd(model), mse)
    case.start()
    trains(case, pairs(2))
    return "2 steps applied"
