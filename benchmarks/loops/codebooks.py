"""Layers that set themselves up from the first batches: flags, counters and temperatures in Python attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    SPOIL,
    Case,
    Seen,
    adamw,
    loop,
    mlp,
    normal,
    promise,
    promise_in_three_calls,
    sgd,
)

INPUTS = [(normal(16, 16, seed=i) + 1.0,) for i in range(6)]


def reconstruct(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def built(make: Callable[[], Any], *read: str, lr: float = 1e-2) -> Callable[[], Case]:
    """A model whose named modules have these attributes, `path.attribute` each."""

    def build() -> Case:
        model = make()

        def seen() -> dict[str, Any]:
            values = {}
            for path in read:
                owner, _, name = path.rpartition(".")
                values[path] = getattr(model.get_submodule(owner), name)
            return values

        return Case(model, adamw(model, lr), reconstruct, beside=[Seen(seen)])

    return build


class Codebook(nn.Module):
    """Codes begin as samples of the first batch (`initted`), and are taken anew from a batch when nobody uses them."""

    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        self.initted, self.expired, self.threshold = False, 0, 1.0
        self.register_buffer("embed", torch.zeros(codes, 8))
        self.usage = torch.ones(codes)

    @torch.no_grad()
    def learn(self, z: Tensor, index: Tensor) -> None:
        chosen = F.one_hot(index, len(self.embed)).float()
        self.usage = 0.6 * self.usage + 0.4 * chosen.sum(0)
        self.embed.lerp_((chosen.T @ z) / (chosen.sum(0)[:, None] + 1e-5), 0.1)
        dead = self.usage < self.threshold
        if bool(dead.any()):
            self.embed[dead] = z[torch.randint(len(z), (int(dead.sum()),))]
            self.usage[dead] = 1.0
            self.expired += int(dead.sum())

    def forward(self, z: Tensor) -> Tensor:
        z = z.float()
        if not self.initted:
            self.embed.copy_(z[: len(self.embed)].detach())
            self.initted = True
        index = torch.cdist(z, self.embed).argmin(1)
        quantised = self.embed[index]
        self.learn(z.detach(), index)
        return z + (quantised - z).detach()


class Quantised(nn.Module):
    def __init__(self, quantiser: nn.Module) -> None:
        super().__init__()
        self.encoder, self.vq, self.decoder = mlp(16, 16, 8), quantiser, mlp(8, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        q = self.vq(z)
        return F.mse_loss(self.decoder(q), x) + 0.25 * F.mse_loss(z, q.detach())


STATE = ("vq.initted", "vq.expired", "vq.usage")


@loop
def codebook_from_the_first_batch() -> str:
    """The first batch is bad: the codes must not begin as NaN with `initted` set."""
    return promise(built(lambda: Quantised(Codebook()), *STATE), INPUTS)


@loop
def codebook_from_the_first_batch_in_three_calls() -> str:
    """The same with forward, backward and apply."""

    class Deterministic(Codebook):
        def learn(self, z: Tensor, index: Tensor) -> None:
            self.usage = 0.6 * self.usage + 0.4 * F.one_hot(index, len(self.embed)).float().sum(0)
            self.expired += 1

    return promise_in_three_calls(built(lambda: Quantised(Deterministic()), *STATE), INPUTS)


@loop
def residual_codebooks_in_a_module_list() -> str:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = nn.ModuleList(Codebook(4) for _ in range(3)), 0

        def forward(self, z: Tensor) -> Tensor:
            total, rest = torch.zeros_like(z), z
            for layer in self.layers:
                q = layer(rest)
                total, rest = total + q, rest - q.detach()
            self.calls += 1
            return total

    read = ["vq.calls", *(f"vq.layers.{i}.{name}" for i in range(3) for name in ("initted", "expired", "usage"))]
    return promise(built(lambda: Quantised(Residual()), *read), INPUTS)


@loop
def gumbel_temperature_that_anneals() -> str:
    class Gumbel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.temperature, self.hard = nn.Parameter(torch.randn(8, 8)), 2.0, False

        def forward(self, z: Tensor) -> Tensor:
            weights = F.gumbel_softmax(z, tau=self.temperature, hard=self.hard)
            self.temperature = max(0.5, self.temperature * 0.7)
            self.hard = self.temperature < 0.8
            return weights @ self.codes

    return promise(built(lambda: Quantised(Gumbel()), "vq.temperature", "vq.hard"), INPUTS, at=(0, 1, 3))


class ActNorm(nn.Module):
    """Glow: scale and bias are set from the first batch, parameters that forward writes once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.inited = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.inited:
            with torch.no_grad():
                self.bias.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            self.inited = True
        return (x + self.bias) * self.scale


@loop
def act_norm_set_from_the_first_batch() -> str:
    """A bad first batch: neither NaN scales nor a flag that says that they are set."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mix, self.second = ActNorm(16), nn.Linear(16, 16), ActNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.mix(self.first(x))).square().mean()

    return promise(built(Flow, "first.inited", "second.inited"), INPUTS)


@loop
def weights_scaled_by_the_first_batch() -> str:
    """Data-dependent initialization of LSQ: a step size is set from the first weights and inputs, once."""

    class Lsq(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 8)
            self.step, self.ready = nn.Parameter(torch.ones(())), False

        def forward(self, x: Tensor) -> Tensor:
            if self.training and not self.ready:
                self.step.data = 2 * x.detach().abs().mean() / 7**0.5
                self.ready = True
            rounded = (x / self.step).clamp(-8, 7)
            rounded = rounded + (rounded.round() - rounded).detach()
            return super().forward(rounded * self.step)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = Lsq()

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x).square().mean()

    return promise(built(Net, "q.ready"), INPUTS)


@loop
def fake_quantisation_of_torch() -> str:
    """`torch.ao`: observers keep minima and maxima, and are switched off by the model after four steps."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantise = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
            self.body, self.calls = mlp(16, 16, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 4:
                self.quantise.disable_observer()
            return self.body(self.quantise(x)).square().mean()

    return promise(built(Net, "calls"), INPUTS, SPOIL, at=(0, 1, 3))


@loop
def stochastic_depth_by_a_counter() -> str:
    """Rates that rise with a counter of the block; which blocks run comes from it."""

    class Block(nn.Module):
        def __init__(self, every: int) -> None:
            super().__init__()
            self.body, self.every, self.seen = nn.Linear(16, 16), every, 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x if self.seen % self.every == 0 else x + self.body(x).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.Sequential(Block(2), Block(3)), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x)).square().mean()

    return promise(built(Net, "blocks.0.seen", "blocks.1.seen"), INPUTS, at=(0, 1, 2, 4))


@loop
def mixture_of_experts_load_of_plain_attributes() -> str:
    """Routing bias without a loss (DeepSeek-V3): loads in a tensor attribute, the bias moved by their sign."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.load, self.bias, self.tokens = torch.zeros(4), torch.zeros(4), 0

        def forward(self, x: Tensor) -> Tensor:
            score = self.gate(x).sigmoid()
            best = (score + self.bias).argmax(1)
            self.load.add_(F.one_hot(best, 4).sum(0))
            self.tokens += len(x)
            self.bias = self.bias + 0.01 * torch.sign(self.load.mean() - self.load)
            out = torch.stack([expert(x) for expert in self.experts], 1)
            picked = out.gather(1, best[:, None, None].expand(-1, 1, 16))[:, 0]
            return (picked * score.gather(1, best[:, None])).square().mean()

    def build() -> Case:
        model = Router()
        seen = Seen(lambda: {"load": model.load, "bias": model.bias, "tokens": model.tokens})
        return Case(model, sgd(model), reconstruct, beside=[seen])

    return promise(build, INPUTS, SPOIL)
