"""precision="fp64": a float64 model in a Stepper is the plain float64 loop, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep import Ema, Stepper, Window, choose_precision
from halfstep.errors import PrecisionNotObserved, PrecisionRefused, WrongUse
from halfstep.formats import FP64
from halfstep.precision.hardware import Device, find_format_support
from halfstep.precision.names import parse_precision
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.optimizer_slot import compute_clip_factor


def double_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def counted(model: nn.Module, x: Tensor) -> halfstep.Counted:
    return halfstep.Counted(model(x).square().sum(), 12)


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in pairs)


@pytest.mark.parametrize("clip", [None, 1e-3, 0.3, 1e3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_clipped_steps_are_the_plain_loop(clip: float | None, optimizer: Any) -> None:
    model, plain = double_model(), double_model()
    stepper = Stepper(model, optimizer(model.parameters(), 0.05), precision="fp64", clip_norm=clip)
    own = optimizer(plain.parameters(), 0.05)
    for x in batches(6):
        report = stepper.step(mean_square, x)
        own.zero_grad()
        loss = mean_square(plain, x)
        loss.backward()
        norm = clip_grad_norm_(plain.parameters(), clip or float("inf"))
        own.step()
        assert (report.loss, report.grad_norm, report.loss_scale) == (loss.item(), norm.item(), 1.0)
    assert same_weights(model, plain)
    assert stepper.observed is not None
    assert (stepper.observed.expected, stepper.observed.share) == ("fp64", 1.0)


def test_counted_losses_in_windows_with_an_average_are_the_plain_loop() -> None:
    model, plain = double_model(), double_model()
    ema = Ema(model, 0.9)
    stepper = Stepper(model, torch.optim.Adam(model.parameters(), 0.05), precision="fp64", clip_norm=0.1, ema=ema)
    own = torch.optim.Adam(plain.parameters(), 0.05)
    averages = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for number in range(5):
        two = batches(10)[2 * number : 2 * number + 2]
        stepper.step(counted, Window(two))
        own.zero_grad()
        for x in two:
            (plain(x).square().sum() / 24).backward()
        clip_grad_norm_(plain.parameters(), 0.1)
        own.step()
        for name, p in plain.named_parameters():
            averages[name].lerp_(p.detach(), 1.0 - 0.9)
    assert same_weights(model, plain)
    found = ema.averages()
    assert all(torch.equal(found[name], averages[name]) for name in averages)


def test_a_bad_batch_is_skipped_and_a_run_resumes_to_the_bit() -> None:
    straight = double_model()
    stepper = Stepper(straight, torch.optim.AdamW(straight.parameters(), 0.05), precision="fp64", clip_norm=1.0)
    for x in batches(6):
        assert stepper.step(mean_square, x).applied

    first = double_model()
    one = Stepper(first, torch.optim.AdamW(first.parameters(), 0.05), precision="64-true", clip_norm=1.0)
    for x in batches(6)[:3]:
        one.step(mean_square, x)
    assert not one.step(mean_square, batches(1)[0] * float("nan")).applied
    second = double_model(seed=1)
    two = Stepper(second, torch.optim.AdamW(second.parameters(), 0.05), precision="fp64", clip_norm=1.0)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for x in batches(6)[3:]:
        two.step(mean_square, x)
    assert same_weights(second, straight)


@pytest.mark.parametrize("norm", [1e-9, 0.1, 0.7, 1.0 - 1e-6, 1.0, 3.0, 7.2e19, 1e100])
def test_the_clip_factor_is_torchs_in_float64(norm: float) -> None:
    gradient = torch.tensor([norm], dtype=torch.float64)
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = gradient.clone()
    total = clip_grad_norm_([p], 0.7)
    assert p.grad.item() == (gradient * compute_clip_factor(total.item(), 0.7, FP64)).item()


def test_a_norm_beyond_fp32_is_clipped_not_skipped() -> None:
    model, plain = double_model(), double_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.05), precision="fp64", clip_norm=1.0)
    x = batches(1)[0]
    report = stepper.step(lambda m, x: m(x).square().mean() * 1e60, x)
    (plain(x).square().mean() * 1e60).backward()
    clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), 0.05).step()
    assert report.applied
    assert report.grad_norm > 1e50
    assert same_weights(model, plain)
    assert not stepper.step(lambda m, x: m(x).square().mean() * 1e308 * 1e10, x).applied


def test_one_float64_part_in_an_fp32_model_is_clipped_as_torch_does() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale

    torch.manual_seed(0)
    model = Mixed()
    plain = copy.deepcopy(model)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", clip_norm=0.01)
    own = torch.optim.SGD(plain.parameters(), 0.1)
    for x in batches(5):
        stepper.step(mean_square, x.float())
        own.zero_grad()
        mean_square(plain, x.float()).backward()
        clip_grad_norm_(plain.parameters(), 0.01)
        own.step()
    assert same_weights(model, plain)


# -- names and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["fp64", "FP64", 64, "64", "64-true", "double", "float64", torch.float64, torch.double]
)
def test_the_names_of_fp64(name: Any) -> None:
    choice = choose_precision(name, device="cpu")
    assert choice.precision is resolve_precision_name("fp64")
    assert not choice.precision.casts
    assert not choice.precision.scaled
    assert choice.asked == "fp64"


@pytest.mark.wording
def test_a_recipe_refuses_it_by_name() -> None:
    for word in ("fp64", "64-true", "double"):
        with pytest.raises(PrecisionRefused, match="recipes, commands and GradScaler do not"):
            parse_precision(word)


@pytest.mark.wording
def test_an_fp32_run_of_a_float64_model_says_what_to_type() -> None:
    model = double_model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PrecisionNotObserved, match="ran in fp64 100") as refused:
        stepper.step(mean_square, batches(1)[0])
    assert "precision='fp64'" in refused.value.do
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.wording
def test_a_float32_model_is_refused_for_fp64() -> None:
    model = double_model().float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WrongUse, match=r"fewer than 64 bits: 0\.weight") as refused:
        Stepper(model, optimizer, precision="fp64")
    assert "model.double()" in refused.value.do
    stepper = Stepper(model, optimizer, precision="fp32")
    with pytest.raises(WrongUse, match="fewer than 64 bits"):
        stepper.change_precision("fp64")
    assert stepper.precision.name == "fp32"
    assert stepper.step(mean_square, batches(1)[0].float()).applied


@pytest.mark.wording
@pytest.mark.parametrize(
    ("device", "native"),
    [
        (Device(kind="cpu", name="a CPU"), True),
        (Device(kind="cuda", name="T4", capability=(7, 5)), True),
        (Device(kind="rocm", name="MI300", arch="gfx942"), True),
        (Device(kind="xpu", name="Max 1100", isa=frozenset({"fp64"})), True),
        (Device(kind="xpu", name="Arc A770"), False),
        (Device(kind="mps", name="Apple M3", macos=(15, 0)), False),
        (Device(kind="other", name="npu"), False),
    ],
)
def test_which_devices_have_it(device: Device, native: bool) -> None:
    assert find_format_support(device, "fp64").native == native
    if native:
        assert choose_precision("fp64", device=device).precision.name == "fp64"
        return
    with pytest.raises(PrecisionRefused, match=f"fp64 on {device.name} is refused") as refused:
        choose_precision("fp64", device=device)
    assert "model.float()" in refused.value.do
    assert "strict" not in refused.value.do


def test_auto_never_takes_it() -> None:
    for device in (Device(kind="cpu", name="a CPU"), Device(kind="other", name="npu")):
        assert choose_precision("auto", device=device).precision.name != "fp64"
