"""Modules of torch.jit: scripted, traced and loaded parts of a model, over more than ten updates."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    loop,
    mlp,
    mse,
    named,
    pairs,
    poisoned,
    promise,
    promise_in_three_calls,
    require,
    require_same,
    sgd,
)
from halfstep import GradScaler, Guardian


class Encoder(nn.Module):
    """Its own running mean, a count, and the last activation, all bound anew in each forward pass."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.zeros(width))
        self.calls, self.last = 0, torch.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.last = y.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * self.last
        self.calls += 1
        return y + self.mean


def scripted(module: nn.Module | None = None) -> nn.Module:
    part: Any = torch.jit.script(module or Encoder())
    return part  # type: ignore[no-any-return]


def traced() -> nn.Module:
    part: Any = torch.jit.trace(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), torch.randn(4, 16))
    return part  # type: ignore[no-any-return]


def loaded(module: nn.Module | None = None) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(scripted(module), file)
    file.seek(0)
    part: Any = torch.jit.load(file)
    return part  # type: ignore[no-any-return]


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Attributes in C++, which are neither parameters nor buffers."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in model.named_modules()
        for name in ("calls", "last")
        if hasattr(module, name)
    }


def with_part(part: Callable[[], nn.Module]) -> Case:
    model = nn.Sequential(part(), nn.ReLU(), nn.Linear(16, 4))
    return Case(model, adamw(model), mse, beside=[Seen(partial(attributes_of, model))])


def whole() -> Case:
    model = scripted(nn.Sequential(Encoder(), nn.ReLU(), nn.Linear(16, 4)))
    return Case(model, adamw(model), mse, beside=[Seen(partial(attributes_of, model))])


_PARTS = {"script": scripted, "trace": traced, "load": loaded}
for _name, _part in _PARTS.items():
    named(f"jit_{_name}", partial(promise, partial(with_part, _part), pairs(12), at=(0, 1, 10)), "scripted")
    named(
        f"jit_{_name}_in_three_calls",
        partial(promise_in_three_calls, partial(with_part, _part), pairs(12), at=(0, 1, 10)),
        "scripted",
    )
named("jit_whole_model", partial(promise, whole, pairs(12), at=(0, 1, 10)), "scripted")
named("jit_bf16", partial(promise, partial(with_part, scripted), pairs(12), precision="bf16", at=(0, 10)), "scripted")


@loop
def jit_frozen_encoder() -> str:
    """A loaded encoder in the model that is not trained, and whose statistics still move."""

    def build() -> Case:
        model = nn.Sequential(loaded(), nn.Linear(16, 4))
        for parameter in model[0].parameters():
            parameter.requires_grad_(requires_grad=False)
        return Case(model, sgd(model[1]), mse, beside=[Seen(partial(attributes_of, model))])

    return promise(build, pairs(12), at=(0, 1, 10))


@loop
def jit_teacher_in_the_loss() -> str:
    """A loaded teacher that only the loss function holds."""

    def build() -> Case:
        model, teacher = mlp(16, 16, 4), loaded(nn.Sequential(Encoder(), nn.Linear(16, 4)))

        def loss(m: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                wanted = teacher(batch[0])
            return (m(batch[0]) - wanted).square().mean() + mse(m, batch)

        return Case(model, adamw(model), loss, beside=[teacher, Seen(partial(attributes_of, teacher))])

    return promise(build, pairs(12), at=(0, 1, 10))


@loop
def jit_under_a_guardian() -> str:
    """The diagnosis of a NaN batch names the batch, and the run goes on."""
    torch.manual_seed(0)
    hand, case, said = with_part(loaded), with_part(loaded), list[str]()
    case.model.load_state_dict(hand.model.state_dict())
    guardian = Guardian(case.start(), mode="repair", tell=lambda event: said.append(event.text))
    for i, batch in enumerate(pairs(12)):
        if i in (3, 10):
            require(guardian.step(mse, poisoned(batch)).reason == "loss_not_finite", "a bad batch was applied")
        require(guardian.step(mse, batch).applied, "a good batch was not applied")
        mse(hand.model, batch).backward()
        hand.optimizer.step()
        hand.optimizer.zero_grad()
    require_same(hand.state(), case.state(), "compared with the loop by hand")
    require(len(said) == 2 and all(text.startswith("data: the batch") for text in said), f"{said}")
    return "12 steps bitwise as by hand; 2 verdicts that name the batch"


@loop
def jit_in_a_grad_scaler() -> str:
    """`scaler.include(model)` of a model that takes no hooks."""
    torch.manual_seed(0)
    hand, case, scaler = whole(), whole(), GradScaler("cpu", init_scale=8.0)
    case.model.load_state_dict(hand.model.state_dict())
    scaler.include(case.model)
    for i, batch in enumerate(pairs(12)):
        for bad in (True, False) if i in (0, 1, 10) else (False,):
            before = case.state()
            scaler.scale(mse(case.model, poisoned(batch) if bad else batch)).backward()
            scaler.step(case.optimizer)
            scaler.update()
            case.optimizer.zero_grad()
            if bad:
                require_same(before, case.state(), f"after a skip before step {i}")
        mse(hand.model, batch).backward()
        hand.optimizer.step()
        hand.optimizer.zero_grad()
    require_same(hand.state(), case.state(), "compared with the loop by hand")
    return "12 steps bitwise as by hand; 3 skips bitwise undone"
