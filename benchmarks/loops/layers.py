"""Layers and tensors with peculiarities: writes in forward, in hooks, in autograd functions, odd kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from benchmarks.loops.harness import (
    INF,
    SPOIL,
    Case,
    Seen,
    adamw,
    ce,
    labelled,
    loop,
    mlp,
    mse,
    normal,
    pairs,
    poisoned,
    promise,
    sgd,
    skips,
    trains,
    whole,
)

BATCHES = pairs(5)


def of(make: Callable[[], nn.Module], *names: str, loss: Any = mse) -> Callable[[], Case]:
    """A model, and these of its attributes."""

    def build() -> Case:
        model = make()
        seen = Seen(lambda: {name: getattr(model, name) for name in names})
        return Case(model, sgd(model, 0.05, momentum=0.9), loss, beside=[seen])

    return build


# -- weights that forward writes ----------------------------------------------------------------------------------


@loop
def weights_clamped_in_forward() -> str:
    """WGAN: `p.data.clamp_` before each use, on weights that the optimizer moves as well."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            for p in self.parameters():
                p.data.clamp_(-0.05, 0.05)
            return self.net(x)

    return promise(of(Critic), BATCHES)


@loop
def weights_standardised_in_place() -> str:
    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.sub_(self.weight.mean(1, keepdim=True)).div_(self.weight.std(1, keepdim=True) + 1e-5)
            return super().forward(x)

    return promise(of(lambda: Standardised(16, 4)), BATCHES)


@loop
def weights_renormalised_by_a_forward_pre_hook() -> str:
    """Max-norm constraint: a pre-hook that calls `torch.renorm` and rebinds `.data`."""

    def make() -> nn.Module:
        model = mlp()

        def renorm(module: nn.Module, _: Any) -> None:
            module.weight.data = torch.renorm(module.weight.data, 2, 0, 0.3)  # type: ignore[union-attr, operator]

        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(renorm)
        return model

    return promise(of(make), BATCHES)


@loop
def old_spectral_norm() -> str:
    """`nn.utils.spectral_norm`: `weight` is a plain attribute, rebound by a hook; `u` is written in place."""
    return promise(of(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 8)), nn.Linear(8, 4))), BATCHES)


@loop
def parametrization_with_a_counter() -> str:
    """A parametrization whose `forward` anneals a Python number, and whose tensor attribute follows the weight."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level, self.mean = 1.0, torch.zeros(4, 16)

        def forward(self, w: Tensor) -> Tensor:
            self.level *= 0.9
            self.mean = 0.9 * self.mean + 0.1 * w.detach()
            return w + 0.01 * self.level * self.mean

    def build() -> Case:
        model = nn.Linear(16, 4)
        noisy = Noisy()
        parametrize.register_parametrization(model, "weight", noisy)
        return Case(model, sgd(model), mse, beside=[Seen(lambda: {"level": noisy.level, "mean": noisy.mean})])

    return promise(build, BATCHES)


@loop
def weight_dropped_and_set_as_an_attribute() -> str:
    """AWD-LSTM's weight drop: the raw parameter is registered, the dropped one is set as a plain tensor."""

    class WeightDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)
            self.raw = nn.Parameter(self.linear.weight.detach().clone())
            del self.linear.weight
            self.linear.weight = self.raw.detach().clone()

        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight = F.dropout(self.raw, 0.5, self.training)
            return self.linear(x)

    return promise(of(WeightDrop), BATCHES)


# -- writes from autograd -----------------------------------------------------------------------------------------


class _Counts(torch.autograd.Function):
    """Writes a tensor of its caller in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: Tensor) -> Tensor:
        ctx.calls = calls
        calls[0] += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.calls[1] += gradients[0].abs().mean()
        return gradients[0], None


@loop
def autograd_function_that_writes() -> str:
    def build() -> Case:
        model, calls = mlp(), torch.zeros(2)

        def loss(m: nn.Module, b: Any) -> Tensor:
            return F.mse_loss(_Counts.apply(m(b[0]), calls), b[1])

        return Case(model, adamw(model), loss, beside=[calls])

    return promise(build, BATCHES)


@loop
def running_scale_of_gradients() -> str:
    """A tensor hook divides gradients by their running norm, an attribute of the module that is rebound in backward."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = mlp(), torch.ones(())

        def scale(self, gradient: Tensor) -> Tensor:
            self.norm = 0.9 * self.norm + 0.1 * gradient.norm()
            return gradient / (self.norm + 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            if out.requires_grad:
                out.register_hook(self.scale)
            return out

    return promise(of(Scaled, "norm"), BATCHES)


@loop
def checkpointed_blocks_with_batch_norm() -> str:
    """Recomputation runs BatchNorm a second time, in backward: it counts twice, and a skip takes back both."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(2)
            )
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return promise(of(Recomputed), BATCHES)


@loop
def checkpointed_block_with_a_counter() -> str:
    """The recomputation counts in a Python attribute, too."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.runs = nn.Linear(16, 16), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.linear(x).relu()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Counting(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=True))

        @property
        def runs(self) -> int:
            return self.block.runs

    batches = [(x.requires_grad_(), y) for x, y in pairs(4)]
    return promise(of(Net, "runs"), batches, (normal(8, 16).mul(INF).requires_grad_(), normal(8, 4)))


# -- odd kinds of tensors -----------------------------------------------------------------------------------------


@loop
def tensors_made_in_inference_mode() -> str:
    """A table of features from `torch.inference_mode()`: it has no version counter, and is only read."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(norm=True)
            with torch.inference_mode():
                self.table = torch.ones(16) * 2
            self.register_buffer("scale", torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(1.01)
            return self.net(x * self.table.clone() * self.scale)

    return promise(of(Table, "table"), BATCHES)


@loop
def teacher_that_runs_in_inference_mode() -> str:
    def build() -> Case:
        model, teacher = mlp(norm=True), mlp(norm=True).requires_grad_(False)

        def loss(m: nn.Module, b: Any) -> Tensor:
            with torch.inference_mode():
                aim = teacher(b[0])
            return F.mse_loss(m(b[0]), aim.clone())

        return Case(model, adamw(model), loss, beside=[teacher])

    return promise(build, BATCHES)


@loop
def complex_state_of_a_filter() -> str:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
            self.state, self.head = torch.zeros(9, dtype=torch.cfloat), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x) * self.weight
            self.state = 0.9 * self.state + 0.1 * spectrum.detach().mean(0)
            return self.head(torch.fft.irfft(spectrum - self.state, n=16))

    return promise(of(Filter, "state"), BATCHES)


@loop
def sparse_embedding_with_a_count_of_rows() -> str:
    """Sparse gradients, and a plain tensor that counts how often each row was read."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.reads = nn.Embedding(32, 4, sparse=True), torch.zeros(32, dtype=torch.long)

        def forward(self, ids: Tensor) -> Tensor:
            self.reads.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
            return self.table(ids).mean(1)

    def build() -> Case:
        model = Words()
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
        return Case(model, optimizer, ce, beside=[Seen(lambda: {"reads": model.reads})])

    return promise(build, [(whole(32, 8, 5, seed=i), whole(4, 8, seed=i)) for i in range(4)], SPOIL)


@loop
def tied_weights_normalised_in_forward() -> str:
    """One matrix under two names, written through `.data` in forward."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.table.weight
            self.calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            self.table.weight.data = F.normalize(self.table.weight.data, dim=1)
            self.calls += 1
            return self.head(self.table(ids).mean(1))

    batches = [(whole(16, 8, 5, seed=i), whole(16, 8, seed=i)) for i in range(4)]
    return promise(of(Tied, "calls", loss=ce), batches, SPOIL)


@loop
def attribute_that_is_a_view_of_a_buffer() -> str:
    """`self.head = self.table[:4]`: two names for one memory, of which the attribute is written."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("table", torch.zeros(16))
            self.part = self.table[:4]

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.part.lerp_(out.detach().mean(0), 0.1)
            return out - self.table[:4].clone()

    return promise(of(Views, "part"), BATCHES)


@loop
def expanded_and_empty_tensors_as_attributes() -> str:
    """A stride of zero, no elements at all, a scalar, whole numbers and bools."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.wide, self.empty, self.step = torch.ones(1).expand(4), torch.zeros(0, 4), torch.tensor(0)
            self.seen = torch.zeros(8, dtype=torch.bool)

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x) * self.wide
            self.empty = torch.cat([self.empty, out.detach()[:1]])
            self.step += 1
            self.seen[int(self.step) % 8] = True
            return out

    return promise(of(Odd, "wide", "empty", "step", "seen"), BATCHES)


@loop
def sparse_adjacency_as_an_attribute() -> str:
    """A sparse matrix in a plain attribute, which the layer replaces by its normalized form in the first call."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.ready = nn.Linear(16, 4), False
            self.adjacency = torch.eye(8).to_sparse_coo()

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.adjacency, self.ready = (self.adjacency * 0.5).coalesce(), True
            return self.linear(torch.sparse.mm(self.adjacency, x))

    return promise(of(Graph, "adjacency", "ready"), BATCHES)


@loop
def module_made_in_forward() -> str:
    """A temporary BatchNorm in each call: it comes and goes with the step."""

    class Temporary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = mlp(), 0.0

        def forward(self, x: Tensor) -> Tensor:
            norm = nn.BatchNorm1d(16)
            out = self.net(norm(x))
            self.last = float(norm.running_mean.mean())
            return out

    return promise(of(Temporary, "last"), BATCHES)


@loop
def submodule_swapped_for_a_while_in_forward() -> str:
    """`self.active = self.experts[i]`: a registered module that forward rebinds, chosen by a counter."""

    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(mlp(norm=True) for _ in range(2))
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            return self.experts[self.turn % 2](x)

    return promise(of(Swapping, "turn"), BATCHES, at=(0, 1, 2, 3))


@loop
def lazily_made_attribute() -> str:
    """An attribute that does not exist before the first step, and must not exist after a bad one."""

    class Lazily(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mean"):
                self.mean = x.mean(0)
            return self.net(x - self.mean)

    def build() -> Case:
        model = Lazily()
        return Case(model, adamw(model), mse, beside=[Seen(lambda: {"mean": getattr(model, "mean", None)})])

    return promise(build, BATCHES)


@loop
def input_normalised_in_place_by_the_loss() -> str:
    """`x.sub_(mean)` on the batch of the loop: reported, because the batch belongs to the loop."""
    from benchmarks.loops.harness import findings, limit, require

    torch.manual_seed(0)
    model = mlp()

    def loss(m: nn.Module, b: Any) -> Tensor:
        b[0].sub_(b[0].mean(0)).div_(b[0].std(0) + 1e-6)
        return mse(m, b)

    case = Case(model, adamw(model), loss)
    stepper = case.start()
    trains(case, [(x.clone(), y) for x, y in BATCHES[:2]])
    require("batch.written" in findings(stepper), f"not reported: {findings(stepper)}")
    bad = poisoned(BATCHES[2])
    skips(case, bad)
    trains(case, [(x.clone(), y) for x, y in BATCHES[2:4]])
    return limit("a batch that the step changes in place is reported (`batch.written`)", "reported, and not restored")


@loop
def labels_smoothed_in_place_of_a_clone() -> str:
    """A clone of the batch is no batch: nothing is reported, and everything is as by hand."""

    def build() -> Case:
        def loss(m: nn.Module, b: Any) -> Tensor:
            target = F.one_hot(b[1], 4).float()
            target.mul_(0.9).add_(0.025)
            return F.cross_entropy(m(b[0].clone().sub_(b[0].mean(0))), target)

        model = mlp()
        return Case(model, adamw(model), loss)

    return promise(build, labelled(4))
