"""Modules of torch.jit in a model: scripted, traced and loaded ones, in all forms of a step and under a Guardian."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import Ema, Guardian, Stepper
from halfstep.errors import PrecisionRefused, WrongUse
from halfstep.measure.profile.operations import find_layer_channels
from tests.support.digest import digest_of
from tests.support.ranks import Ranks

# torch.jit is deprecated, and still in use.
pytestmark = pytest.mark.filterwarnings("ignore")
NAN, STEPS = math.nan, 13


class Part(nn.Module):
    """A layer with statistics that are written in place, a buffer and attributes that are bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.warm, self.last = 0, True, torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.last = y.detach().mean(0)
        self.calls += 1
        self.warm = False
        return y + self.mean


def traced() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    example: Any = torch.jit.trace(layers, torch.randn(4, 8))
    return example  # type: ignore[no-any-return]


def loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Part()), file)
    file.seek(0)
    return torch.jit.load(file)


def frozen() -> nn.Module:
    teacher = loaded()
    for parameter in teacher.parameters():
        parameter.requires_grad_(requires_grad=False)
    return teacher


def part_of(kind: Callable[[], Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), kind(), nn.ReLU(), nn.Linear(8, 1))


def optimized() -> nn.Module:
    """Without attributes: they are constants."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    return torch.jit.optimize_for_inference(torch.jit.script(layers))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: part_of(lambda: torch.jit.script(Part())),
    "trace": lambda: part_of(traced),
    "load": lambda: part_of(loaded),
    "frozen": lambda: part_of(frozen),
    "optimized": lambda: part_of(optimized),
    "whole": lambda: torch.jit.script(part_of(Part)),
}
every_kind = pytest.mark.parametrize("kind", list(MODELS))


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def mse(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def batch(step: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x * NAN if bad else x


def state(model: nn.Module) -> str:
    """Weights, buffers, and the attributes of torch.jit modules."""
    attributes = {
        path: {name: getattr(module, name) for name in ("calls", "warm", "last") if hasattr(module, name)}
        for path, module in model.named_modules()
    }
    return digest_of(dict(model.named_parameters()), dict(model.named_buffers()), attributes)


def by_hand(kind: str) -> str:
    model = build(kind)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        mse(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def steps_of(form: str, stepper: Stepper) -> Callable[[Tensor], Any]:
    def in_three_calls(x: Tensor) -> Any:
        with stepper.forward():
            loss = mse(stepper.model, x)
        stepper.backward(loss)
        return stepper.apply()

    return in_three_calls if form == "three calls" else lambda x: stepper.step(mse, x)


@every_kind
@pytest.mark.parametrize("form", ["function", "three calls"])
def test_bad_batches_change_nothing_over_more_than_ten_updates(form: str, kind: str) -> None:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="fp32")
    step = steps_of(form, stepper)
    for place in range(STEPS):
        if place in (0, 1, 9, 10, 11):
            before = state(model)
            assert step(batch(place, bad=True)).reason == "loss_not_finite"
            assert state(model) == before, f"after a skip before update {place + 1}"
        assert step(batch(place)).applied
    assert state(model) == by_hand(kind)
    assert not stepper.findings


@every_kind
@pytest.mark.parametrize("mode", ["watch", "repair"])
def test_a_guardian_examines_a_failed_step(mode: Any, kind: str) -> None:
    model, events = build(kind), list[str]()
    guardian = Guardian(
        Stepper(model, optimizer_of(model), precision="fp32"), mode=mode, tell=lambda event: events.append(event.text)
    )
    for place in range(STEPS):
        if place in (3, 11):
            assert guardian.step(mse, batch(place, bad=True)).reason == "loss_not_finite"
        assert guardian.step(mse, batch(place)).applied
    assert state(model) == by_hand(kind)
    assert len([event for event in events if event.startswith("data: the batch, sample 0 contains nan")]) == 2


@every_kind
def test_a_repair_rolls_buffers_back_with_the_weights(kind: str) -> None:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="fp32")
    guardian = Guardian(
        stepper, mode="repair", limits=halfstep.Limits(keep_every=1, skips_in_a_row=4), tell=lambda _: None
    )
    assert guardian.step(mse, batch(0)).applied
    assert guardian.step(mse, batch(1)).applied
    guardian._snapshot.restore()
    # The copy is from before the last update, and its buffers from before the last forward pass.
    assert state_but_attributes(model) == digest_after_one(kind)


def state_but_attributes(model: nn.Module) -> str:
    return digest_of(dict(model.named_parameters()), dict(model.named_buffers()))


def digest_after_one(kind: str) -> str:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="fp32")
    assert stepper.step(mse, batch(0)).applied
    return state_but_attributes(model)


@every_kind
def test_an_average_is_exchanged_for_the_weights_and_back(kind: str) -> None:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="fp32", ema=Ema(model, 0.5))
    for place in range(3):
        assert stepper.step(mse, batch(place)).applied
    before = state(model)
    with stepper.evaluating(ema=True) as averaged, torch.no_grad():
        assert state_but_attributes(averaged) != before
        assert math.isfinite(mse(averaged, batch(9)))
    assert dict(model.state_dict()).keys() == dict(build(kind).state_dict()).keys()
    again = build(kind)
    other = Stepper(again, optimizer_of(again), precision="fp32", ema=Ema(again, 0.5))
    again.load_state_dict(model.state_dict())
    other.load_state_dict(stepper.state_dict())
    assert other.step(mse, batch(3)).applied


@every_kind
def test_the_start_check_compares_what_it_can(kind: str) -> None:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="bf16", check=True)
    for place in range(2):
        assert stepper.step(mse, batch(place)).applied
    assert {finding.id for finding in stepper.findings} <= {"precision.slow", "start.not_checked"}


@every_kind
def test_a_grad_scaler_restores_an_included_module(kind: str) -> None:
    model = build(kind)
    optimizer, scaler = optimizer_of(model), halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.include(model)
    for place in range(STEPS):
        for bad in (True, False) if place in (0, 1, 9) else (False,):
            before = state(model)
            scaler.scale(mse(model, batch(place, bad=bad))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if bad:
                assert state(model) == before, f"after a skip before update {place + 1}"
    assert state(model) == by_hand(kind)


@every_kind
def test_weights_in_16_bits_leave_torch_jit_modules_in_fp32(kind: str) -> None:
    model = build(kind)
    stepper = Stepper(model, optimizer_of(model), precision="bf16", weight_format="bf16-split")
    for place in range(STEPS):
        if place in (1, 10):
            before = state(model)
            assert not stepper.step(mse, batch(place, bad=True)).applied
            assert state(model) == before
        assert stepper.step(mse, batch(place)).applied
    narrow = [name for name, p in model.named_parameters() if p.dtype is torch.bfloat16]
    assert narrow == ([] if kind == "whole" else ["0.weight", "0.bias", "3.weight", "3.bias"])


@every_kind
def test_a_traced_module_is_observed_in_its_second_run(kind: str) -> None:
    """Each optimizer of a GAN has its first step observed, so the model runs twice under a recorder."""
    model = nn.ModuleDict({"g": build(kind), "d": nn.Linear(1, 1)})
    optimizers = {name: torch.optim.SGD(list(model[name].parameters()), 1e-2) for name in ("g", "d")}
    stepper = Stepper(model, optimizers, precision="bf16")
    for name in ("g", "d", "g", "d"):
        report = stepper.step(lambda m, x: mse(nn.Sequential(m["g"], m["d"]), x), batch(0), only=name)
        assert report.applied
    assert stepper.observed is not None


def test_what_a_torch_jit_module_cannot_be_is_refused() -> None:
    with pytest.raises(WrongUse):
        halfstep.island(build("whole"), "1.norm")
    with pytest.raises(WrongUse):
        halfstep.island(build("script"), "1")
    model = build("whole")
    with pytest.raises(PrecisionRefused):
        Stepper(model, optimizer_of(model), precision="fp8")


def test_layers_of_torch_jit_are_no_known_matrix_products() -> None:
    model = build("load")
    found = {path: find_layer_channels(module) for path, module in model.named_modules()}
    assert {path for path, pair in found.items() if pair} == {"0", "3"}


def test_a_compiled_module_next_to_a_scripted_one_is_found() -> None:
    from halfstep.observe.recorder import list_compiled_modules

    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    compiled: Any = model[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled.compile(backend="eager")
    assert list_compiled_modules(model) == ["1"]


def on_two(rank: int, kind: str, form: str) -> tuple[str, int]:
    model = build(kind)
    whole = DistributedDataParallel(model) if form == "three calls" else model
    stepper = Stepper(whole, optimizer_of(model), precision="fp32")
    step = steps_of(form, stepper)
    for place in range(STEPS):
        if place in (0, 10):
            assert not step(batch(place, bad=rank == 1)).applied
        assert step(batch(place)).applied
    return state_but_attributes(model), stepper.counts.applied


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["script", "trace"])
@pytest.mark.parametrize("form", ["function", "three calls"])
def test_two_ranks_end_where_one_ends(on_ranks: Ranks, form: str, kind: str) -> None:
    torch.manual_seed(0)
    alone = build(kind)
    stepper = Stepper(alone, optimizer_of(alone), precision="fp32")
    for place in range(STEPS):
        assert stepper.step(mse, batch(place)).applied
    # Both ranks have the same batches, so that the mean of their gradients is that of one.
    assert on_ranks(on_two, kind, form) == [(state_but_attributes(alone), STEPS)] * 2
