"""State that goes from step to step in attributes: hidden states, caches that grow, running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    NAN,
    Case,
    Seen,
    adamw,
    findings,
    flat,
    limit,
    loop,
    mlp,
    normal,
    poisoned,
    promise,
    promise_in_three_calls,
    require,
    require_same,
    sgd,
    skips,
    trains,
)
from halfstep import Window

SERIES = [(normal(3, 5, 8, seed=i),) for i in range(5)]


def attributes(module: Any, *names: str) -> Seen:
    """These attributes, as they are at the moment."""
    return Seen(lambda: {name: getattr(module, name) for name in names})


def small(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def carried(make: Callable[[], nn.Module], *names: str, loss: Any = small) -> Callable[[], Case]:
    def build() -> Case:
        model = make()
        return Case(model, adamw(model), loss, beside=[attributes(model, *names)])

    return build


# -- hidden states ------------------------------------------------------------------------------------------------


class Gru(nn.Module):
    """The hidden state is a plain attribute, None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.h = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2), None

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.rnn(x, self.h)
        self.h = h.detach()
        return self.head(out)


@loop
def hidden_state_as_an_attribute() -> str:
    return promise(carried(Gru, "h"), SERIES)


@loop
def hidden_state_as_an_attribute_over_windows() -> str:
    """Truncated backpropagation with accumulation: the state of a bad window's first micro-batch does not stay."""
    windows = [Window(SERIES[:2]), Window(SERIES[2:4]), Window(SERIES[1:3])]
    return promise(carried(Gru, "h"), windows)


@loop
def hidden_state_as_an_attribute_in_three_calls() -> str:
    return promise_in_three_calls(carried(Gru, "h"), SERIES)


@loop
def lstm_state_as_a_tuple() -> str:
    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.state = nn.LSTM(8, 8, batch_first=True), (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))

        def forward(self, x: Tensor) -> Tensor:
            out, (h, c) = self.rnn(x, self.state)
            self.state = (h.detach(), c.detach())
            return out

    return promise(carried(Lstm, "state"), SERIES)


@loop
def spiking_membranes_of_each_layer() -> str:
    """Membrane potentials as attributes of inner modules, written in place after the first step."""

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.membrane, self.spikes = nn.Linear(8, 8), torch.zeros(3, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.membrane.mul_(0.8).add_(self.linear(x))
                fired = (self.membrane > 1).float()
                self.spikes += int(fired.sum())
                self.membrane.sub_(fired)
            return torch.sigmoid(self.linear(x) + self.membrane)

    def build() -> Case:
        model = nn.Sequential(Spiking(), Spiking())
        beside = [attributes(layer, "membrane", "spikes") for layer in model]
        return Case(model, adamw(model), lambda m, b: m(b[0][:, 0]).square().mean(), beside=beside)

    return promise(build, SERIES)


@loop
def transformer_xl_memories_as_a_tuple() -> str:
    class Memories(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            self.mems: tuple[Tensor, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for i, layer in enumerate(self.layers):
                kept.append(x.detach())
                past = torch.cat([self.mems[i], x], 1) if self.mems else x
                x = x + layer(x, past, past, need_weights=False)[0]
            self.mems = tuple(kept)
            return x

    return promise(carried(Memories, "mems"), SERIES)


@loop
def transformer_xl_memories_as_a_list() -> str:
    """The usual spelling, `self.mems = [...]` rebound to a new list."""

    class Memories(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mems = nn.Linear(8, 8), [torch.zeros(3, 5, 8)]

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x) + self.mems[0]
            self.mems = [out.detach()]
            return out

    return promise(carried(Memories, "mems"), SERIES)


@loop
def hidden_state_of_a_closure() -> str:
    """`nonlocal h`: rebound in a skipped step, which is reported and not restored."""
    torch.manual_seed(0)
    model, h = nn.GRU(8, 8, batch_first=True), torch.zeros(1, 3, 8)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        nonlocal h
        out, new = m(batch[0], h)
        h = new.detach()
        return out.square().mean()

    case = Case(model, adamw(model), loss)
    stepper = case.start()
    trains(case, SERIES[:2])
    skips(case, poisoned(SERIES[2]))
    require("rollback.rebound" in findings(stepper), f"not reported: {findings(stepper)}")
    return limit("rollback.rebound", "a closure's rebound tensor is reported")


@loop
def hidden_state_of_a_plain_object() -> str:
    class Runner:
        def __init__(self) -> None:
            self.h = torch.zeros(1, 3, 8)

        def loss(self, m: nn.Module, batch: Any) -> Tensor:
            out, new = m(batch[0], self.h)
            self.h = new.detach()
            return out.square().mean()

    torch.manual_seed(0)
    model, runner = nn.GRU(8, 8, batch_first=True), Runner()
    case = Case(model, adamw(model), runner.loss)
    stepper = case.start()
    trains(case, SERIES[:2])
    skips(case, poisoned(SERIES[2]))
    require("rollback.rebound" in findings(stepper), f"not reported: {findings(stepper)}")
    return limit("an attribute of a plain object that the loss function uses", "reported, and not restored")


@loop
def hidden_state_of_a_closure_written_in_place() -> str:
    """The same with `h.copy_(new)`: memory from before the step, which is restored."""

    def build() -> Case:
        model, h = nn.GRU(8, 8, batch_first=True), torch.zeros(1, 3, 8)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            out, new = m(batch[0], h.clone())
            h.copy_(new.detach())
            return out.square().mean()

        return Case(model, adamw(model), loss, beside=[h])

    return promise(build, SERIES)


# -- caches that grow ---------------------------------------------------------------------------------------------


class Cached(nn.Module):
    """Keys and values of all steps so far, preallocated, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.filled = nn.Linear(8, 24), 0
        self.keys, self.values = torch.zeros(3, 64, 8), torch.zeros(3, 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        end = self.filled + x.shape[1]
        self.keys[:, self.filled : end], self.values[:, self.filled : end] = k.detach(), v.detach()
        self.filled = end
        return F.scaled_dot_product_attention(q, self.keys[:, :end].clone(), self.values[:, :end].clone())


@loop
def key_value_cache_preallocated() -> str:
    return promise(carried(Cached, "keys", "values", "filled"), SERIES)


@loop
def key_value_cache_appended() -> str:
    class Appended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.keys = nn.Linear(8, 24), None

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            self.keys = k.detach() if self.keys is None else torch.cat([self.keys, k.detach()], 1)
            return F.scaled_dot_product_attention(q, self.keys, self.keys) + v

    return promise(carried(Appended, "keys"), SERIES)


class Rotary(nn.Module):
    """Cosines and sines for the longest sequence so far: built when a longer one comes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.longest, self.cos, self.sin = nn.Linear(8, 8), 0, None, None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.longest:
            angle = torch.arange(length)[:, None] * 0.1 ** torch.arange(4)
            self.cos, self.sin, self.longest = angle.cos(), angle.sin(), length
        one, two = self.proj(x).chunk(2, -1)
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)


@loop
def rotary_cache_that_grows() -> str:
    """The bad batch is the longest so far: the table it built goes, and is built again by the next long one."""
    series = [(normal(3, length, 8, seed=length),) for length in (5, 4, 9, 7, 12)]
    return promise(carried(Rotary, "cos", "sin", "longest"), series, (normal(3, 16, 8) * NAN,), at=(0, 1, 3))


@loop
def rotary_cache_kept_by_a_dict() -> str:
    """Tables in a dict by length: a container, but what is added in a skipped step is the same in any other."""

    class ByLength(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.tables = nn.Linear(8, 8), {}

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            if length not in self.tables:
                self.tables[length] = torch.arange(length)[:, None] * torch.ones(8)
            return self.proj(x) + self.tables[length].cos()

    series = [(normal(3, length, 8, seed=length),) for length in (5, 4, 9)]
    return promise(carried(ByLength), series, (normal(3, 16, 8) * NAN,))


@loop
def causal_mask_made_when_first_needed() -> str:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mask = nn.MultiheadAttention(8, 2, batch_first=True), None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or len(self.mask) != x.shape[1]:
                self.mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]

    return promise(carried(Masked, "mask"), SERIES, (normal(3, 7, 8) * NAN,))


@loop
def dropout_mask_shared_by_all_steps() -> str:
    """Variational dropout: one mask, drawn in the first step that runs, kept as an attribute."""

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mask, self.uses = nn.Linear(8, 8), None, 0

        def forward(self, x: Tensor) -> Tensor:
            if self.uses % 2 == 0:
                self.mask = torch.bernoulli(torch.full((8,), 0.5)) * 2
            self.uses += 1
            return self.linear(x) * self.mask

    return promise(carried(Locked, "mask", "uses"), SERIES)


# -- running statistics -------------------------------------------------------------------------------------------


class RunningMeanStd:
    """A plain object as every RL code base has it; its tensors are written in place."""

    def __init__(self, width: int) -> None:
        self.mean, self.var, self.count = torch.zeros(width), torch.ones(width), torch.tensor(1e-4)

    def __call__(self, x: Tensor) -> Tensor:
        delta, n = x.mean(0) - self.mean, len(x)
        total = self.count + n
        self.mean.add_(delta * n / total)
        self.var.mul_(self.count / total).add_(x.var(0) * n / total)
        self.count.copy_(total)
        return (x - self.mean) / (self.var + 1e-8).sqrt()


@loop
def observation_statistics_of_a_plain_object() -> str:
    def build() -> Case:
        model, running = mlp(8, 8, 2), RunningMeanStd(8)
        beside = [Seen(lambda: vars(running))]
        return Case(model, adamw(model), lambda m, b: m(running(b[0][:, 0])).square().mean(), beside=beside)

    return promise(build, SERIES)


@loop
def observation_statistics_rebound() -> str:
    """`self.mean = self.mean + ...` on a plain object: reported, and `include()` is the remedy."""

    class Rebinding(RunningMeanStd):
        def __call__(self, x: Tensor) -> Tensor:
            self.mean = self.mean + 0.1 * (x.mean(0) - self.mean)
            return x - self.mean

        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mean = state["mean"]

    torch.manual_seed(0)
    reported = set()
    for include in (False, True):
        model, running = mlp(8, 8, 2), Rebinding(8)
        case = Case(model, adamw(model), lambda m, b, r=running: m(r(b[0][:, 0])).square().mean())
        stepper = case.start()
        if include:
            stepper.include(running)
            case.beside = [running]
        trains(case, SERIES[:2])
        skips(case, poisoned(SERIES[2]))
        if not include:
            reported = findings(stepper)
    require("rollback.rebound" in reported, f"not reported: {reported}")
    return limit("reports the finding `rollback.rebound`", "reported without include(), restored with it")


@loop
def statistics_of_activations_by_hooks() -> str:
    """Forward hooks that keep minima and maxima in a dict of tensors, as calibration code does."""

    def build() -> Case:
        model = mlp(8, 8, 2)
        ranges = {name: torch.tensor([1e9, -1e9]) for name, m in model.named_modules() if isinstance(m, nn.Linear)}

        def watch(name: str) -> Callable[..., None]:
            def hook(_m: nn.Module, _i: Any, out: Tensor) -> None:
                low, high = out.detach().aminmax()
                ranges[name][0] = torch.minimum(ranges[name][0], low)
                ranges[name][1] = torch.maximum(ranges[name][1], high)

            return hook

        for name in ranges:
            model.get_submodule(name).register_forward_hook(watch(name))
        return Case(model, sgd(model), lambda m, b: m(b[0][:, 0]).square().mean(), beside=[ranges])

    return promise(build, SERIES)


@loop
def running_power_of_the_input_in_a_module_in_a_list() -> str:
    """A helper module that is in no `nn.Module`, with a tensor attribute that is rebound."""

    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.power, self.steps, self.mode = torch.ones(()), 0, "warm"

        def forward(self, x: Tensor) -> Tensor:
            self.power = 0.9 * self.power + 0.1 * x.detach().square().mean()
            self.steps += 1
            self.mode = "warm" if self.steps < 3 else "steady"
            return x / self.power.sqrt()

    def build() -> Case:
        model, helpers = mlp(8, 8, 2), [Power()]
        seen = attributes(helpers[0], "power", "steps", "mode")
        return Case(model, adamw(model), lambda m, b: m(helpers[0](b[0][:, 0])).square().mean(), beside=[seen])

    return promise(build, SERIES, at=(0, 1, 3))


@loop
def evaluation_between_steps_keeps_its_state() -> str:
    """What an evaluation writes between steps is no part of a step: a skip after it does not take it back."""
    torch.manual_seed(0)
    model = Gru()
    case = Case(model, adamw(model), small, beside=[attributes(model, "h")])
    stepper = case.start()
    trains(case, SERIES[:2])
    with stepper.evaluating() as net:
        net(SERIES[4][0])
    kept = dict(flat(attributes(model, "h")))
    skips(case, poisoned(SERIES[2]))
    require_same(kept, dict(flat(attributes(model, "h"))), "what the evaluation left")
    trains(case, SERIES[2:3])
    return "the hidden state of the evaluation is what the skip came back to"
